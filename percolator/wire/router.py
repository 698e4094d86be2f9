"""All cells of all tables, wherever they are served: rows go to tablets, tablets to servers.

What a server did not execute is sent again, to wherever the tablet is by then: rows of one batch
may go separate ways after a split. What it may have executed is sent again only if it is a read; a
mutation's sender is told, for only the protocol knows what repeating it would mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from typing import Any

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotExecuted,
    PercolatorError,
    SchemaChanged,
    StoreUnusable,
    TabletMoved,
    Unavailable,
    UnknownServer,
    UsageError,
)
from percolator.limits import Limits
from percolator.wire.asked import Asked, Entry
from percolator.wire.backoff import Backoff
from percolator.wire.cell_read import CellAnswer, CellRead
from percolator.wire.dispatcher import RETRY_SECONDS_MIN, Dispatcher
from percolator.wire.lanes import Row, SchemaVersions
from percolator.wire.questions import (
    Answer,
    CellPage,
    RangePage,
    RangeQuestion,
    RowAnswer,
    RowQuestion,
    Step,
)
from percolator.wire.range_scan import RangeScan
from percolator.wire.tablet_map import TabletMap
from percolator.world import World

_SWEEP_SECONDS = 0.05
"""How late a deadline may be noticed."""
_RETRY_SECONDS_MAX = 1.0
_STILL_SILENT_SECONDS = 0.5
"""Between two questions to a master about a server that has fallen silent."""


class Router:
    """`percolator.wire.questions.Cells` over a network. Belongs to one event loop."""

    def __init__(self, world: World, tablets: TabletMap, limits: Limits) -> None:
        self.tablets = tablets
        self.schema_versions = SchemaVersions()
        self._world = world
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._dispatchers: dict[str, Dispatcher] = {}
        self._open: list[Asked | CellRead] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._silent: set[str] = set()
        """Addresses of servers about which a master is being asked."""
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._closed = False

    # ------------------------------------------------------------------ questions

    def mutate(self, steps: Sequence[Step], deadline: float) -> Awaitable[list[Answer]]:
        asked = self._ask(len(steps), deadline, is_read=False)
        entries = asked.entries
        for table_id, mutation, schema_version in steps:
            entries.append(Entry(asked, len(entries), table_id, schema_version, mutation))
        return self._place(asked)

    def read(self, questions: Sequence[RowQuestion], deadline: float) -> Awaitable[list[RowAnswer]]:
        asked = self._ask(len(questions), deadline, is_read=True)
        entries = asked.entries
        for table_id, read in questions:
            entries.append(Entry(asked, len(entries), table_id, 0, read))
        return self._place(asked)

    def read_cell(
        self, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> Awaitable[CellAnswer]:
        """One cell, for less than `read` takes: most reads are of one cell."""
        future: asyncio.Future[CellAnswer] = self._loop.create_future()
        read = CellRead(future, table_id, row, column, timestamp, deadline)
        if self._closed:
            read.fail(0, _database_closed())
            return future
        self._watch(read)
        return future if self._submit(read) else self._place_cell_slowly(read)

    async def _place_cell_slowly(self, read: CellRead) -> CellAnswer:
        await self._find_a_place(read)
        return await read.future

    def scan(
        self, question: RangeQuestion, timeout_seconds: float
    ) -> AsyncGenerator[RangePage, None]:
        return self._range_scan(question, timeout_seconds).pages()

    def scan_cells(
        self, question: RangeQuestion, timeout_seconds: float
    ) -> AsyncGenerator[CellPage, None]:
        """As `scan`, for less: no object for each cell."""
        return self._range_scan(question, timeout_seconds).cell_pages()

    def _range_scan(self, question: RangeQuestion, timeout_seconds: float) -> RangeScan:
        return RangeScan(
            question, timeout_seconds, self.tablets, self.schema_versions, self._world, self._limits
        )

    def _ask(self, rows: int, deadline: float, *, is_read: bool) -> Asked:
        asked = Asked(self._loop.create_future(), rows, deadline, is_read=is_read)
        if not rows:
            asked.future.set_result(asked.answers)
        elif not self._closed:
            self._watch(asked)
        return asked

    def _watch(self, asked: Asked | CellRead) -> None:
        self._open.append(asked)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Answers those whose deadline has come. One timer for all: most never need one."""
        now = self._world.clock.monotonic_seconds()
        still_open = []
        for asked in self._open:
            if not asked.future.done():
                if asked.deadline <= now:
                    asked.expire()
                else:
                    still_open.append(asked)
        self._open = still_open
        self._sweeper = None
        if still_open:
            self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
            self._look_for_silence()

    # ------------------------------------------------------------------ placing

    def _place(self, asked: Asked) -> Awaitable[Any]:
        if self._closed:
            # Nobody looks at deadlines any more: a commit that asks again, or cleans up after
            # itself, would wait for ever.
            for entry in tuple(asked.entries):
                asked.fail(entry.index, _database_closed())
            return asked.future
        for index, entry in enumerate(asked.entries):
            if not self._submit(entry):
                return self._place_slowly(asked, asked.entries[index:])
        return asked.future

    def _submit(self, entry: Row) -> bool:
        """Hands the row to its server, if that is known and has room."""
        location = self.tablets.locate(entry.table_id, entry.row)
        if location is None:
            return False
        dispatcher = self._dispatcher(location.address)
        if not dispatcher.has_room(entry.size_bytes):
            return False
        entry.location = location
        dispatcher.submit(entry)
        return True

    async def _place_slowly(self, asked: Asked, entries: Sequence[Row]) -> list[Any]:
        """The caller itself waits for room, and so cannot ask for more meanwhile."""
        for entry in entries:
            await self._find_a_place(entry)
        answers: list[Any] = await asked.future
        return answers

    async def _find_a_place(self, entry: Row) -> None:
        backoff: Backoff | None = None
        asked = entry.asked
        while not asked.future.done():
            location = self.tablets.locate(entry.table_id, entry.row)
            if location is not None:
                dispatcher = self._dispatcher(location.address)
                if not (
                    dispatcher.has_room(entry.size_bytes) or await self._room(dispatcher, entry)
                ):
                    return
                entry.location = location
                dispatcher.submit(entry)
                return
            try:
                await self.tablets.refresh(entry.table_id, entry.row)
            except (NotExecuted, ExecutionUnknown) as error:
                asked.last_problem = error
            except PercolatorError as error:  # such as: there is no such table
                asked.fail(entry.index, error)
                return
            if self.tablets.locate(entry.table_id, entry.row) is None:
                if asked.last_problem is None:
                    asked.last_problem = Unavailable(
                        f"no tablet is known to hold row {entry.row!r} of table {entry.table_id}"
                    )
                backoff = backoff or self._backoff()
                if not await backoff.pause(asked.deadline):
                    asked.expire()

    async def _room(self, dispatcher: Dispatcher, entry: Row) -> bool:
        """Waits for room, or for the sweep that ends the question: then it is not to enter."""
        future = entry.asked.future
        turn = asyncio.ensure_future(dispatcher.room(entry.size_bytes))
        may_enter = False
        try:
            await asyncio.wait([turn, future], return_when=asyncio.FIRST_COMPLETED)
            may_enter = not future.done()
        finally:
            if not may_enter:
                turn.cancel()
                dispatcher.wake()
        return may_enter

    def _dispatcher(self, address: str) -> Dispatcher:
        dispatcher = self._dispatchers.get(address)
        if dispatcher is None:
            dispatcher = self._dispatchers[address] = Dispatcher(
                address,
                self._world.network,
                self._world.random,
                self._limits,
                self.schema_versions,
                self._problem,
            )
        return dispatcher

    # ------------------------------------------------------------------ problems

    def _problem(self, entries: list[Row], error: PercolatorError) -> None:
        """Takes back what a server did not answer."""
        if isinstance(error, SchemaChanged):
            self.schema_versions.of_tablet[entries[0].location.tablet_id] = error.schema_version
            for entry in [entry for entry in entries if entry.schema_version]:
                entry.asked.fail(entry.index, error)  # it was built for the other version
        elif isinstance(error, StoreUnusable):
            for entry in entries:
                entry.asked.fail(entry.index, error)  # a full disk is not a matter of seconds
        elif isinstance(error, TabletMoved) and error.locations:
            self.tablets.learn(error.locations)
        waiting = [entry for entry in entries if not entry.asked.is_answered(entry.index)]
        lost = isinstance(error, TabletMoved | UnknownServer | ExecutionUnknown)
        if waiting or lost:
            silent = isinstance(error, DeadlineExceeded)
            self._start(self._send_again(entries, waiting, look_up=lost, silent=silent))

    async def _send_again(
        self, entries: list[Row], waiting: list[Row], *, look_up: bool, silent: bool
    ) -> None:
        if look_up:
            first = entries[0]
            if self.tablets.locate(first.table_id, first.row) is first.location:
                await self._look_up(first, silent=silent)
            attempts = max(entry.attempts for entry in entries)
            if attempts > 1:  # what we learned the first time did not help
                seconds = min(RETRY_SECONDS_MIN * 2 ** min(attempts, 16), _RETRY_SECONDS_MAX)
                await self._world.clock.sleep(seconds * (0.5 + 0.5 * self._world.random.random()))
        for entry in waiting:
            await self._find_a_place(entry)

    async def _look_up(self, entry: Row, *, silent: bool) -> None:
        try:
            if silent:
                await self.tablets.refresh_server(entry.location.address)
            else:
                await self.tablets.refresh(entry.table_id, entry.row)
        except PercolatorError as error:
            # The old map is all there is. It is asked again when that fails again.
            entry.asked.last_problem = error

    # ------------------------------------------------------------------ silence

    def _look_for_silence(self) -> None:
        for dispatcher in self._dispatchers.values():
            if (
                dispatcher.silent_seconds() >= self._limits.silence_seconds
                and dispatcher.address not in self._silent
            ):
                self._silent.add(dispatcher.address)
                self._start(self._ask_about(dispatcher))

    async def _ask_about(self, dispatcher: Dispatcher) -> None:
        """Paused and cut off servers refuse nothing: only a master knows who took over."""
        try:
            await self.tablets.refresh_server(dispatcher.address)
            dispatcher.leave(self._is_elsewhere)
        except PercolatorError:
            # No master answers either. The calls have deadlines of their own.
            pass
        finally:
            await self._world.clock.sleep(_STILL_SILENT_SECONDS)
            self._silent.discard(dispatcher.address)

    def _is_elsewhere(self, row: Row) -> bool:
        return self.tablets.locate(row.table_id, row.row) != row.location

    def _backoff(self) -> Backoff:
        return Backoff(self._world.clock, self._world.random, RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)

    # ------------------------------------------------------------------ the end

    def _start(self, work: Coroutine[None, None, None]) -> None:
        if self._closed:
            work.close()
            return
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def close(self) -> None:
        """Whoever still waits is told that nothing will come."""
        self._closed = True
        for dispatcher in self._dispatchers.values():
            await dispatcher.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for asked in self._open:
            asked.last_problem = Unavailable("the client was closed")
            asked.expire()
        if self._sweeper is not None:
            self._sweeper.cancel()

    @property
    def calls_sent(self) -> int:
        return sum(dispatcher.calls_sent for dispatcher in self._dispatchers.values())

    @property
    def rows_sent(self) -> int:
        return sum(dispatcher.rows_sent for dispatcher in self._dispatchers.values())


def _database_closed() -> UsageError:
    return UsageError("the database is closed")
