"""How long a caller waits for the store, and which errors it outlasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from copy import copy
from typing import Final, NamedTuple, TypeVar

from percolator.errors import CellAddress, DeadlineExceeded, PercolatorError, Retry, SchemaError
from percolator.formats.records import KIND_LOCK_ONLY, LOCK_HEADER
from percolator.limits import Limits
from percolator.rowstore.layout import EVERY_COLUMN, LOCKS, Times, column_bounds, column_of, row_of
from percolator.rowstore.port import TIME_UNIT, RowStore, Selection, StoredRow, can_be_named
from percolator.v1.cells_pb2 import SPACE_LOCK, Cell
from percolator.wire.backoff import Backoff, asked_pause_seconds
from percolator.world import World

T = TypeVar("T")

_TIMEOUT_SECONDS_MIN = 0.001
_NO_TABLE = (
    "it was dropped; but if `percolator tables list` shows it, somebody has deleted it in the "
    "store itself: restore it there, or `percolator tables delete` it here, too"
)


class Patience:
    """One caller's attempts until its deadline, an instant of the monotonic clock."""

    def __init__(self, world: World, limits: Limits, deadline: float) -> None:
        self._clock = world.clock
        self._random = world.random
        self._attempt_seconds_max = limits.attempt_seconds_max
        self._deadline = deadline
        self._was_refused = False
        self._backoff = Backoff(
            world.clock, world.random, limits.backoff_seconds_min, limits.backoff_seconds_max
        )

    @property
    def attempt_seconds(self) -> float:
        """The time-out of the next attempt."""
        left = self._deadline - self._clock.monotonic_seconds()
        return max(min(left, self._attempt_seconds_max), _TIMEOUT_SECONDS_MIN)

    def refused(self) -> None:
        """A check has refused its changes. Of a call that reached the store twice, the other copy
        may have made them, and be the very reason; or it may still arrive, and make them. So from
        now on no error says that nothing was executed: only the row tells."""
        self._was_refused = True

    async def repeated(self, call: Callable[[float], Awaitable[T]]) -> T:
        """The answer to a call that may be sent again even if it was executed. It is given the
        time-out of each attempt."""
        while True:
            try:
                return await call(self.attempt_seconds)
            except PercolatorError as error:
                await self.outlast(error, is_read=True)

    async def outlast(self, problem: PercolatorError, *, is_read: bool) -> None:
        """Returns when the call may be sent again: it was not executed, or it changes nothing.
        Raises the error if that is not so, and `DeadlineExceeded` if the time is up."""
        if isinstance(problem, SchemaError):
            gone = SchemaError(f"{problem.message}: {_NO_TABLE}", where=problem.where)
            raise self._judged(gone) from problem
        if problem.retry is Retry.USELESS or (problem.retry is Retry.UNKNOWN and not is_read):
            raise self._judged(problem)
        await self.keep_pause(problem.retry_after_seconds)
        await self.again(problem)

    async def keep_pause(self, asked_seconds: float) -> None:
        """Returns after a pause that the store has asked for; at the deadline at the latest."""
        if asked_seconds:
            seconds = asked_pause_seconds(self._random, asked_seconds)
            left = self._deadline - self._clock.monotonic_seconds()
            await self._clock.sleep(max(min(seconds, left), 0.0))

    async def again(self, problem: PercolatorError | None = None) -> None:
        """Returns after a pause. Raises `DeadlineExceeded` if no time is left: whatever was
        attempted has not been executed, unless a check has refused it."""
        if not await self._backoff.pause(self._deadline):
            last = f"; last error: {problem.message}" if problem else ""
            late = DeadlineExceeded(
                f"no answer in time{last}", where=problem.where if problem else ""
            )
            late.retry = Retry.SAFE
            raise self._judged(late)

    def _judged(self, problem: PercolatorError) -> PercolatorError:
        if self._was_refused and problem.retry is not Retry.UNKNOWN:
            problem = copy(problem)  # others may have received the same object
            problem.retry = Retry.UNKNOWN
        return problem


# Scans for those who walk over whole tables: each answer has a limit of time, the scan has none.
#
# A call may be lost, and so may any part of its answer. Whoever gives a whole scan one time-out has
# to choose it so long that a lost message costs that long. Here a scan that is silent is begun
# again where it was. But silence may also mean that nothing is selected in a long part of the
# table. A store says then how far it has come, now and then; not every store does, and none does so
# often. So the scan is more patient each time; and once it has come further, as patient as that has
# taught it.

_SILENCE_SECONDS_MAX: Final = 30.0
"""The longest time without progress. Also for how long errors are outlasted."""
_SCAN_SECONDS: Final = 3_600.0
"""The time-out of the call itself. It ends only what nobody waits for any more."""


async def steady_scan(
    store: RowStore,
    table_id: int,
    selections: Sequence[Selection],
    world: World,
    limits: Limits,
    *,
    first: bytes = b"",
    rows_max: int = 0,
) -> AsyncGenerator[StoredRow, None]:
    """As `RowStore.scan`, forwards and to the end of the table. Rows are read at different times.
    Raises `DeadlineExceeded` if it makes no progress for too long."""
    clock, left = world.clock, rows_max
    silence, is_last_try = limits.silence_seconds, False

    def patient() -> Patience:
        return Patience(world, limits, clock.monotonic_seconds() + _SILENCE_SECONDS_MAX)

    patience = patient()
    while True:
        stream = store.scan(
            table_id,
            first,
            b"",
            selections,
            rows_max=left,
            reverse=False,
            timeout_seconds=_SCAN_SECONDS,
            marks=True,
        )
        try:
            async with aclosing(stream) as rows:
                asked = clock.monotonic_seconds()
                while (row := await _next(rows, first, silence)) is not None:
                    waited = clock.monotonic_seconds() - asked
                    if row.cells:
                        yield row
                        first, left = row.key + b"\0", max(left - 1, 0)
                        if rows_max and not left:
                            return
                    else:
                        first = row.key
                    silence = min(max(2 * waited, limits.silence_seconds), _SILENCE_SECONDS_MAX)
                    is_last_try, patience = False, patient()
                    asked = clock.monotonic_seconds()
                return
        except TimeoutError:
            if is_last_try:
                raise DeadlineExceeded(
                    f"a scan of table {table_id} has come no further than {first!r} for "
                    f"{silence:g} s"
                ) from None
            silence = min(2 * silence, _SILENCE_SECONDS_MAX)
            is_last_try, patience = silence == _SILENCE_SECONDS_MAX, patient()
        except PercolatorError as error:
            await patience.outlast(error, is_read=True)


async def _next(
    rows: AsyncGenerator[StoredRow, None], first: bytes, seconds: float
) -> StoredRow | None:
    """The next row, or the next mark behind `first`: one that says nothing new is no progress."""
    async with asyncio.timeout(seconds):
        async for row in rows:
            if row.cells or row.key > first:
                return row
    return None


# Scans for those who walk over a range part by part, and need each part before the next.
#
# A call may end, at its time-out, before it has found anything: in a long stretch of the table,
# nothing may be selected. A store says now and then how far it has come. So a part ends where its
# call broke off, and the next one goes on from there.


class Part(NamedTuple):
    """The first part of a range."""

    rows: list[StoredRow]
    rest: bytes
    """The key from which on there may be more; empty if there is not."""


async def scanned_part(
    store: RowStore,
    table_id: int,
    first: bytes,
    end: bytes,
    selections: Sequence[Selection],
    rows_max: int,
    patience: Patience,
) -> Part:
    """At most so many of the rows with first <= key < end (empty: to the last) in which something
    is selected, in order; perhaps none, although there are more behind."""
    while True:
        rows: list[StoredRow] = []
        rest = first
        stream = store.scan(
            table_id,
            first,
            end,
            selections,
            rows_max=rows_max,
            reverse=False,
            timeout_seconds=patience.attempt_seconds,
            marks=True,
        )
        try:
            async with aclosing(stream) as found:
                async for row in found:
                    if row.cells:
                        rows.append(row)
                        rest = row.key + b"\0"
                    else:
                        rest = row.key
        except PercolatorError as error:
            if rest <= first or error.retry is Retry.USELESS:
                await patience.outlast(error, is_read=True)
                continue
            await patience.keep_pause(error.retry_after_seconds)
            return Part(rows, rest)
        return Part(rows, rest if len(rows) == rows_max else b"")


# The locks of a table, found by scanning it: all old ones, or those of some transactions.

_ROWS_PER_PAGE: Final = 1_000

Locked = list[tuple[int, CellAddress]]
"""Cells with the start timestamps of the transactions that have locked them."""


async def stored_locks(
    store: RowStore,
    table_id: int,
    times: Times,
    world: World,
    limits: Limits,
    *,
    below: int = 0,
    limit: int = 0,
) -> list[Cell]:
    """Locks of transactions that began below `below` (0: all), of at least `limit` cells if there
    are as many (0: without a limit)."""
    selection = Selection(LOCKS, until_time=times.at_or_above(below) if below else 0)
    stream = steady_scan(store, table_id, (selection,), world, limits, rows_max=limit)
    async with aclosing(stream) as rows:
        return [
            Cell(space=SPACE_LOCK, row=row_of(key), column=column_of(one.column), value=one.value)
            async for key, cells in rows
            for one in cells
        ]


async def cells_locked_by(
    store: RowStore,
    times: Times,
    table_id: int,
    columns: Iterable[bytes],
    starts: Collection[int],
    patience: Patience,
) -> AsyncGenerator[Locked, None]:
    """The cells of these columns that the transactions that began then have locked to change them,
    page by page. A lock that is there from beginning to end is found."""
    between = times.time(min(starts)), times.time(max(starts)) + TIME_UNIT
    wanted = frozenset(columns)
    selections = [Selection(LOCKS, *column_bounds(one), *between) for one in sorted(wanted)]
    if not can_be_named(selections, store.check_bytes_max):
        selections = [Selection(LOCKS, *EVERY_COLUMN, *between)]
    at = b""
    while True:
        rows, at = await scanned_part(
            store, table_id, at, b"", selections, _ROWS_PER_PAGE, patience
        )
        yield [
            (start, CellAddress(table_id, row_of(key), column_of(cell.column)))
            for key, cells in rows
            for cell in cells
            if (start := times.timestamp(cell.time)) in starts
            and column_of(cell.column) in wanted
            and _changes(cell.value)
        ]
        if not at:
            return


def _changes(lock: bytes) -> bool:
    *_, kind = LOCK_HEADER.unpack_from(lock)
    return bool(kind != KIND_LOCK_ONLY)
