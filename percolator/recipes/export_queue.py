"""Carries values out of the store: to files, another database, a stream.

An observer must have no effects outside of its transaction, since it may run again. An exporter is
the exception: it is called with values that were put by committed transactions, until it returns
without an error. Sequence numbers let its effects be exactly once.

    orders = ExportQueue("orders out", key=codecs.text, value=codecs.json)

    orders.create(db)                               # once
    orders.put(tx, "ann", {"order": 17})            # in any transaction, and any observer

    @orders.exporter(batch=500)                     # run by a worker
    def send(exports): ...
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from inspect import iscoroutinefunction
from typing import Any, Generic, NamedTuple, TypeVar, overload

from percolator import aio
from percolator.arguments import require_function
from percolator.blocking.transaction import Transaction
from percolator.codecs import Codec, KeyCodec
from percolator.either import (
    AsyncReads,
    BlockingReads,
    on_reads,
    on_transaction,
)
from percolator.observers.definition import ATTEMPTS, DEADLINE_SECONDS, Observer
from percolator.recipes.queue import BATCH_BYTES, Queue, require_batch
from percolator.schema import decoded_value

K = TypeVar("K")
V = TypeVar("V")

OBSERVER_NAME = "export"
BATCH = 500
_PLACE_BITS = 32


class Export(NamedTuple, Generic[K, V]):
    """A value that was put for a key. Later puts of the key have higher sequence numbers."""

    key: K
    sequence: int
    """Less than 2 ** 96. Numbers are in the order of commits, and have gaps."""
    value: V


class _Entry(NamedTuple):
    sequence: int
    row: bytes
    value: bytes


class ExportQueue(Queue[K, V]):
    """Exports values by key, in the order in which they were committed.

    Guarantees:

    - What a transaction puts is exported if and only if it commits.
    - In each call of the exporter, the sequence numbers of a key ascend, and follow the order of
      commits. No number is skipped: when one arrives for the first time, all lower ones of its key
      have arrived, in this call or in one that has returned.
    - Each export arrives at least once: again if a worker dies, or a call fails. An old call may
      still be at work while a new one begins, for instance when it takes longer than `deadline`.

    So the effect is exactly once if the receiver stores the last number of each key together with
    the effect, and leaves out what is not higher. `ExportFile` and `ExportedOnce` do that.

    Keys are independent of each other. Use one key for everything that needs one order. Programs
    may use different numbers of `buckets` at the same time, so the number can be changed in
    operation; it says how many calls can be at work at once.
    """

    def __init__(self, name: str, *, key: KeyCodec[K], value: Codec[V], buckets: int = 16) -> None:
        """`name` is the name of the queue's table, which nothing else may write."""
        super().__init__(name, key, value, buckets, has_values=False)

    # ------------------------------------------------------------------ putting

    @overload
    def put(self, tx: aio.Transaction, key: K, value: V) -> Coroutine[Any, Any, None]: ...
    @overload
    def put(self, tx: Transaction, key: K, value: V) -> None: ...
    def put(self, tx: Any, key: K, value: V) -> Any:
        """Exports a value, once this transaction has committed. It conflicts with nothing."""
        return on_transaction(tx, self._enter, key, value)

    @overload
    def pending(self, reads: AsyncReads) -> Coroutine[Any, Any, int]: ...
    @overload
    def pending(self, reads: BlockingReads) -> int: ...
    def pending(self, reads: Any) -> Any:
        """How many values are waiting to be exported. It counts them one by one."""
        return on_reads(reads, self._count)

    async def _count(self, reads: AsyncReads) -> int:
        entries = self._rows.all_entries()
        count = 0
        async for _ in reads.scan(self.table, prefix=entries, columns=[self._entry]):
            count += 1
        return count

    def key_bytes(self, key: K) -> bytes:
        """The key as bytes, by which receivers may tell keys apart."""
        return self._rows.part(key)

    # ------------------------------------------------------------------ exporting

    def exporter(
        self,
        *,
        batch: int = BATCH,
        deadline: float = DEADLINE_SECONDS,
        attempts: int = ATTEMPTS,
        pause: float = 0.0,
    ) -> Callable[[Callable[[Sequence[Export[K, V]]], Any]], Observer]:
        """Turns a function of exports, blocking or asynchronous, into the queue's observer.

        It is called with `batch` exports of one bucket at most. Once it has returned, they are
        removed from the queue. If it raises, it is called again, and after `attempts` calls there
        is a dead letter for the bucket, which waits until something is put there. A queue has one
        exporter. `deadline`, `attempts` and `pause` are those of `percolator.observes`: with a
        pause, batches are larger, and later.
        """
        require_batch(batch)

        def decorate(function: Callable[[Sequence[Export[K, V]]], Any]) -> Observer:
            require_function(function, "function")

            async def export(tx: aio.Transaction, bucket: bytes) -> None:
                if exports := await self._take(tx, bucket, batch):
                    await function(exports)

            def export_blocking(tx: Transaction, bucket: bytes) -> Any:  # noqa: ANN401 - the user's
                exports = on_transaction(tx, self._take, bucket, batch)
                # What it returns is checked: a coroutine would not have been run.
                return function(exports) if exports else None

            run = export if iscoroutinefunction(function) else export_blocking
            return self._observer_of(
                run, OBSERVER_NAME, deadline=deadline, attempts=attempts, pause=pause
            )

        return decorate

    def _definition(self) -> Observer:
        return self.exporter()(_nothing)

    async def _take(self, tx: aio.Transaction, bucket: bytes, batch: int) -> list[Export[K, V]]:
        """Removes the first entries of some keys of a bucket, in this transaction."""
        exports: list[Export[K, V]] = []
        rows: list[bytes] = []
        size, is_cut = 0, False
        async with aclosing(self._by_key(tx, bucket, batch)) as by_key:
            async for part, entries, were_imported in by_key:
                key = self._rows.key(part)
                if were_imported:
                    await self._enter_again(tx, key, entries[:batch])
                    await tx.notify(bucket, self._wake)
                    return []
                for entry in entries:
                    is_cut = len(exports) == batch or size > BATCH_BYTES
                    if is_cut:
                        break
                    exports.append(Export(key, entry.sequence, self._value_of(entry)))
                    rows.append(entry.row)
                    size += len(entry.value)
                if is_cut:
                    await tx.notify(bucket, self._wake)
                    break
        # In one call: each call of an observer's transaction is timed.
        await tx.internal.write_together([], [(row, self._entry) for row in rows])
        return exports

    async def _enter_again(self, tx: aio.Transaction, key: K, entries: Sequence[_Entry]) -> None:
        """Replaces imported entries by new ones, for the next run.

        An import gives the entries of all transactions one commit timestamp, and so the same
        numbers: a receiver would leave out all but the first.
        """
        for entry in entries:
            await tx.delete(entry.row, self._entry)
            await self._enter(tx, key, self._value_of(entry))

    def _value_of(self, entry: _Entry) -> V:
        return decoded_value(self._entry, entry.row, entry.value)

    async def _by_key(
        self, tx: aio.Transaction, bucket: bytes, batch: int
    ) -> AsyncGenerator[tuple[bytes, list[_Entry], bool], None]:
        """The first entries of each key, and one more than a call can be given; and whether there
        are entries of several transactions with the same commit timestamp.

        Rows are in the order in which transactions began. They are exported in that of commits:
        what commits after this snapshot then comes after everything in it.
        """
        part, entries, size = b"", list[_Entry](), 0
        were_imported, start, commit = False, 0, 0
        first, last = self._rows.entries_of(bucket)
        pages = tx.internal.found_pages(self.table, first, last, [self._entry])
        async with aclosing(pages):
            async for page in pages:
                for row, cells in page:
                    if self._rows.part_of_entry(row) != part:
                        if entries:
                            yield part, _first(entries, batch), were_imported
                        part, entries, size = self._rows.part_of_entry(row), [], 0
                        were_imported, start, commit = False, 0, 0
                    found = cells[self._entry.name]
                    before, start = (start, commit), self._rows.start_of_entry(row)
                    commit = found.commit_timestamp
                    were_imported |= start != before[0] and commit == before[1]
                    sequence = self._sequence(row, commit)
                    entries.append(_Entry(sequence, row, found.value or b""))
                    size += len(entries[-1].value)
                    if len(entries) > 2 * (batch + 1) or size > 2 * BATCH_BYTES:
                        entries = _first(entries, batch)
                        size = sum(len(entry.value) for entry in entries)
        if entries:
            yield part, _first(entries, batch), were_imported

    def _sequence(self, row: bytes, commit_timestamp: int) -> int:
        return (commit_timestamp << _PLACE_BITS) + self._rows.place_of_entry(row)


def _first(entries: list[_Entry], batch: int) -> list[_Entry]:
    """The first entries in order, as many as a call can be given, and one more if there are more.

    Not more, or the values of one busy key would fill the worker's memory.
    """
    first, size = list[_Entry](), 0
    # Those of one transaction are in the order of their places, and so of their rows.
    for entry in sorted(entries, key=lambda one: (one.sequence >> _PLACE_BITS, one.row)):
        first.append(entry)
        if len(first) > batch or size > BATCH_BYTES:
            break
        size += len(entry.value)
    return first


def _nothing(exports: object) -> None:
    """Only defines the observer; it is not run."""
