"""A transaction: reads at its start timestamp, and writes that appear all at once or not at all.

Reader        reads at one timestamp, which comes with the first read (reader.py)
WriteBuffer   what it writes, in the program until the commit
Commit        takes the writes to their outcome (protocol/commit.py)
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar, cast, overload

from percolator.aio.awaits import must_be_awaited, timed
from percolator.aio.engine import Engine
from percolator.aio.reader import Reader
from percolator.aio.reads import Reads
from percolator.arguments import require_bool, require_seconds
from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    InvalidArgument,
    OutcomeUnknown,
    SchemaError,
    UsageError,
)
from percolator.observers.time_limits import ClusterWaits
from percolator.protocol.announcing import notify_weak_observers
from percolator.protocol.commit import Commit, settled
from percolator.protocol.indexes import with_entries
from percolator.protocol.read import FoundRow
from percolator.protocol.write_set import KeptIndexes, WriteSet, WriteSteps, may_have_indexes
from percolator.retries import Attempts
from percolator.routing.catalog import NO_OBSERVERS, TableInfo
from percolator.routing.cells import FoundCell, KnownRows
from percolator.schema import Column, Readable, Table, decoded_value, encoded_value
from percolator.timestamps import Timestamp

K = TypeVar("K")
T = TypeVar("T")
D = TypeVar("D")
A = TypeVar("A")


class Outcome(Enum):
    """The outcome of a transaction."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    """Its commit was sent and not answered: `resolve` finds out."""


_ENDINGS = {
    Outcome.COMMITTED: "has committed",
    Outcome.ABORTED: "was rolled back",
    Outcome.UNKNOWN: "has an unknown outcome",
}
_COMMITTING = "is being committed"


# Writes take effect without `await`.
#
# The result of a write may be awaited, and need not be. If the client has to ask for the table
# first, the write waits in `LateWrites`, in order, for the next read or the commit.


class Done(Coroutine[Any, Any, None]):
    """The result of a write that has taken effect: a coroutine, so that it can become a task. There
    is only one, which any number of tasks may await."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, None]:
        return cast("Generator[Any, Any, None]", iter(()))

    def send(self, value: object) -> Any:  # noqa: ANN401 - as declared by Coroutine
        raise StopIteration

    def throw(self, kind: Any, error: Any = None, traceback: Any = None) -> Any:  # noqa: ANN401 - see above
        raise kind if error is None else error

    def close(self) -> None: ...


DONE = Done()


class Later(Coroutine[Any, Any, None]):
    """The result of a write for which more is to be done, such as asking for its table. Awaited, it
    does that at once; otherwise the next read or the commit does."""

    __slots__ = ("_begun", "_work")

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._begun: Coroutine[Any, Any, None] | None = None

    def _begin(self) -> Coroutine[Any, Any, None]:
        if self._begun is None:
            self._begun = self._work()
        return self._begun

    def __await__(self) -> Generator[Any, Any, None]:
        return self._work().__await__()

    def send(self, value: object) -> Any:  # noqa: ANN401 - as declared by Coroutine
        return self._begin().send(value)

    def throw(self, kind: Any, error: Any = None, traceback: Any = None) -> Any:  # noqa: ANN401 - see above
        return self._begin().throw(kind if error is None else error)

    def close(self) -> None:
        self._begin().close()


Written: TypeAlias = Done | Later
"""The result of a write. It may be awaited, and need not be. (It is a union because mypy's
`unused-awaitable` accepts a union that is not awaited.)"""


class _LateWrite(Generic[A]):
    """A write that waits: its cells have to be asked for, or an earlier write waits."""

    __slots__ = ("find", "found", "lock", "write")

    def __init__(
        self, find: Callable[[float], Awaitable[A]], found: A | None, write: Callable[[A], object]
    ) -> None:
        self.find = find
        self.found = found
        self.write = write
        self.lock = asyncio.Lock()
        """Held by the one call that asks."""


class LateWrites:
    """The writes of a transaction that wait for an answer of the cluster, and all later ones, in
    the order in which they were made."""

    __slots__ = ("_now", "_waiting")

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is the clock by which deadlines are given."""
        self._now = now
        self._waiting: list[_LateWrite[Any]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        find: Callable[[float], Awaitable[A]],
        write: Callable[[A], object],
        deadline: Callable[[], float],
        *,
        found: A | None = None,
        waits: ClusterWaits | None = None,
    ) -> Later:
        """`find` asks the cluster, and has no effect; `write` is called with its result, `found` if
        that is known already. `deadline` returns the deadline of a write that is awaited now, and
        raises if the transaction has ended."""
        late = _LateWrite(find, found, write)
        self._waiting.append(late)

        def awaited() -> Coroutine[Any, Any, None]:
            call = self._awaited(late, deadline)
            return call if waits is None else timed(waits, call)

        return Later(awaited)

    async def settle(self, deadline: float) -> None:
        """Returns when all have taken effect. One that is refused stays: a commit must not leave
        it out."""
        while self._waiting:
            await self._ask(self._waiting[0], deadline)

    async def _awaited(self, late: _LateWrite[Any], deadline: Callable[[], float]) -> None:
        if late in self._waiting:
            try:
                await self._ask(late, deadline())
            except BaseException:
                # The caller knows, and may go on without it.
                if late in self._waiting:
                    self._waiting.remove(late)
                raise

    async def _ask(self, late: _LateWrite[Any], deadline: float) -> None:
        """Asks for the cells of one write, and writes what need not wait any longer.

        Only one call at a time asks for a write. If a read asked at the same time as the call that
        awaits it, one could be refused and the other not: the write would be lost after its caller
        was told that it has taken effect, or be committed after its caller was told that it was
        refused.
        """
        try:
            async with asyncio.timeout(max(deadline - self._now(), 0.0)):
                await late.lock.acquire()
        except TimeoutError:
            text = "the deadline passed while a write waited for its table"
            raise DeadlineExceeded(text) from None
        try:
            if late in self._waiting and late.found is None:
                late.found = await late.find(deadline)
            # Not beyond the first write that has still to ask: of two to a cell, the last counts.
            while self._waiting and self._waiting[0].found is not None:
                self._waiting[0].write(self._waiting[0].found)
                del self._waiting[0]
        finally:
            late.lock.release()


class WriteBuffer:
    """The writes of one transaction, checked and encoded, in the program until its commit."""

    __slots__ = ("_engine", "_late", "_reader", "_update_lock", "_waits", "cells", "weak")

    def __init__(self, reader: Reader, cells: WriteSet) -> None:
        """`reader` knows what the names of tables mean, and which writes wait for an answer of the
        cluster; its reads show `cells`."""
        self._engine = reader.engine
        self._reader = reader
        self.cells = cells
        self.weak: set[CellAddress] | None = None
        """The cells whose weak observers are notified once the transaction has committed."""
        self._late: LateWrites | None = None
        self._update_lock: asyncio.Lock | None = None
        self._waits: ClusterWaits | None = None

    def count_in(self, waits: ClusterWaits) -> None:
        """Counts the time in which a write waits for the cluster."""
        self._waits = waits

    def updating(self) -> asyncio.Lock:
        """Held from a read to the write of what depends on it.

        Calls on one transaction may be gathered. Between its read and its write, one would let the
        next read the same value, and the first of both writes would be lost.
        """
        if self._update_lock is None:
            self._update_lock = asyncio.Lock()
        return self._update_lock

    # ------------------------------------------------------------------ cells

    def set(self, row: object, column: Any, value: object) -> Written:  # noqa: ANN401 - or a mapping
        """Writes a value, or all values of a mapping from columns. In any one thread at a time, as
        all writes here."""
        if value is ...:
            return self._set_row(row, column)
        address = self.known_target(row, column)
        if address is not None and not self._reader.late:
            self.put(address, row, column, value)
            return DONE
        write = partial(self.cells.put, value=self._encoded(row, column, value))
        return self._write(address, partial(self.target, row, column), write)

    def _set_row(self, row: object, values: object) -> Written:
        """Sets all the values, or none if one of them is refused."""
        if not isinstance(values, Mapping):
            raise InvalidArgument(
                "value", "is missing: expected set(row, column, value) or set(row, {column: value})"
            )
        found, data = list[CellAddress](), list[bytes]()
        for column, value in values.items():
            address = self.known_target(row, column)
            if address is not None:
                found.append(address)
            data.append(self._encoded(row, column, value))
        if len({column.table.name for column in values}) > 1:
            raise InvalidArgument("column", "expected columns of one table: the row is in one")

        async def find(deadline: float) -> list[CellAddress]:
            return [await self.target(row, column, deadline) for column in values]

        def write(addresses: list[CellAddress]) -> None:
            self.cells.write_together(list(zip(addresses, data, strict=True)))

        return self._write(found if len(found) == len(data) else None, find, write)

    def delete(self, row: object, column: Column[Any]) -> Written:
        """Deletes a cell."""
        return self._write_plainly(row, column, self.cells.delete)

    def lock(self, row: object, column: Column[Any], *, shared: bool) -> Written:
        """Locks a cell without changing it."""
        require_bool(shared, "shared")
        return self._write_plainly(row, column, self.cells.read_lock if shared else self.cells.lock)

    def _write_plainly(
        self, row: object, column: Column[Any], write: Callable[[CellAddress], None]
    ) -> Written:
        address = self._known_written(row, column)
        return self._write(address, partial(self._written_address, row, column), write)

    def _write(
        self,
        found: A | None,
        find: Callable[[float], Awaitable[A]],
        write: Callable[[A], object],
    ) -> Written:
        """Writes at once, if it is known where, and nothing waits that was written before."""
        if found is not None and not self._reader.late:
            write(found)
            return DONE
        if self._late is None:
            self._late = self._reader.late = LateWrites(self._engine.now)
        deadline = partial(self._reader.deadline, None)
        return self._late.add(find, write, deadline, found=found, waits=self._waits)

    async def write_together(
        self,
        puts: Sequence[tuple[object, Column[Any], Any]],
        deletes: Sequence[tuple[object, Column[Any]]],
    ) -> None:
        """Writes all, or nothing if one of them is refused."""
        checked: list[tuple[CellAddress, bytes | None]] = []
        deadline = self._reader.deadline(None)
        if self._reader.late:
            await self._reader.late.settle(deadline)
        for row, column, value in puts:
            address = self.known_target(row, column) or await self.target(row, column, deadline)
            checked.append((address, self._encoded(row, column, value)))
        for row, column in deletes:
            address = await self._written_address(row, column, deadline)
            checked.append((address, None))
        self.cells.write_together(checked)

    def known_target(self, row: object, column: Column[Any]) -> CellAddress | None:
        """The address of a cell that may be written, if nothing has to be asked for that."""
        if not isinstance(column, Column):
            raise UsageError(f"expected a Column, got {type(column).__name__}")
        table = column.table
        stored = self._reader.row(table, row, column)
        info = self._reader.bound(table.name)
        if info is None:
            return None
        codecs = info.codecs
        if codecs.writable.get(column.name) is not column and not codecs.is_declared(column):
            return None
        return CellAddress(info.table_id, stored, column.name)

    async def target(self, row: object, column: Column[Any], deadline: float) -> CellAddress:
        """The address of a cell, whose column from now on has this codec."""
        info = await self._reader.info(column.table, deadline)
        address = CellAddress(
            info.table_id, self._reader.row(column.table, row, column), column.name
        )
        if not info.codecs.is_declared(column):
            await self._engine.catalog.declare(info, column, deadline)
        # A commit that began meanwhile would leave the write out.
        self._reader.require_open()
        return address

    def _known_written(self, row: object, column: Column[Any]) -> CellAddress | None:
        """As `_known_address`, for a cell that is to be written: a bad key is refused at once."""
        address = self._reader.known_address(row, column)
        if address is None:
            self._reader.row(column.table, row, column)
        return address

    async def _written_address(
        self, row: object, column: Column[Any], deadline: float
    ) -> CellAddress:
        """The address of a cell that is to be written, but not set."""
        address = self._reader.known_address(row, column)
        if address is None:
            address = await self._reader.address(row, column, deadline)
            self._reader.require_open()  # see above
        return address

    def put(self, address: CellAddress, row: object, column: Column[T], value: T) -> None:
        self.cells.put(address, self._encoded(row, column, value))

    def _encoded(self, row: object, column: Column[T], value: T) -> bytes:
        data = encoded_value(column, row, value)
        if len(data) > self._engine.limits.value_bytes_max:
            raise InvalidArgument(
                "value",
                f"has {len(data)} bytes, at most {self._engine.limits.value_bytes_max}",
            )
        return data

    # ------------------------------------------------------------------ weak notifications
    # They carry no data, take no lock, and decide nothing.

    def notify(self, row: object, column: Column[Any]) -> Written:
        """Notifies the column's weak observers of the row, once the transaction has committed."""
        address = self._known_written(row, column)
        if address is not None:
            schema = self._engine.env.schemas.get(address.table_id)
            if schema is None or column.name not in schema.weak_observers:
                address = None
        return self._write(address, partial(self._notified, row, column), self.notify_cell)

    async def _notified(self, row: object, column: Column[Any], deadline: float) -> CellAddress:
        """A cell that has a weak observer: its first one may have been registered since."""
        address = await self._written_address(row, column, deadline)
        schema = await self._engine.env.schemas.refresh(address.table_id, deadline)
        self._reader.require_open()  # a commit that began meanwhile would leave it out
        if column.name not in schema.weak_observers:
            raise UsageError(f"{column!r} has no weak observer")
        return address

    def notify_cell(self, address: CellAddress) -> None:
        if self.weak is None:
            self.weak = set()
        if len(self.weak) >= self._engine.limits.transaction_cells_max:
            raise InvalidArgument(
                "notify", f"more than {self._engine.limits.transaction_cells_max}"
            )
        self.weak.add(address)


class Transaction(Reads):
    """Reads from one snapshot, and writes that take effect all at once.

    It reads the store as of its first read, not as of entering the block; `timestamp` counts as a
    read. Writes stay in the program until `commit`; of several to a cell, the last one counts.
    Leaving the block commits; an exception rolls back. This is one attempt: a `ConflictError`
    leaves the block. Use `@transactional` for functions that are run again.

    >>> async with db.transaction() as tx:
    ...     left = await tx.get("bob", balance, default=0)
    ...     tx.set("bob", balance, left - 7)
    """

    joins_transactions = True
    """A `@transactional` function that is called with this transaction joins it."""

    outcome: Outcome = Outcome.OPEN
    """Open, committed, aborted or unknown."""
    commit_timestamp: Timestamp | None = None
    """Set by a commit that wrote something."""
    _only_two_phases = False
    """Do not try to commit in one round."""
    _alone = True
    """No other process can commit this transaction."""
    _commit: Commit | None = None

    def __init__(
        self,
        engine: Engine,
        timeout_seconds: float | None,
        attempts: Attempts | None = None,
        *,
        serializable: bool = False,
    ) -> None:
        """`attempts`: it is one of these, and the last one if it commits."""
        if serializable is not False:
            require_bool(serializable, "serializable")
        writes = WriteSet(engine.limits)
        super().__init__(Reader(engine, timeout_seconds, "transaction", writes))
        if serializable:
            self._reader.read_locks = writes
        self._engine = engine
        self._env = engine.env
        self._reader.attempts = self._attempts = attempts
        self._buffer = WriteBuffer(self._reader, writes)
        self._begun_seconds = engine.now()

    @property
    def start_timestamp(self) -> Timestamp | None:
        """The timestamp of the snapshot that it reads; None before the first read.

        If it has read nothing, it has one from its commit on.
        """
        start = self._reader.start
        return Timestamp(start) if start else None

    @property
    def serializable(self) -> bool:
        """True if it locks the cells that it reads."""
        return self._reader.read_locks is not None

    @property
    def ended(self) -> bool:
        """True if it has ended, or begun to end."""
        return bool(self._reader.ended)

    @property
    def internal(self) -> TransactionInternals:
        """For other parts of the library: programs do not need it, and it may change any time."""
        return TransactionInternals(self)

    # ------------------------------------------------------------------ reads

    @overload
    async def get(
        self,
        row: K,
        column: Readable[T, K],
        *,
        for_update: bool = False,
        timeout: float | None = None,
    ) -> T | None: ...
    @overload
    async def get(
        self,
        row: K,
        column: Readable[T, K],
        default: D,
        *,
        for_update: bool = False,
        timeout: float | None = None,
    ) -> T | D: ...
    @must_be_awaited
    def get(
        self,
        row: K,
        column: Readable[T, K],
        default: Any = None,
        *,
        for_update: bool = False,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """The value of one cell, or `default` if it has none.

        With `for_update`, it takes the cell's lock when it commits, as `lock` does, and waits in a
        queue until the transactions that came before have ended: first come, first served. If it
        has read before, and the cell was written since, that is a conflict; `db.run` then runs it
        again, with its place kept.

        >>> await tx.get("bob", balance, default=0)
        >>> await tx.get("total", visits, for_update=True)
        """
        if for_update is False:
            return self._reader.get(row, column, default, timeout)
        require_bool(for_update, "for_update")
        return self._get_for_update(row, column, default, timeout)

    async def _get_for_update(
        self, row: object, column: Readable[Any], default: object, timeout: float | None
    ) -> Any:  # noqa: ANN401 - the column's values
        if not isinstance(column, Column):
            raise UsageError(f"expected a Column, got {type(column).__name__}")
        return await self._reader.get_in_turn(self._buffer.cells, row, column, default, timeout)

    # ------------------------------------------------------------------ the run of an observer

    @overload
    def previous(
        self, row: K, column: Readable[T, K], *, timeout: float | None = None
    ) -> Coroutine[Any, Any, T | None]: ...
    @overload
    def previous(
        self, row: K, column: Readable[T, K], default: D, *, timeout: float | None = None
    ) -> Coroutine[Any, Any, T | D]: ...
    @must_be_awaited
    async def previous(
        self, row: K, column: Readable[T, K], default: Any = None, *, timeout: float | None = None
    ) -> Any:
        """The value that the cell of this run had when the observer last ran for it, or `default`
        if it had none, or if the observer has not run for it before.

        Only in an observer: `get` returns the value that is there now, and this the one that the
        last run has seen, however many there were in between. A run that did not commit does not
        count. A value that has expired since may be gone. Neither `delete_row` nor collection takes
        it away: it is kept while the change waits for this run.

        >>> was, now = await tx.previous(row, city), await tx.get(row, city)
        """
        reader = self._reader
        deadline = reader.deadline(timeout)
        address = reader.known_address(row, column) or await reader.address(row, column, deadline)
        found = await self._last_seen(address, deadline)
        return default if found is None else decoded_value(column, row, found)

    async def _last_seen(self, address: CellAddress, deadline: float) -> bytes | None:
        """The cell's value when the observer of this run last ran for it."""
        raise UsageError("previous() is for observers, and this transaction is no run of one")

    # ------------------------------------------------------------------ writes

    @overload
    def set(self, row: K, column: Mapping[Column[Any, K], Any]) -> Written: ...
    @overload
    def set(self, row: K, column: Column[T, K], value: T) -> Written: ...
    def set(self, row: object, column: Any, value: Any = ...) -> Written:
        """Writes a value, or all values of a mapping from columns. A value may be empty.

        It takes effect at the call, awaited or not. What only the cluster knows, such as that there
        is no such table, is raised where it is awaited, or else by the next read or the commit.
        """
        self._reader.require_open()
        return self._buffer.set(row, column, value)

    def delete(self, row: K, column: Column[Any, K]) -> Written:
        """Deletes the cell, if it exists.

        It takes effect at the call, awaited or not, as `set` does.
        """
        self._reader.require_open()
        return self._buffer.delete(row, column)

    def lock(self, row: K, column: Column[Any, K], *, shared: bool = False) -> Written:
        """Conflicts with every other writer of the cell, without changing it.

        Snapshots allow *write skew*: two transactions that each read what the other writes may both
        commit. Locking the cells that a decision is based on rules it out. With `shared`, it is a
        read lock: any number of transactions may hold one on the same cell.

        The commit takes the lock. So this takes effect at the call, awaited or not, as `set` does.
        """
        self._reader.require_open()
        return self._buffer.lock(row, column, shared=shared)

    @must_be_awaited
    async def delete_row(self, table: Table[K], row: K, *, timeout: float | None = None) -> None:
        """Deletes all cells that the row has in this snapshot, or that the transaction has set.

        A column that another transaction sets at the same time may stay: only cells conflict. To
        rule it out, have both write or lock one cell of the row.

        >>> await tx.delete_row(accounts, "bob")
        """
        if self.serializable:
            raise UsageError(
                "a serializable transaction cannot delete_row: a column that another transaction "
                "adds to the row has no cell to lock yet; delete columns by name"
            )
        try:
            (found,) = await self._reader.get_many(table, [row], None, timeout)
            names = list(found)
        except InvalidArgument as error:
            if not error.field.startswith("reads["):
                raise
            names = await self._names_in_pages(table, row, timeout)
        info = await self._reader.info(table, self._reader.deadline(timeout))
        stored = self._reader.row(table, row)
        self._buffer.cells.write_together(
            [(CellAddress(info.table_id, stored, name), None) for name in names]
        )

    async def _names_in_pages(self, table: Table[K], row: K, timeout: float | None) -> list[bytes]:
        """The names of a row's cells, which are together too large for one answer."""
        stored = self._reader.row(table, row)
        pages = self._reader.found_pages(table, row, None, None, None, limit=1, timeout=timeout)
        async with aclosing(pages):
            return [
                name
                async for page in pages
                for key, cells in page
                if key == stored
                for name in cells
            ]

    @must_be_awaited
    async def increment(
        self, row: K, column: Column[int, K], by: int = 1, *, timeout: float | None = None
    ) -> int:
        """Adds to the number in a cell, and returns the sum. A cell without a value counts as 0.

        It reads and writes the cell, so it can conflict on either account. Where many transactions
        add to one cell, use `percolator.recipes.CombineQueue` or `ShardedCounter`.

        >>> await tx.increment("bob", visits)
        """
        if isinstance(by, bool) or not isinstance(by, int):
            raise InvalidArgument("by", f"expected an int, got {type(by).__name__}")
        async with self._buffer.updating():
            old: object = await self._reader.get(row, column, 0, timeout)
            if isinstance(old, bool) or not isinstance(old, int):
                raise SchemaError(
                    f"{column!r}, row {row!r:.100}: only integers can be incremented, "
                    f"found {type(old).__name__}"
                )
            address = await self._buffer.target(row, column, self._reader.deadline(timeout))
            self._buffer.put(address, row, column, old + by)
            return old + by

    @must_be_awaited
    def _write_together(
        self,
        puts: Sequence[tuple[object, Column[Any], Any]],
        deletes: Sequence[tuple[object, Column[Any]]],
    ) -> Coroutine[Any, Any, None]:
        """Writes all, or nothing if one of them is refused."""
        return self._buffer.write_together(puts, deletes)

    def notify(self, row: K, column: Column[Any, K]) -> Written:
        """Notifies the column's weak observers of the row, once this transaction has committed.

        It takes effect at the call, awaited or not. Whoever awaits it is told if there is no weak
        observer; else the commit is refused.
        """
        self._reader.require_open()
        return self._buffer.notify(row, column)

    # ------------------------------------------------------------------ the end

    @must_be_awaited
    async def commit(self, *, timeout: float | None = None) -> Timestamp | None:
        """Makes all writes visible at once. Returns when they are durable.

        Returns the commit timestamp, or None if there was nothing to write: then nothing is sent.
        Raises `ConflictError` if another transaction was first, and `OutcomeUnknown` if it cannot
        find out whether it committed. Raises `UsageError` if a call was not awaited that must be.
        """
        return await self._commit_now(timeout)

    async def _commit_now(self, timeout: float | None = None) -> Timestamp | None:
        reader, buffer = self._reader, self._buffer
        deadline = reader.deadline(timeout)
        if reader.late or self._unfinished() is not None:
            await self._complete(deadline)
        if reader.read_locks is not None:
            reader.read_locks.leave_out_lone_read_locks()
        if not buffer.cells.cells and not buffer.weak:
            self._end(Outcome.COMMITTED)
            if self._attempts is not None:
                self._attempts.committed(0, {})
            return None
        reader.ended = _COMMITTING
        try:
            if not reader.start:
                await reader.begin(deadline)
            if buffer.cells.cells:
                kept: KeptIndexes | None = None
                if may_have_indexes(self._env, buffer.cells):
                    kept = await self._with_entries(deadline)
                committing = self._commit = self._prepare_commit(kept)
                with reader.calls:
                    commit_ts = await committing.run(deadline)
            else:
                commit_ts = await self._only_notify(deadline)
        except OutcomeUnknown:
            self._end(Outcome.UNKNOWN)
            raise
        except BaseException as error:
            # If it was cancelled or interrupted in the middle, the outcome is not known here;
            # `resolve` can find out.
            sent = self._commit is not None and self._commit.may_be_committed
            self._end(Outcome.UNKNOWN if sent else Outcome.ABORTED)
            if isinstance(error, ConflictError):
                self._env.tally.lost_at(error.cell)
            raise
        self.commit_timestamp = int.__new__(Timestamp, commit_ts)  # the oracle's: in range
        self._env.tally.commits += 1
        self._end(Outcome.COMMITTED)
        if self._attempts is not None:
            # At once, rather than when the caller's thread has woken up.
            self._attempts.committed(commit_ts, buffer.cells.cells)
        return self.commit_timestamp

    async def _complete(self, deadline: float) -> None:
        """Waits until all writes have taken effect. Refuses calls that have done nothing so far, or
        only a part of their work."""
        error: BaseException | None
        try:
            error = await self._forgotten()
            if error is None and self._reader.late:
                await self._reader.late.settle(deadline)
        except BaseException as refused:  # noqa: BLE001 - raised below
            error = refused
        if error is not None:
            if not self._reader.ended:
                self.rollback()
            raise error
        self._reader.require_open()

    def _with_entries(self, deadline: float) -> Coroutine[Any, Any, KeptIndexes]:
        """The write set, with the entries of all indexes of its tables."""
        engine, reader = self._engine, self._reader

        async def read(cells: list[CellAddress]) -> Mapping[CellAddress, FoundCell]:
            seen = reader.seen or {}
            missing = [cell for cell in cells if cell not in seen]
            if not missing:
                return seen
            found = await reader.stored(missing, deadline)
            for cell in cells:
                if cell in seen:
                    found[cell] = seen[cell]
            return found

        return with_entries(
            engine.env, self._buffer.cells, reader.start, read, engine.row_bytes_max, deadline
        )

    def _prepare_commit(self, kept: KeptIndexes | None) -> Commit:
        engine, start, weak = self._engine, self._reader.start, self._buffer.weak
        env = engine.env
        write = WriteSteps(
            start,
            (self._buffer.cells if kept is None else kept.cells).stored(start),
            env.limits.value_inline_bytes_max,
            weak_notifications=sorted(weak) if weak else (),
            tables=self._reader.tables,
            kept=kept,
        )
        return Commit(
            env,
            engine.cleanup,
            engine.heartbeats,
            write,
            started_seconds=self._reader.started_seconds,
            statistics=self.statistics,
            alone=self._alone,
            only_two_phases=self._only_two_phases,
            is_followed=self._attempts is not None and self._attempts.is_followed,
        )

    async def _only_notify(self, deadline: float) -> int:
        """Writes only notifications, at a fresh timestamp: no locks, and nothing to decide."""
        env = self._engine.env
        left = max(deadline - self._engine.now(), 0.001)
        now = await env.timestamps.get(timeout_seconds=left)
        self.statistics.round_trips += 1
        cells = sorted(self._buffer.weak or ())
        await notify_weak_observers(env, cells, now, deadline, self.statistics)
        return now

    def rollback(self) -> None:
        """Discards the writes. None of them has left the program yet. It is refused after a commit,
        since it could not change the outcome."""
        if self._reader.ended and self.outcome is not Outcome.ABORTED:
            raise UsageError(f"this transaction {self._reader.ended}, so it cannot be rolled back")
        if not self._reader.ended:
            self._end(Outcome.ABORTED)

    async def resolve(self, *, timeout: float | None = None) -> Outcome:
        """Finds out the outcome after `OutcomeUnknown`, by sending exactly the same commit again.

        Returns COMMITTED or ABORTED; raises `OutcomeUnknown` if there is still no answer, and
        `OutcomeLost` if there can never be one again.
        """
        self._engine.require_usable()
        if timeout is not None:
            require_seconds(timeout)
        if self.outcome is not Outcome.UNKNOWN or self._commit is None:
            return self.outcome
        deadline = self._engine.now() + (timeout or self._reader.timeout_seconds)
        try:
            commit_ts = await self._commit.settle(deadline)
        except ConflictError:
            commit_ts = 0
        except OutcomeUnknown as unknown:
            if unknown.primary is None or self._engine.now() >= deadline:
                raise
            # The same commit cannot be sent again, perhaps because it has become too old.
            commit_ts = await settled(self._env, self._reader.start, unknown.primary, deadline)
        if commit_ts:
            self.commit_timestamp = Timestamp(commit_ts)
        self.outcome = Outcome.COMMITTED if commit_ts else Outcome.ABORTED
        return self.outcome

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        attempts = self._attempts
        turns = self._reader.turns if attempts is None else attempts.turns
        if turns is not None:
            if outcome is Outcome.COMMITTED:
                turns.committed(self._reader.start, self._buffer.cells.cells)
            elif attempts is None:  # others keep their places
                turns.end()
        self._reader.finish(_ENDINGS[outcome])
        self._reader.late = None
        self._forget_calls(self._engine.loop)
        seconds = self._engine.now() - self._begun_seconds
        if seconds >= self._engine.limits.slow_transaction_seconds:
            self._engine.slow_log.note(
                "slow transaction: %s after %.3f s, start %d, %d cells%s, %s",
                outcome.value,
                seconds,
                self._reader.start,
                len(self._buffer.cells.cells),
                self._whose(),
                self.statistics,
            )

    def _whose(self) -> str:
        """On whose behalf it is, for a log."""
        return ""

    async def __aenter__(self) -> Transaction:
        self._reader.require_open()
        return self

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Coroutine[None, None, object]:
        """Not a coroutine itself: that would be one more to wake with every answer. The commit need
        not be noted as a call that must be awaited: leaving the block awaits it."""
        if kind is None and not self._reader.ended:
            return self._commit_now() if self._waits is None else self.commit()
        return self._leave()

    async def _leave(self) -> None:
        if not self._reader.ended:
            self.rollback()

    def __del__(self) -> None:
        """A transaction dropped without an end is rolled back: nothing has left the program."""
        if not hasattr(self, "_buffer") or self._reader.ended:
            return  # it was refused when it was made, or has ended
        reader, cells = self._reader, self._buffer.cells.cells
        if cells or reader.late:
            lost = len(cells) + len(reader.late or ())
            warnings.warn(
                f"the writes of a dropped transaction are lost (cells: {lost}): "
                "leave its block, or call commit() or rollback()",
                RuntimeWarning,  # Python shows it by default, as for what nobody has awaited
                stacklevel=2,
                source=self,
            )
        if reader.start:
            self._engine.open_starts.discard(reader)


class TransactionInternals:
    """The inner side of a transaction: the rest of the library needs it, and programs do not.

    It is a view that is made for each use: if the transaction kept it, there would be a reference
    cycle for the garbage collector to find.
    """

    __slots__ = ("_reader", "_transaction", "buffer", "writes")

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._reader = transaction._reader
        self.buffer = transaction._buffer
        self.writes = transaction._buffer.cells

    async def write_together(
        self,
        puts: Sequence[tuple[object, Column[Any], Any]],
        deletes: Sequence[tuple[object, Column[Any]]],
    ) -> None:
        """As `set` and `delete` of each of them, or nothing if one is refused."""
        await self._transaction._write_together(puts, deletes)

    async def expires(self, column: Column[Any], timeout: float | None = None) -> bool:
        """True if values of the column expire. Ask after reading from its table: only then is it
        known whether the client's schema is the newest."""
        reader = self._reader
        deadline = reader.deadline(timeout)
        table_id = (await reader.info(column.table, deadline)).table_id
        schema = await reader.env.schema_of_reads(table_id, deadline)
        return column.name in schema.expiring

    def found_pages(
        self, table: Table[K], start: K, end: K, columns: Sequence[Column[Any]]
    ) -> AsyncGenerator[list[FoundRow], None]:
        """Scans rows as they are stored, with the commit timestamps of their cells."""
        return self._reader.found_pages(table, start, end, None, columns)

    def bind(self, table: str, table_id: int) -> None:
        """Fixes which table the name means in this transaction, before it is used."""
        known = self._reader.engine.catalog.known(table)
        if known is None or known.table_id != table_id:
            known = TableInfo(table_id, table, NO_OBSERVERS)
        self._reader.bind(known)

    def know(self, rows: KnownRows) -> None:
        """Cells as they are at the transaction's timestamp, so that they need not be read."""
        self._reader.known = rows

    async def versions(
        self, cells: Iterable[CellAddress], deadline: float
    ) -> dict[CellAddress, FoundCell]:
        """The newest versions of these cells at its timestamp, deletions among them."""
        return await self._reader.versions(cells, deadline)

    def resume(self, start: int, started_seconds: float) -> None:
        """Continues a transaction that was begun elsewhere. Call it before anything else.

        A gateway calls this, because its client keeps the start timestamp. `started_seconds` is
        when that was handed out, by this machine's monotonic clock: locks live from then on.
        """
        self._reader.set_start(start)
        self._reader.started_seconds = started_seconds
        self._transaction._alone = False
