"""The base of snapshots and transactions: reads at one timestamp, and calls that must be awaited.

A `Reader` reads by key and by range. It holds the timestamp, and what the names of tables mean at
it. From its first use to its end, it keeps history from collection.

A transaction that is run again after conflicts fetches its timestamp when it is first in line
(protocol/contention.py): a snapshot that is taken before would lose. So all that needs the
timestamp waits together with the first read, at whichever cell.
"""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from percolator.aio.engine import Engine
from percolator.arguments import (
    COLUMNS_MAX,
    listed,
    listed_cells,
    listed_columns,
    require_bool,
    require_seconds,
    require_table,
    require_whole,
)
from percolator.conditions import Condition, Predicate, require_condition
from percolator.errors import (
    CellAddress,
    InvalidArgument,
    PercolatorError,
    UsageError,
    harmless,
)
from percolator.protocol.environment import Statistics
from percolator.protocol.read import (
    FoundRow,
    LockResolver,
    count_rows,
    only_columns,
    read_rows,
    scan_pages,
)
from percolator.protocol.turns import TransactionTurns
from percolator.protocol.write_set import WriteSet
from percolator.retries import Attempts, Calls
from percolator.routing.catalog import TableInfo
from percolator.routing.cells import (
    FoundCell,
    KnownRows,
    RangeRequest,
    RowRequest,
    RowResult,
    known_rows,
    wants,
)
from percolator.schema import (
    Column,
    Columns,
    Readable,
    Row,
    Table,
    decoded_value,
    encoded_key,
    stored_names,
    stored_range,
)
from percolator.timestamps import NEWEST, Timestamp
from percolator.v1.tabletserver_pb2 import RowRead

K = TypeVar("K")
T = TypeVar("T")
D = TypeVar("D")

_NOTHING = FoundCell(0, None)


class Unsettled(Protocol):
    """Writes that have not taken effect yet, until they are settled."""

    def __len__(self) -> int: ...

    async def settle(self, deadline: float) -> None: ...


class Reader:
    """Reads at one timestamp, which is fetched with the first read."""

    start = 0
    """The timestamp; 0 before the first read."""
    started_seconds = 0.0
    """When it was received, on the monotonic clock."""
    _starting: asyncio.Future[int] | None = None
    """The request for the timestamp, shared by all reads that arrive while it is in flight."""
    at: Timestamp | None = None
    """The timestamp of a snapshot of the past."""
    ended = ""
    """Why it can no longer be used, for errors, such as "is closed"; empty while it is open. A
    commit in progress sets it, too."""
    finished = False
    """Nothing of it is still in progress, so it must no longer hold back collection."""
    is_admitted = False
    """It may begin, however many there are."""
    attempts: Attempts | None = None
    """The attempts of which its transaction is one."""
    turns: TransactionTurns | None = None
    """Its turns, if it is the only attempt."""
    _standing_in_line: asyncio.Future[None] | None = None
    """Done when the first read no longer stands in line."""
    known: KnownRows | None = None
    """Cells that are known as of its timestamp, and so need not be read."""
    late: Unsettled | None = None
    """The transaction's writes that have not taken effect yet, but must before anything is read."""
    seen: dict[CellAddress, FoundCell] | None = None
    """Indexed cells that a transaction has read, as they are stored: a commit that writes them need
    not read them again. None if there are none, as in most."""
    read_locks: WriteSet | None = None
    """Takes a read lock of each cell that is read, in a serializable transaction."""

    def __init__(
        self,
        engine: Engine,
        timeout_seconds: float | None,
        kind: str,
        own: WriteSet | None = None,
    ) -> None:
        """`kind` is the name in errors of what reads. `own`: what it has written itself."""
        self.engine = engine
        self.env = engine.env
        self.timeout_seconds = timeout_seconds or engine.limits.call_seconds
        self._kind = kind
        self.own = own
        self.tables: dict[str, TableInfo] = {}
        """The tables used so far. A name keeps its meaning to the end: after the table was dropped
        and created again, the transaction would read nothing and write into the new one."""
        self.statistics = Statistics()
        self.calls = Calls(engine.admission)

    async def timestamp(self) -> Timestamp:
        """The timestamp at which it reads. It is fetched now if nothing was read yet."""
        deadline = self.deadline(None)
        return Timestamp(self.start or await self.begin(deadline))

    # ------------------------------------------------------------------ its timestamp

    def _begin_at(self, address: CellAddress, deadline: float) -> Awaitable[int]:
        """Fetches the timestamp, in order to read this cell."""
        attempts = self.attempts
        if attempts is None or self._standing_in_line or self._starting is not None:
            return self.begin(deadline)  # perhaps too late: another read is the first
        if not attempts.must_wait(address):
            return self.begin(deadline)
        return self._begin_in_line(attempts, address, deadline)

    async def _begin_in_line(
        self, attempts: Attempts, address: CellAddress, deadline: float
    ) -> int:
        """Fetches the timestamp when this transaction is first in line at the cell.

        Before that, it would lose there. It waits for half of the call's time at most, since the
        call needs some of it.
        """
        standing = self._standing_in_line = asyncio.get_running_loop().create_future()
        try:
            handover = await attempts.wait_in_line(address, _half_way(self.engine.now(), deadline))
            if handover is not None and not self.start and self._starting is None:
                # Directly above the commit of the transaction that stood in front of it.
                self.set_start(handover.start)
                self.require_older_tables()
                self.known = handover.known(address)
        finally:
            self._standing_in_line = None
            standing.set_result(None)
        return self.start or await self.begin(deadline)

    async def _line_up(self, turns: TransactionTurns, deadline: float) -> int:
        """Fetches the timestamp when its turns have come, if they do within half of the call's
        time."""
        standing = self._standing_in_line = asyncio.get_running_loop().create_future()
        try:
            self.statistics.round_trips += 1
            came = await turns.line_up(_half_way(self.engine.now(), deadline))
            if came is not None:
                cell, turn = came
                if self.attempts is not None:
                    self.attempts.turn_came(cell, turn)
                if turn.start and not self.start and self._starting is None:
                    self.set_start(turn.start)
                    self.require_older_tables()
                    if turn.is_known:
                        self.known = KnownRows(cell.table_id, {cell.row: {cell.column: turn.found}})
        finally:
            self._standing_in_line = None
            standing.set_result(None)
        return self.start or await self.begin(deadline)

    def made_turns(self) -> TransactionTurns:
        """Its turns, which all attempts at its transaction share."""
        if self.attempts is not None:
            return self.attempts.made_turns()
        if self.turns is None:
            self.turns = TransactionTurns(self.env)
        return self.turns

    async def begin(self, deadline: float) -> int:
        """Fetches the timestamp. Never before the first use, so that all earlier commits show.

        Fetched in the background on entering the block, it would be of no known time: the program
        could not tell which commits of other clients come before it.
        """
        if self._standing_in_line is not None:
            # Another read stands in line.
            now = self.engine.now()
            until = _half_way(now, deadline)
            await asyncio.wait((self._standing_in_line,), timeout=max(until - now, 0.0))
            if self.start:
                return self.start
        attempts = self.attempts
        turns = None if attempts is None or self._starting is not None else attempts.turns
        if turns is not None and attempts is not None and attempts.lines_up:
            return await self._line_up(turns, deadline)
        if not self.is_admitted:
            await self.engine.admission.enter(deadline)
            self.is_admitted = True
        if self.at is not None:
            return await self._begin_in_the_past(self.at, deadline)
        while True:
            starting = self._starting
            if starting is None:
                self.statistics.round_trips += 1
                left = max(deadline - self.engine.now(), 0.001)
                starting = self.engine.timestamps.get(timeout_seconds=left)
                self._starting = starting
            try:
                with self.calls:
                    start = await starting
            except asyncio.CancelledError:
                self._starting = None
                task = asyncio.current_task()
                if task is None or task.cancelling() or not starting.cancelled():
                    raise
                continue  # another reader of this transaction was cancelled, not this one
            except PercolatorError as error:
                self._starting = None
                raise harmless(error)  # noqa: B904 - it has its cause already
            if not self.start:
                self.set_start(start)
            self.require_older_tables()
            if self.engine.is_on_rows:
                await self.engine.require_tables(self.tables.values(), deadline)
            return self.start

    async def _begin_in_the_past(self, at: Timestamp, deadline: float) -> int:
        self.statistics.round_trips += 1
        left = max(deadline - self.engine.now(), 0.001)
        now = await self.engine.fresh_timestamp(left)
        if at > now:
            # Later commits below it would appear in a snapshot that was already read.
            raise InvalidArgument(
                "at", f"{at} is in the future: the oracle is at {Timestamp(now).describe()}"
            )
        self.set_start(at)
        self.require_older_tables()
        if self.engine.is_on_rows:
            await self.engine.require_tables(self.tables.values(), deadline)
        return at

    def set_start(self, start: int) -> None:
        """Begins at this timestamp, which was just received."""
        if self.finished:  # while the timestamp was fetched: nothing would remove it again
            self.require_not_ended()
        self.start = start
        self.started_seconds = self.engine.now()
        self._starting = None
        self.engine.open_starts.add(self, start)

    def finish(self, ended: str) -> None:
        """Ends it: from now on, the history that it needed may be collected."""
        self.ended = ended
        self.finished = True
        if self.start or self.is_admitted:
            self.engine.admission.note_end()
        if self.start:
            self.engine.open_starts.discard(self)

    # ------------------------------------------------------------------ tables and cells

    def bound(self, name: str) -> TableInfo | None:
        """The table that has this name here; None if a master has to be asked."""
        info = self.tables.get(name) or self.engine.catalog.known(name)
        if info is None or (self.engine.is_on_rows and not self.engine.is_current(info)):
            return None
        return self.bind(info)

    def bind(self, info: TableInfo) -> TableInfo:
        """Gives the name its meaning, if it has none yet. Raises `SchemaError` if the table is
        younger than the snapshot."""
        if info.created_at > self.start > 0:
            info.require_older_than(self.start)
        return self.tables.setdefault(info.name, info)

    def require_older_tables(self) -> None:
        """Called once the timestamp is known: tables may have been used before."""
        for info in self.tables.values():
            info.require_older_than(self.start)

    def known_address(self, row: object, column: Readable[Any]) -> CellAddress | None:
        """The cell's address, if its table was used before."""
        if not isinstance(column, Column):
            raise UsageError(f"expected a Column, got {type(column).__name__}")
        table = column.table
        info = self.bound(table.name)
        if info is None:
            return None
        if info.codecs.readable.get(column.name) is not column:
            info.codecs.require_readable(column)
        return CellAddress(info.table_id, self.row(table, row, column), column.name)

    async def address(self, row: object, column: Readable[Any], deadline: float) -> CellAddress:
        table = column.table
        info = await self.info(table, deadline)
        info.codecs.require_readable(column)
        return CellAddress(info.table_id, self.row(table, row, column), column.name)

    async def info(self, table: Table[Any], deadline: float) -> TableInfo:
        require_table(table)
        found = self.bound(table.name)
        if found is None:
            used = self.tables.get(table.name)
            if used is not None:
                await self.engine.require_tables((used,), deadline)
                return used
            found = self.bind(await self.engine.table(table, deadline))
        return found

    def row(self, table: Table[Any], key: object, column: Readable[Any] | None = None) -> bytes:
        row = encoded_key(table, key, column=column)
        if len(row) >= self.engine.row_bytes_max:
            self.engine.require_row("row", row)
        return row

    # ------------------------------------------------------------------ checks

    def deadline(self, timeout: float | None) -> float:
        """The deadline of a call that begins now. Also checks the call, as every call must be."""
        if self.ended or self.engine.closed or get_running_loop() is not self.engine.loop:
            self.require_open()  # raises the error that says what is wrong
        if timeout is None:
            return self.engine.now() + self.timeout_seconds
        require_seconds(timeout)
        return self.engine.now() + timeout

    def require_open(self) -> None:
        if self.ended or self.engine.closed or get_running_loop() is not self.engine.loop:
            self.engine.require_usable()
            self.require_not_ended()

    def require_not_ended(self) -> None:
        """Raises `UsageError` if it has ended, or the database was closed. Works in any thread."""
        if self.engine.closed:
            raise UsageError("the database is closed")
        if self.ended:
            raise UsageError(f"this {self._kind} {self.ended}; begin a new one")

    @property
    def cells_max(self) -> int:
        """The most cells that may be read at once."""
        return self.engine.limits.get_many_cells_max

    # ------------------------------------------------------------------ reads

    async def get(
        self, row: object, column: Readable[Any], default: object, timeout: float | None
    ) -> Any:  # noqa: ANN401 - the column's values
        """The value of one cell, or `default` if it has none."""
        deadline = self.deadline(timeout)
        address = self.known_address(row, column) or await self.address(row, column, deadline)
        if self.late:
            await self.late.settle(deadline)
        if self.read_locks is not None:
            self.read_locks.read_lock(address)
        found = self._at_hand(address)
        if found is None:
            start = self.start
            if not start:
                start = await self._begin_at(address, deadline)
            elif self.attempts is not None:
                self.attempts.reads(address, start)
            # Whoever stood in front of it in a line hands the cell over.
            found = self._at_hand(address)
            if found is None:
                self.statistics.round_trips += 1
                self.statistics.rows_read += 1
                with self.calls:
                    answer = await self.engine.cells.read_cell(*address, start, deadline)
                    if isinstance(answer, RowResult):
                        answer = await self._past_locks(address, answer, start, deadline)
                found = answer
                self._keep(address, found)
        if found is None or found.value is None:
            return default
        return decoded_value(column, row, found.value)

    async def get_in_turn(
        self,
        writes: WriteSet,
        row: object,
        column: Readable[Any],
        default: object,
        timeout: float | None,
    ) -> Any:  # noqa: ANN401 - the column's values
        """As `get`, for a cell that is about to be written: locks it in `writes`, and waits until
        those that came before have written it. Raises `ConflictError` if it was written above the
        snapshot."""
        deadline = self.deadline(timeout)
        address = self.known_address(row, column) or await self.address(row, column, deadline)
        if self.late:
            await self.late.settle(deadline)
        self.require_open()  # a commit that began meanwhile would leave the lock out
        writes.lock(address)
        if self.env.turns is not None and self._at_hand(address) is None:
            turns = self.made_turns()
            has_waited = False
            if not self.start:
                turns.ask(address)
                if self._starting is None and self._standing_in_line is None:
                    await self._line_up(turns, deadline)
                    has_waited = True
                else:
                    await self.begin(deadline)
            if not has_waited and address not in turns.held:
                self.statistics.round_trips += 1
                until = _half_way(self.engine.now(), deadline)
                turn = await turns.at(address, self.start, until)
                if turn is not None and turn.is_known and not self._expires(address):
                    self.require_open()
                    value = None if turn.found is None else turn.found.value
                    return default if value is None else decoded_value(column, row, value)
        return await self.get(row, column, default, max(deadline - self.engine.now(), 0.001))

    def _at_hand(self, address: CellAddress) -> FoundCell | None:
        """The cell, if no server has to be asked for it: the transaction has written it, or knows
        the row. A missing cell is one without a value."""
        if self.own is not None and self.own.cells:
            written = self.own.own_value(address)
            if written is not None:
                return written
        if self.known is not None and self.start and self.known.has(address):
            found = self.known[address] or _NOTHING
            self._keep(address, found)
            return found
        return None

    def _keep(self, address: CellAddress, found: FoundCell | None) -> None:
        """Keeps what is stored in a cell for a commit that writes it, if it is indexed."""
        if self.own is None:
            return
        schema = self.env.schemas.get(address.table_id)
        if schema is not None and address.column in schema.indexed:
            if self.seen is None:
                self.seen = {}
            if len(self.seen) < self.engine.limits.transaction_cells_max:
                self.seen[address] = found or _NOTHING

    def _keep_row(self, request: RowRequest, answer: RowResult) -> None:
        """As `_keep`, for the cells of a row that were asked for."""
        table_id, read = request
        schema = self.env.schemas.get(table_id)
        for column in () if schema is None else schema.indexed:
            found = answer.found.get(column)
            if found is not None or read.all_columns or column in read.columns:
                self._keep(CellAddress(table_id, read.row, column), found)

    def at_hand(self, row: object, column: Readable[Any]) -> FoundCell | None:
        """The cell, if `get` would ask nobody for it. Works in the transaction's thread, too: a
        trip to the event loop costs more than most observers."""
        if self.late or (self.known is None and not (self.own and self.own.cells)):
            return None
        address = self.known_address(row, column)
        if address is None:
            return None
        if self.read_locks is not None:
            self.read_locks.read_lock(address)
        return self._at_hand(address)

    async def get_now(
        self, row: object, column: Readable[Any], default: object, timeout: float | None
    ) -> Any:  # noqa: ANN401 - the column's values
        """As `get`, if nothing else is read: without a timestamp, if that is possible.

        A snapshot needs a timestamp so that all its reads agree. A read that is the only one does
        not: it shows what its tablet has when it looks, as if the oracle had handed out a timestamp
        just then:

        - Every commit that has a timestamp by then is shown, or is in the way. A commit in one
          round holds its cells before it asks for its timestamp, and the tablet waits for held
          cells. A commit in two phases has a lock before that, and *every* lock is in the way: its
          owner may have committed at its primary already, and said so.
        - Every later commit of the cell asks for its timestamp later.

        Nothing can be decided about a lock without a timestamp, since its owner may be pushed above
        none. So if one is met, the cell is read again, in a snapshot. So is a cell whose values
        expire: only a timestamp decides which have.
        """
        engine, deadline = self.engine, self.deadline(timeout)
        if not engine.is_on_rows:  # a row store knows nothing but timestamps
            cell = self.known_address(row, column) or await self.address(row, column, deadline)
            if not self._expires(cell):
                await engine.admission.enter(deadline)
                self.is_admitted = True
                try:
                    with self.calls:
                        found = await engine.cells.read_cell(*cell, NEWEST, deadline)
                except InvalidArgument as refused:
                    # Values of the column expire, and this client does not know it yet.
                    if not refused.field.endswith(".timestamp"):
                        raise
                else:
                    if not isinstance(found, RowResult):
                        if found is None or found.value is None:
                            return default
                        return decoded_value(column, row, found.value)
        return await self.get(row, column, default, max(deadline - engine.now(), 0.001))

    def _expires(self, cell: CellAddress) -> bool:
        """True if values of the cell expire, as far as this client knows."""
        schema = self.env.schemas.get(cell.table_id)
        return schema is not None and cell.column in schema.expiring

    async def _past_locks(
        self, address: CellAddress, answer: RowResult, start: int, deadline: float
    ) -> FoundCell | None:
        """Resolves the lock on a cell, and reads the cell again."""
        table_id, row, name = address
        request = RowRequest(table_id, RowRead(row=row, columns=(name,), timestamp=start))
        answers = [answer]
        cleanup = self.engine.cleanup
        resolver = LockResolver(self.env, cleanup, start, deadline, self.statistics)
        await resolver.read_past((request,), answers)
        return answers[0].found.get(name)

    async def get_many(
        self,
        table: Table[Any] | Iterable[tuple[object, Readable[Any]]],
        rows: Iterable[Any] | None,
        columns: Columns | None,
        timeout: float | None,
    ) -> list[Any]:
        """Reads many rows, or many cells, in one round trip."""
        if isinstance(table, Table):
            return await self._get_rows(table, rows, columns, timeout)
        if rows is not None or columns is not None:
            require_table(table)  # raises
        return await self._get_cells(table, timeout)

    async def _read_rows(
        self, asked: Sequence[RowRequest], deadline: float, bytes_max: int = 0
    ) -> list[RowResult]:
        cleanup = self.engine.cleanup
        with self.calls:
            answers = await read_rows(
                self.env, cleanup, asked, deadline, self.statistics, bytes_max=bytes_max
            )
        if self.own is not None:
            for request, answer in zip(asked, answers, strict=True):
                self._keep_row(request, answer)
        return answers

    async def _get_cells(
        self, cells: Iterable[tuple[object, Readable[Any]]], timeout: float | None
    ) -> list[Any]:
        deadline = self.deadline(timeout)
        pairs = listed_cells(cells, self.cells_max)
        if self.late:
            await self.late.settle(deadline)
        found: dict[CellAddress, bytes | None] = {}
        addresses: list[CellAddress] = []
        wanted: dict[tuple[int, bytes], dict[bytes, None]] = {}
        for row, column in pairs:
            address = self.known_address(row, column) or await self.address(row, column, deadline)
            addresses.append(address)
            if self.read_locks is not None:
                self.read_locks.read_lock(address)
            written = None if self.own is None else self.own.own_value(address)
            if written is None and self.known is not None and self.known.has(address):
                written = self.known[address] or _NOTHING
            if written is None:
                wanted.setdefault(address[:2], {})[address.column] = None
            else:
                found[address] = written.value
        if wanted:
            start = self.start or await self.begin(deadline)
            requests = [
                RowRequest(table_id, RowRead(row=row, columns=names, timestamp=start))
                for (table_id, row), columns in wanted.items()
                for names in _portions(columns)
            ]
            answers = await self._read_rows(requests, deadline)
            for request, answer in zip(requests, answers, strict=True):
                for name, cell in answer.found.items():
                    found[CellAddress(request.table_id, request.read.row, name)] = cell.value
        return [
            None if (value := found.get(address)) is None else decoded_value(column, row, value)
            for address, (row, column) in zip(addresses, pairs, strict=True)
        ]

    async def _get_rows(
        self,
        table: Table[K],
        rows: Iterable[K] | None,
        columns: Columns | None,
        timeout: float | None,
    ) -> list[Row[K]]:
        deadline = self.deadline(timeout)
        info = await self.info(table, deadline)
        columns = None if columns is None else listed_columns(columns)
        names, prefixes = stored_names(table, columns)
        info.codecs.require(table, columns)
        if self.read_locks is not None and (names is None or prefixes):
            raise UsageError(
                "a serializable transaction reads columns by name: one that another transaction "
                "adds to the row has no cell to lock yet"
            )
        keys = listed(rows, "rows", self.cells_max)
        if len(keys) * max(len(names or ()), 1) > self.cells_max:
            raise InvalidArgument("rows", f"more than {self.cells_max} cells at once")
        encoded = [self.row(table, key) for key in keys]
        if not (names is None or names or prefixes):
            return [Row(table, key, {}, columns, info.codecs) for key in keys]
        if self.late:
            await self.late.settle(deadline)
        if self.read_locks is not None:
            for row in encoded:
                for name in names or ():
                    self.read_locks.read_lock(CellAddress(info.table_id, row, name))
        stored = await self.stored_rows(info.table_id, encoded, names, prefixes, deadline)
        return [
            Row(table, key, cells, columns, info.codecs)
            for key, cells in zip(keys, stored, strict=True)
        ]

    async def stored_rows(
        self,
        table_id: int,
        rows: Sequence[bytes],
        names: list[bytes] | None,
        prefixes: tuple[bytes, ...],
        deadline: float,
    ) -> list[dict[bytes, bytes]]:
        """The values of rows by column, with the transaction's own writes. `names` of None means
        all columns."""
        found = await self.stored_cells(table_id, rows, names, prefixes, deadline)
        return [
            {
                column: cell.value
                for column, cell in cells.items()
                if cell is not None and cell.value is not None
            }
            for cells in found
        ]

    async def stored_cells(
        self,
        table_id: int,
        rows: Sequence[bytes],
        names: list[bytes] | None,
        prefixes: tuple[bytes, ...],
        deadline: float,
        *,
        bytes_max: int = 0,
    ) -> list[Mapping[bytes, FoundCell | None]]:
        """As `stored_rows`, but cells instead of values, some of which may have none.

        Raises `InvalidArgument` if they have more than `bytes_max` bytes; 0 means any number.
        """
        start = self.start or await self.begin(deadline)
        known = known_rows(self.known, table_id, rows, None if prefixes else names)
        requests = [
            RowRequest(
                table_id,
                RowRead(
                    row=row,
                    columns=names or (),
                    all_columns=names is None,
                    timestamp=start,
                    column_prefixes=prefixes,
                ),
            )
            for row in rows
            if row not in known
        ]
        answers = await self._read_rows(requests, deadline, bytes_max)
        written = self._written(table_id, rows, names, prefixes)
        read, found = iter(answers), list[Mapping[bytes, FoundCell | None]]()
        for row in rows:
            stored = known[row] if row in known else next(read).found
            own = written.get(row)
            found.append(stored if own is None else {**stored, **own})
        return found

    async def versions(
        self, cells: Iterable[CellAddress], deadline: float
    ) -> dict[CellAddress, FoundCell]:
        """The newest versions of these cells at its timestamp, deletions among them."""
        found = await self.stored(cells, deadline)
        self.require_open()
        return found

    async def stored(
        self, cells: Iterable[CellAddress], deadline: float
    ) -> dict[CellAddress, FoundCell]:
        """As `versions`, also while it is being committed."""
        columns: dict[tuple[int, bytes], list[bytes]] = {}
        for table_id, row, column in cells:
            columns.setdefault((table_id, row), []).append(column)
        start = self.start or await self.begin(deadline)
        requests = [
            RowRequest(
                table_id, RowRead(row=row, columns=names, timestamp=start, report_deletes=True)
            )
            for (table_id, row), names in columns.items()
        ]
        answers = await self._read_rows(requests, deadline)
        return {
            CellAddress(table_id, row, column): cell
            for (table_id, row), answer in zip(columns, answers, strict=True)
            for column, cell in answer.found.items()
        }

    def _written(
        self,
        table_id: int,
        rows: Sequence[bytes],
        names: list[bytes] | None,
        prefixes: tuple[bytes, ...],
    ) -> dict[bytes, dict[bytes, FoundCell]]:
        """The transaction's own writes to these rows, by row and column; a deletion has no
        value."""
        own = self.own
        if own is None or not own.cells:
            return {}
        if names is None or prefixes:
            cells = [
                CellAddress(table_id, row, column)
                for row, writes in own.of_rows(table_id, rows).items()
                for column in writes
                if wants(column, names, prefixes)
            ]
        else:
            cells = [CellAddress(table_id, row, name) for row in rows for name in names]
        found: dict[bytes, dict[bytes, FoundCell]] = {}
        for cell in cells:
            written = own.own_value(cell)
            if written is not None:
                found.setdefault(cell.row, {})[cell.column] = written
        return found

    # ------------------------------------------------------------------ scans

    async def found_pages(
        self,
        table: Table[K],
        start: K | None,
        end: K | None,
        prefix: K | None,
        columns: Columns | None,
        *,
        where: Condition | None = None,
        reverse: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[list[FoundRow], None]:
        """Yields the stored rows and cells of a range, in the pages in which they arrive."""
        if limit is not None:
            require_whole(limit, "limit", least=0)
        require_bool(reverse, "reverse")
        bounds = (start, end, prefix)
        request = await self._range(table, bounds, columns, where, timeout, is_empty=limit == 0)
        if request is None:
            return
        request = request._replace(reverse=reverse, row_limit=limit or 0)
        shown = None if columns is None else stored_names(table, columns)
        seconds = timeout or self.timeout_seconds
        left = limit
        engine = self.engine
        pages = scan_pages(engine.env, engine.cleanup, request, self.own, seconds, self.statistics)
        async with aclosing(pages):
            async for page in pages:
                self.require_open()
                if where is not None and shown is not None:
                    page = only_columns(page, *shown)
                rows = page[:left]
                if rows:
                    yield rows
                if left is not None:
                    left -= len(rows)
                    if left <= 0:
                        return

    async def count(
        self,
        table: Table[K],
        bounds: tuple[K | None, K | None, K | None],
        where: Condition | None,
        timeout: float | None,
    ) -> int:
        """The number of rows of a range, without reading them all into this process."""
        columns: Columns | None = None
        if where is not None:
            require_condition(where, "where")
            if not Predicate(where.message).keeps_empty:
                columns = ()  # nor need any other column be looked at
        request = await self._range(table, bounds, columns, where, timeout)
        if request is None:
            return 0
        seconds = timeout or self.timeout_seconds
        engine = self.engine
        found = await count_rows(
            engine.env, engine.cleanup, request, self.own, seconds, self.statistics
        )
        self.require_open()
        return found

    async def _range(
        self,
        table: Table[K],
        bounds: tuple[K | None, K | None, K | None],
        columns: Columns | None,
        where: Condition | None,
        timeout: float | None,
        *,
        is_empty: bool = False,
    ) -> RangeRequest | None:
        """The request for the rows between `bounds` (start, end and prefix); None if there are
        none."""
        deadline = self.deadline(timeout)
        if self.read_locks is not None:
            raise UsageError(
                "a serializable transaction cannot scan or count: a row that another transaction "
                "adds to the range has no cell to lock yet; read cells by key, one of which "
                "changes with the range"
            )
        require_table(table)
        first, last = stored_range(table, *bounds)
        names, prefixes = stored_names(table, columns)
        predicate = None
        if where is not None:
            require_condition(where, "where")
            asked, _ = stored_names(table, where.columns)
            if names is not None:
                names = list(dict.fromkeys(names + (asked or [])))
            predicate = Predicate(where.message, "where")
        if not (names is None or names or prefixes):
            # Rows without a value in them are left out, so there would never be any.
            raise InvalidArgument("columns", "is empty; omit it to read all columns")
        info = await self.info(table, deadline)
        info.codecs.require(table, columns)
        if where is not None:
            info.codecs.require(table, where.columns)
        if self.late:
            await self.late.settle(deadline)
        if is_empty or (last and first >= last):
            return None
        return RangeRequest(
            info.table_id,
            first,
            last,
            None if names is None else tuple(names),
            self.start or await self.begin(deadline),
            prefixes=prefixes,
            predicate=predicate,
        )


def _portions(columns: dict[bytes, None]) -> Sequence[Iterable[bytes]]:
    """Columns of one row, as many at a time as one read may name."""
    if len(columns) <= COLUMNS_MAX:
        return (columns,)
    names = list(columns)
    return [names[at : at + COLUMNS_MAX] for at in range(0, len(names), COLUMNS_MAX)]


def _half_way(now: float, deadline: float) -> float:
    return now + (deadline - now) / 2
