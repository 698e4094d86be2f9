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

import fcntl
import json
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, Protocol, TypeVar, overload

from percolator import aio
from percolator.arguments import require_function
from percolator.blocking.api import Transaction
from percolator.codecs import Codec, KeyCodec
from percolator.decorators import AsyncReads, BlockingReads, on_reads, on_transaction
from percolator.errors import InvalidArgument, UsageError
from percolator.observers.definition import ATTEMPTS, DEADLINE_SECONDS, Observer
from percolator.process import private_opener
from percolator.recipes.queue import BATCH_BYTES, Queue, require_batch
from percolator.schema import decoded_value

K = TypeVar("K")
V = TypeVar("V")

OBSERVER_NAME = "export"
BATCH = 500
_PLACE_BITS = 32
_PLACES = (1 << _PLACE_BITS) - 1
_NUMBERED = 1 << 31
"""Set in the place of an entry that was imported, and was given its own number after that. Its row
has the commit timestamp of the import in place of a start timestamp."""


class Export(NamedTuple, Generic[K, V]):
    """A value that was put for a key. Later puts of the key have higher sequence numbers."""

    key: K
    sequence: int
    """Less than 2 ** 96, which is more than a 64-bit column of a database holds. Numbers are in the
    order of commits, and have gaps."""
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
            async for part, entries in by_key:
                if imported := entries.to_be_numbered():
                    if not exports:  # else these first, or each run would look at them again
                        await self._number(tx, part, imported[:batch], entries.last_numbered)
                        await self._number_more(tx, by_key, batch, imported[:batch])
                    is_cut = True
                    break
                key = self._rows.key(part)
                for entry in entries.first():
                    is_cut = len(exports) == batch or size > BATCH_BYTES
                    if is_cut:
                        break
                    exports.append(Export(key, entry.sequence, self._value_of(entry)))
                    rows.append(entry.row)
                    size += len(entry.value)
                if is_cut:
                    break
        if is_cut:
            tx.notify(bucket, self._wake)
        # In one call: each call of an observer's transaction is timed.
        await tx.internal.write_together([], [(row, self._entry) for row in rows])
        return exports

    async def _number_more(
        self,
        tx: aio.Transaction,
        by_key: AsyncGenerator[tuple[bytes, _Entries], None],
        batch: int,
        numbered: Sequence[_Entry],
    ) -> None:
        """Numbers those of further keys, too, until it has seen what one call can be given.
        Otherwise, many keys with few entries would take a run each."""
        most, size = batch - len(numbered), sum(len(one.value) for one in numbered)
        while most > 0 and size <= BATCH_BYTES:
            if (found := await anext(by_key, None)) is None:
                return
            part, entries = found
            if imported := entries.to_be_numbered()[:most]:
                await self._number(tx, part, imported, entries.last_numbered)
            seen = imported or entries.first()
            most -= len(seen)
            size += sum(len(one.value) for one in seen)

    async def _number(
        self, tx: aio.Transaction, part: bytes, entries: Sequence[_Entry], last: int
    ) -> None:
        """Gives imported entries of a key their own numbers, which are kept in their rows.

        They are those of the import: what was put after it has higher ones. `last` is the last one
        that was given.
        """
        commit_ts = entries[0].sequence >> _PLACE_BITS
        after = last & _PLACES if last >> _PLACE_BITS == commit_ts else _NUMBERED
        puts = [
            (self._rows.entry(part, commit_ts, place), self._entry, self._value_of(entry))
            for place, entry in enumerate(entries, after + 1)
        ]
        await tx.internal.write_together(puts, [(entry.row, self._entry) for entry in entries])

    def _value_of(self, entry: _Entry) -> V:
        return decoded_value(self._entry, entry.row, entry.value)

    async def _by_key(
        self, tx: aio.Transaction, bucket: bytes, batch: int
    ) -> AsyncGenerator[tuple[bytes, _Entries], None]:
        """The entries of each key.

        Rows are in the order in which transactions began. They are exported in that of commits:
        what commits after this snapshot then comes after everything in it.
        """
        part, entries = b"", _Entries(batch)
        first, last = self._rows.entries_of(bucket)
        pages = tx.internal.found_pages(self.table, first, last, [self._entry])
        async with aclosing(pages):
            async for page in pages:
                for row, cells in page:
                    if self._rows.part_of_entry(row) != part:
                        if part:
                            yield part, entries
                        part, entries = self._rows.part_of_entry(row), _Entries(batch)
                    found = cells[self._entry.name]
                    sequence = self._sequence(row, found.commit_timestamp)
                    entry = _Entry(sequence, row, found.value or b"")
                    entries.add(entry, self._rows.start_of_entry(row))
        if part:
            yield part, entries

    def _sequence(self, row: bytes, commit_timestamp: int) -> int:
        place = self._rows.place_of_entry(row)
        if place & _NUMBERED:
            commit_timestamp = self._rows.start_of_entry(row)
        return (commit_timestamp << _PLACE_BITS) + place


class _Entries:
    """The first entries of one key, and what is to be known of all of them.

    An import gives the entries of all transactions one commit timestamp, and so the same numbers: a
    receiver would leave out all but the first. So none is exported before each has its own.
    """

    def __init__(self, batch: int) -> None:
        self.last_numbered = 0
        """The highest number that was given to an imported entry; 0 if there is none."""
        self._batch = batch
        self._kept: list[_Entry] = []
        self._size = 0
        self._commit = self._start = 0
        """Rows of the oldest entry whose number is that of its commit."""
        self._have_same_numbers = False

    def add(self, entry: _Entry, start: int) -> None:
        """Adds an entry that a transaction with this start timestamp has put."""
        commit_ts = entry.sequence >> _PLACE_BITS
        if entry.sequence & _NUMBERED:
            self.last_numbered = max(self.last_numbered, entry.sequence)
        elif not self._commit or commit_ts < self._commit:
            self._commit, self._start, self._have_same_numbers = commit_ts, start, False
        elif commit_ts == self._commit and start != self._start:
            self._have_same_numbers = True
        self._kept.append(entry)
        self._size += len(entry.value)
        if len(self._kept) > 2 * (self._batch + 1) or self._size > 2 * BATCH_BYTES:
            self._kept = self.first()
            self._size = sum(len(one.value) for one in self._kept)

    def to_be_numbered(self) -> list[_Entry]:
        """The first of the imported entries without a number of their own, if they need one."""
        if not (self._have_same_numbers or self.last_numbered >> _PLACE_BITS == self._commit):
            return []
        return [
            entry
            for entry in self.first()
            if entry.sequence >> _PLACE_BITS == self._commit and not entry.sequence & _NUMBERED
        ]

    def first(self) -> list[_Entry]:
        """The first entries in order, as many as a call can be given, and one more if there are
        more.

        Not more, or the values of one busy key would fill the worker's memory.
        """
        first, size = list[_Entry](), 0
        for entry in sorted(self._kept, key=_order):
            first.append(entry)
            if len(first) > self._batch or size > BATCH_BYTES:
                break
            size += len(entry.value)
        return first


def _order(entry: _Entry) -> tuple[int, bool, bytes]:
    """Entries of one transaction are in the order of their places, and so of their rows. Of
    imported ones, those that are still to be numbered come first."""
    return entry.sequence >> _PLACE_BITS, bool(entry.sequence & _NUMBERED), entry.row


def _nothing(exports: object) -> None:
    """Only defines the observer; it is not run."""


class ExportFile:
    """A file of JSON lines, to which the exports of one queue are appended.

        {"key": "ann", "sequence": 2021817333478212635621064729, "value": {"order": 17}}

    Guarantees: after `append` returns, each export is in the file exactly once and on disk, and
    those of a key are in order. This holds among any number of processes of one machine that append
    to the file, even if they die at any time. Keys and values have to be JSON values.

    It keeps the last number of each key in memory, and reads the file once when it is first used.
    Do not append anything else. To begin a new file, stop the workers and move the old one away
    when `ExportQueue.pending` is 0; a worker that dies while it appends leaves some pending.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._last: dict[str, int] = {}
        self._read_to = 0
        self._durable_to = 0
        """Lines that others have appended may not be on disk yet: they may have died before."""
        self._inode = 0

    def append(self, exports: Iterable[Export[Any, Any]]) -> int:
        """Appends what is not in the file yet; returns how many exports that were.

        Raises `InvalidArgument` if a key or a value is no JSON value, or if something in the file
        is not an export; then nothing is appended.
        """
        given = [(_json("key", one.key), one.sequence, _line(one)) for one in exports]
        with self._locked() as file:
            self._read_on(file)
            new: dict[str, int] = {}
            lines = []
            for key, sequence, line in given:
                if sequence > new.get(key, self._last.get(key, -1)):
                    new[key] = sequence
                    lines.append(line)
            data = b"".join(lines)
            file.write(data)
            file.flush()
            if self._read_to + len(data) > self._durable_to:
                os.fsync(file.fileno())
            self._read_to += len(data)
            self._durable_to = self._read_to
            self._last.update(new)
            return len(lines)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The file, while no other process appends to it."""
        with open(self._path, "ab+", opener=private_opener) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _read_on(self, file: BinaryIO) -> None:
        """Reads what was appended since, and cuts off what a process that died has half written."""
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._read_to:
            # Whoever created the file may have died before it was sure to stay.
            _sync_directory(self._path.parent)
            self._inode, self._read_to, self._durable_to, self._last = found.st_ino, 0, 0, {}
        file.seek(self._read_to)
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(self._read_to)
                break
            self._note(line)
            self._read_to += len(line)
        file.seek(0, os.SEEK_END)

    def _note(self, line: bytes) -> None:
        try:
            found = json.loads(line)
            self._last[_json("key", found["key"])] = int(found["sequence"])
        except (ValueError, KeyError, TypeError):
            raise InvalidArgument(
                "path", f"{self._path}, byte {self._read_to}: this line is not an export"
            ) from None


def _line(export: Export[Any, Any]) -> bytes:
    key, value = _json("key", export.key), _json("value", export.value)
    return f'{{"key": {key}, "sequence": {export.sequence}, "value": {value}}}\n'.encode()


def _json(field: str, value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"not a JSON value: {error}") from None


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


_CREATE = """\
CREATE TABLE IF NOT EXISTS percolator_exported (
    queue text, key bytea, sequence numeric NOT NULL, PRIMARY KEY (queue, key))"""
_BEGIN_KEY = """\
INSERT INTO percolator_exported (queue, key, sequence) VALUES (%s, %s, -1) ON CONFLICT DO NOTHING"""
_LOCK_KEYS = """\
SELECT key, sequence FROM percolator_exported
WHERE queue = %s AND key = ANY(%s) ORDER BY key FOR UPDATE"""
_END_KEY = "UPDATE percolator_exported SET sequence = %s WHERE queue = %s AND key = %s"


class Connection(Protocol):
    """A connection of psycopg 3."""

    autocommit: Any

    def cursor(self) -> Any:  # noqa: ANN401 - psycopg's
        """A cursor."""


class ExportedOnce(Generic[K, V]):
    """Keeps track, in PostgreSQL, of which exports of a queue are new.

        once = ExportedOnce(orders)

        @orders.exporter()
        def send(exports):
            with psycopg.connect(...) as connection:    # one transaction, committed at the end
                for export in once.new(connection, exports):
                    connection.execute("INSERT INTO orders ...")

    Guarantee: if everything that an export leads to is done in the transaction that asks for it
    here, it takes effect exactly once, and in order for each key, whatever dies, and whenever.
    Calls that have keys in common wait for each other there.
    """

    def __init__(self, queue: ExportQueue[K, V]) -> None:
        self._queue = queue

    def create(self, connection: Connection) -> None:
        """Creates the table `percolator_exported`, which all queues share, if it does not exist."""
        with connection.cursor() as cursor:
            cursor.execute(_CREATE)

    def new(self, connection: Connection, exports: Sequence[Export[K, V]]) -> list[Export[K, V]]:
        """The exports that have not taken effect, and will have when this transaction commits.

        Raises `UsageError` for a connection that commits each statement by itself. The transaction
        has to be at the level READ COMMITTED, which is PostgreSQL's default.
        """
        if connection.autocommit:
            raise UsageError(
                "the connection has autocommit: the effect would not happen exactly once"
            )
        name = self._queue.table.name
        keys = {export.key: self._queue.key_bytes(export.key) for export in exports}
        last: dict[bytes, int] = {}
        with connection.cursor() as cursor:
            # In one order everywhere, so that no two transactions wait for each other.
            ordered = sorted(set(keys.values()))
            cursor.executemany(_BEGIN_KEY, [(name, key) for key in ordered])
            cursor.execute(_LOCK_KEYS, (name, ordered))
            before = {bytes(key): int(sequence) for key, sequence in cursor.fetchall()}
            new = [one for one in exports if one.sequence > before[keys[one.key]]]
            for one in new:
                last[keys[one.key]] = one.sequence
            cursor.executemany(_END_KEY, [(last[key], name, key) for key in sorted(last)])
        return new
