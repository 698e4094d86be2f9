"""Values that many transactions add to, without conflicts.

A value that all transactions read and write is a bottleneck, since only one of those that collide
commits. Here each of them only adds an entry, and one observer combines the entries of many.

    visits = CombineQueue("visits", key=codecs.text, value=codecs.integer, combine=sum)

    visits.create(db)               # once
    visits.add(tx, "page-7", 1)     # in any transaction, and any observer
    visits.get(snapshot, "page-7")  # the sum of all that was added

    @visits.changed                 # run by a worker
    async def show(tx, changes): ...
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from inspect import iscoroutinefunction
from typing import Any, Generic, NamedTuple, TypeVar, overload

from percolator import aio
from percolator.arguments import require_function
from percolator.blocking.api import Transaction
from percolator.codecs import Codec, KeyCodec
from percolator.decorators import AsyncReads, BlockingReads, on_reads, on_transaction
from percolator.observers.definition import ATTEMPTS, DEADLINE_SECONDS, Observer
from percolator.recipes.queue import BATCH_BYTES, Queue, require_batch
from percolator.schema import Column, Row, encoded_value

K = TypeVar("K")
V = TypeVar("V")

OBSERVER_NAME = "combine"
BATCH = 5_000
PAUSE_SECONDS = 0.1
BUCKETS = 4
"""Few, since one run that combines much costs less than several that combine little."""
_VALUES_AT_ONCE = 1_000
"""The most values that are read at once."""


class KeyChange(NamedTuple, Generic[K, V]):
    """A key whose value has changed. None: it had no value before, or has none now."""

    key: K
    old: V | None
    new: V | None


Changed = Callable[[Any, Sequence[KeyChange[K, V]]], Any]
"""A function of a transaction and changes, blocking or asynchronous."""


class CombineQueue(Queue[K, V]):
    """Combines values by key, without conflicts between those that add them.

    `combine` makes one value of several, such as `sum` or `max`; None stands for no value. It may
    be given them in any order and in any groups, so it has to be commutative and associative. It
    must have no effects, and is called in the event loop.

    Guarantees:

    - What a transaction adds counts exactly once if it commits, and never if it does not.
    - `add` reads nothing, locks no cell that another transaction writes, and never conflicts.
    - `get` is exact at every snapshot: what was combined, and what was added since.
    - For each key, the changes that committed runs of `changed` are given form a chain: `old` is
      the previous `new`, and the last `new` is the value, once nothing is pending.

    Programs may use different numbers of `buckets` at the same time, so the number can be changed
    in operation. It says how many runs can combine at once; more of them make smaller batches.
    """

    def __init__(
        self,
        name: str,
        *,
        key: KeyCodec[K],
        value: Codec[V],
        combine: Callable[[Iterable[V]], V | None],
        buckets: int = BUCKETS,
    ) -> None:
        """`name` is the name of the queue's table, which nothing else may write."""
        require_function(combine, "combine")
        super().__init__(name, key, value, buckets, has_values=True)
        self._value = self.table.column("value", value)
        self._combine = combine

    # ------------------------------------------------------------------ writing

    @overload
    def add(self, tx: aio.Transaction, key: K, value: V) -> Coroutine[Any, Any, None]: ...
    @overload
    def add(self, tx: Transaction, key: K, value: V) -> None: ...
    def add(self, tx: Any, key: K, value: V) -> Any:
        """Adds a value to those of the key, once this transaction has committed."""
        return on_transaction(tx, self._enter, key, value)

    # ------------------------------------------------------------------ reading

    @overload
    def get(
        self, reads: AsyncReads, key: K, default: V | None = None
    ) -> Coroutine[Any, Any, V | None]: ...
    @overload
    def get(self, reads: BlockingReads, key: K, default: V | None = None) -> V | None: ...
    def get(self, reads: Any, key: K, default: V | None = None) -> Any:
        """The value of a key, with everything that was added before the snapshot. A transaction
        also sees what it has added itself."""
        return on_reads(reads, self._get, key, default)

    async def _get(self, reads: AsyncReads, key: K, default: V | None) -> V | None:
        part = self._rows.part(key)
        combined = await reads.get(self._rows.value(part), self._value)
        found = reads.scan(self.table, prefix=self._rows.entries(part), columns=[self._entry])
        entries = [row[self._entry] async for row in found]
        value = self._combined(part, combined, entries)
        return default if value is None else value

    @overload
    def items(self, reads: AsyncReads) -> Coroutine[Any, Any, dict[K, V]]: ...
    @overload
    def items(self, reads: BlockingReads) -> dict[K, V]: ...
    def items(self, reads: Any) -> Any:
        """The values of all keys, in memory."""
        return on_reads(reads, self._items)

    async def _items(self, reads: AsyncReads) -> dict[K, V]:
        entries: dict[bytes, list[V]] = {}
        pending = reads.scan(self.table, prefix=self._rows.all_entries(), columns=[self._entry])
        async for row in pending:
            part = self._rows.part_of_entry(row.key)
            entries.setdefault(part, []).append(row[self._entry])
        combined: dict[bytes, V] = {}
        async for row in reads.scan(self.table, prefix=self._rows.values(), columns=[self._value]):
            combined[self._rows.part_of_value(row.key)] = row[self._value]
        values = {}
        for part in sorted(combined.keys() | entries.keys()):
            value = self._combined(part, combined.get(part), entries.get(part, ()))
            if value is not None:
                values[self._rows.key(part)] = value
        return values

    def _combined(self, part: bytes, value: V | None, entries: Sequence[V]) -> V | None:
        if not entries:
            return value
        try:
            # A list, since some functions go through the values twice.
            return self._combine(entries if value is None else [value, *entries])
        except Exception as error:
            # An observer is known by its bucket, which has many keys.
            key = self._rows.key(part)
            error.add_note(f"combining the values of key {key!r:.100} of {self.table.name!r}")
            raise

    # ------------------------------------------------------------------ observers

    def combiner(self, *, batch: int = BATCH, pause: float = PAUSE_SECONDS) -> Observer:
        """The observer that only combines, for a worker.

        `changed` makes one that also reports changes.
        """
        return self._observer(None, batch, DEADLINE_SECONDS, ATTEMPTS, pause)

    @overload
    def changed(self, function: Changed[K, V]) -> Observer: ...
    @overload
    def changed(
        self,
        *,
        batch: int = BATCH,
        deadline: float = DEADLINE_SECONDS,
        attempts: int = ATTEMPTS,
        pause: float = PAUSE_SECONDS,
    ) -> Callable[[Changed[K, V]], Observer]: ...
    def changed(
        self,
        function: Any = None,
        *,
        batch: int = BATCH,
        deadline: float = DEADLINE_SECONDS,
        attempts: int = ATTEMPTS,
        pause: float = PAUSE_SECONDS,
    ) -> Any:
        """Turns a function of a transaction and changed keys into the queue's observer.

        It runs after something was added, with `batch` entries of one bucket at most, and must have
        no effects except through its transaction, in which the entries are combined. A queue has
        one observer. `deadline`, `attempts` and `pause` are those of `percolator.observes`: a
        longer pause makes larger batches, which cost less, and reports changes later.

        >>> @visits.changed
        ... async def by_count(tx, changes):
        ...     for key, old, new in changes: ...
        """
        if function is None:
            return lambda given: self._observer(given, batch, deadline, attempts, pause)
        return self._observer(function, batch, deadline, attempts, pause)

    def _observer(
        self,
        function: Changed[K, V] | None,
        batch: int,
        deadline: float,
        attempts: int,
        pause: float,
    ) -> Observer:
        require_batch(batch)
        if function is not None:
            require_function(function, "function")

        async def combine(tx: aio.Transaction, bucket: bytes) -> None:
            changes = await self._combine_bucket(tx, bucket, batch)
            if function is not None and changes:
                await function(tx, changes)

        def combine_blocking(tx: Transaction, bucket: bytes) -> Any:  # noqa: ANN401 - the user's
            changes = on_transaction(tx, self._combine_bucket, bucket, batch)
            # What it returns is checked: a coroutine would not have been run.
            return function(tx, changes) if function is not None and changes else None

        is_async = function is None or iscoroutinefunction(function)
        run = combine if is_async else combine_blocking
        return self._observer_of(
            run, OBSERVER_NAME, deadline=deadline, attempts=attempts, pause=pause
        )

    def _definition(self) -> Observer:
        return self.combiner()

    async def _combine_bucket(
        self, tx: aio.Transaction, bucket: bytes, batch: int
    ) -> list[KeyChange[K, V]]:
        """Combines entries of a bucket with the values of their keys, in this transaction."""
        entries: dict[bytes, list[tuple[bytes, V]]] = {}
        count = size = 0
        is_cut = False
        async with aclosing(self._pending(tx, bucket)) as pending:
            async for row, value, length in pending:
                if count == batch or size > BATCH_BYTES:
                    is_cut = True
                    break
                count += 1
                size += length
                entries.setdefault(self._rows.part_of_entry(row), []).append((row, value))
        changes = []
        puts: list[tuple[object, Column[Any], Any]] = []
        deletes: list[tuple[object, Column[Any]]] = []
        size = 0
        async with aclosing(self._values_of(tx, list(entries))) as values:
            async for part, value_row in values:
                # Small entries may have large values, more than a transaction may write.
                if size > BATCH_BYTES:
                    is_cut = True
                    break
                # Two runs that see the same entry conflict here, whatever they make of it.
                deletes += [(row, self._entry) for row, _ in entries[part]]
                old, stored = value_row.get(self._value), value_row.raw().get(self._value.name)
                # Read again for `combine`, which may add to the first value that it is given.
                new = self._combined(
                    part, value_row.get(self._value), [value for _, value in entries[part]]
                )
                data = None if new is None else encoded_value(self._value, value_row.key, new)
                size += max(len(stored or b""), len(data or b""))
                # The stored bytes decide, since Python calls 1 and True equal.
                if data == stored:
                    continue
                if new is None:
                    deletes.append((value_row.key, self._value))
                else:
                    puts.append((value_row.key, self._value, new))
                changes.append(KeyChange(self._rows.key(part), old, new))
        if is_cut:
            tx.notify(bucket, self._wake)
        # In one call: each call of an observer's transaction is timed.
        await tx.internal.write_together(puts, deletes)
        return changes

    async def _values_of(
        self, tx: aio.Transaction, parts: Sequence[bytes]
    ) -> AsyncGenerator[tuple[bytes, Row[bytes]], None]:
        """The rows of the values of these parts, some of them at a time: values may be large."""
        for at in range(0, len(parts), _VALUES_AT_ONCE):
            some = parts[at : at + _VALUES_AT_ONCE]
            rows = [self._rows.value(part) for part in some]
            for found in zip(some, await tx.get_many(self.table, rows, [self._value]), strict=True):
                yield found

    async def _pending(
        self, tx: aio.Transaction, bucket: bytes
    ) -> AsyncGenerator[tuple[bytes, V, int], None]:
        """The entries of a bucket: row, value, and the value's size."""
        first, last = self._rows.entries_of(bucket)
        pages = tx.scan_pages(self.table, start=first, end=last, columns=[self._entry])
        async with aclosing(pages):
            async for page in pages:
                for row in page:
                    yield row.key, row[self._entry], len(row.raw()[self._entry.name])
