"""All cells of all tables, wherever they are served: maps rows to tablets, and tablets to servers.

What a server did not execute is sent again, to the tablet's current server: after a split, rows of
one batch may go to different servers. What it may have executed is sent again only if it is a read.
A mutation fails with that error, because only the protocol knows what repeating it would mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotReady,
    PercolatorError,
    SchemaChanged,
    StoreUnusable,
    TabletMoved,
    Unavailable,
    UnknownServer,
    UsageError,
)
from percolator.limits import Limits
from percolator.routing.cells import (
    Answer,
    CellMutation,
    ChangesRequest,
    ChangesSeen,
    CommitAnswer,
    RangePage,
    RangeRequest,
    ReadSize,
    RollForward,
    RowRequest,
    RowResult,
    StoredChange,
    WholeCommit,
)
from percolator.routing.change_look import ChangeLook
from percolator.routing.change_scan import ChangeScan
from percolator.routing.dispatcher import RETRY_SECONDS_MIN, Dispatcher
from percolator.routing.joined_page import SentPage
from percolator.routing.lanes import Queued
from percolator.routing.pending_cell import CellAnswer, PendingCell
from percolator.routing.pending_commit import PendingCommit
from percolator.routing.pending_row import PendingRequest, PendingRow
from percolator.routing.placing import RETRY_SECONDS_MAX, Placing
from percolator.routing.range_scan import RangeScan
from percolator.routing.rolling_forward import RollForwardOrders
from percolator.routing.schema_versions import SchemaVersions
from percolator.routing.tablet_map import TabletMap
from percolator.routing.together import MutationGroups
from percolator.tasks import Tasks
from percolator.v1.tabletserver_pb2 import Mutation
from percolator.wire.backoff import pause_seconds
from percolator.wire.by_address import ByAddress
from percolator.world import World

_SWEEP_SECONDS = 0.05
"""How late a deadline may be noticed."""
_STILL_SILENT_SECONDS = 0.5
"""The pause between two requests to a master about a server that has fallen silent."""


class Router:
    """`percolator.routing.cells.Cells` over a network. Belongs to one event loop."""

    def __init__(self, world: World, tablets: TabletMap, limits: Limits) -> None:
        self.tablets = tablets
        self.schema_versions = SchemaVersions()
        self._world = world
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._dispatchers = ByAddress(self._new_dispatcher, self._left)
        self._placing = Placing(world, tablets, self._dispatchers, self._start)
        self._calls_sent = self._rows_sent = 0
        """Through dispatchers that are no longer kept."""
        self._open: list[PendingRequest | PendingCell | PendingCommit] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._silent: set[str] = set()
        """Addresses of servers about which a master is being asked."""
        self._tasks = Tasks()
        self._closed = False

    # ------------------------------------------------------------------ requests

    def mutate(self, mutations: Sequence[CellMutation], deadline: float) -> Awaitable[list[Answer]]:
        pending = self._new_request(len(mutations), deadline, is_read=False)
        entries = pending.entries
        for table_id, mutation, schema_version in mutations:
            entries.append(PendingRow(pending, len(entries), table_id, schema_version, mutation))
        return self._place(pending)

    def mutate_together(
        self, table_id: int, mutations: Sequence[Mutation], deadline: float
    ) -> Awaitable[list[Answer]]:
        """Applies mutations of one row at one moment, or none of them."""
        groups = MutationGroups(self._world, self.tablets, self.schema_versions, self._limits)
        return groups.mutate(table_id, mutations, deadline)

    async def roll_forward(self, order: RollForward, deadline: float) -> None:
        """Has tablets roll the locks of committed transactions forward."""
        await RollForwardOrders(self._world, self.tablets, self._limits).give(order, deadline)

    def read(
        self, requests: Sequence[RowRequest], deadline: float, *, bytes_max: int = 0
    ) -> Awaitable[list[RowResult]]:
        pending = self._new_request(len(requests), deadline, is_read=True)
        pending.size = ReadSize(bytes_max) if bytes_max else None
        entries = pending.entries
        for table_id, read in requests:
            entries.append(PendingRow(pending, len(entries), table_id, 0, read))
        return self._place(pending)

    def read_cell(
        self, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> Awaitable[CellAnswer]:
        """Reads one cell at less cost than `read`: most reads need only one."""
        future: asyncio.Future[CellAnswer] = self._loop.create_future()
        self._place_one(PendingCell(future, table_id, row, column, timestamp, deadline))
        return future

    def commit(self, commit: WholeCommit, deadline: float) -> Awaitable[CommitAnswer]:
        """Commits a whole transaction with one message, if all its cells are in one tablet. Nothing
        is sent again, whatever the answer is."""
        future: asyncio.Future[CommitAnswer] = self._loop.create_future()
        self._place_one(PendingCommit(future, commit, deadline))
        return future

    def scan(
        self, request: RangeRequest, timeout_seconds: float
    ) -> AsyncGenerator[RangePage, None]:
        return self._range_scan(request, timeout_seconds).pages()

    def scan_cells(
        self, request: RangeRequest, timeout_seconds: float
    ) -> AsyncGenerator[SentPage, None]:
        """Like `scan`, at less cost: without an object for each cell."""
        return self._range_scan(request, timeout_seconds).sent_pages()

    async def look_for_changes(
        self, request: ChangesRequest, passing: Sequence[int], deadline: float
    ) -> ChangesSeen:
        look = ChangeLook(request, passing, self.tablets, self._world, self._limits)
        return await look.seen(deadline)

    def scan_changes(
        self,
        request: ChangesRequest,
        ranges: Sequence[tuple[bytes, bytes]],
        timeout_seconds: float,
    ) -> AsyncGenerator[list[StoredChange], None]:
        scan = ChangeScan(request, timeout_seconds, self.tablets, self._world, self._limits)
        return scan.pages(ranges)

    def _range_scan(self, request: RangeRequest, timeout_seconds: float) -> RangeScan:
        return RangeScan(
            request, timeout_seconds, self.tablets, self.schema_versions, self._world, self._limits
        )

    def _new_request(self, rows: int, deadline: float, *, is_read: bool) -> PendingRequest:
        pending = PendingRequest(self._loop.create_future(), rows, deadline, is_read=is_read)
        if not rows:
            pending.future.set_result(pending.answers)
        elif not self._closed:
            self._watch(pending)
        return pending

    def _watch(self, pending: PendingRequest | PendingCell | PendingCommit) -> None:
        self._open.append(pending)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Fails the requests whose deadline has passed. One timer serves all, because most never
        need one."""
        now = self._world.clock.monotonic_seconds()
        waiting = [pending for pending in self._open if not pending.future.done()]
        self._open = [pending for pending in waiting if pending.deadline > now]
        if len(self._open) < len(waiting):
            for pending in waiting:
                if pending.deadline <= now:
                    pending.expire()
        self._sweeper = None
        if self._open:
            self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
            self._look_for_silence()

    # ------------------------------------------------------------------ placing

    def _place(self, pending: PendingRequest) -> Awaitable[Any]:
        if self._closed:
            # Deadlines are no longer checked: a commit that retries, or cleans up after itself,
            # would wait forever.
            for entry in tuple(pending.entries):
                pending.fail(entry.index, _database_closed())
            return pending.future
        for index, entry in enumerate(pending.entries):
            if not self._submit(entry):
                self._start(self._placing.place(pending.entries[index:]))
                break
        return pending.future

    def _place_one(self, pending: PendingCell | PendingCommit) -> None:
        if self._closed:
            pending.fail(0, _database_closed())
            return
        if not self._submit(pending):
            self._start(self._placing.place((pending,)))
        if not pending.future.done():
            self._watch(pending)

    def _submit(self, entry: Queued) -> bool:
        """Hands the row to its server, if that is known and has room."""
        location = self.tablets.locate(entry.table_id, entry.row)
        if location is None:
            return False
        dispatcher = self._dispatchers.get(location.address)
        if not dispatcher.has_room(entry.size_bytes):
            return False
        entry.location = location
        dispatcher.submit(entry)
        return True

    def _new_dispatcher(self, address: str) -> Dispatcher:
        return Dispatcher(address, self._world, self._limits, self.schema_versions, self._problem)

    def _left(self, dispatcher: Dispatcher) -> None:
        self._calls_sent += dispatcher.calls_sent
        self._rows_sent += dispatcher.rows_sent

    # ------------------------------------------------------------------ problems

    def _problem(self, entries: list[Queued], error: PercolatorError) -> None:
        """Handles rows that a server did not answer."""
        if isinstance(error, SchemaChanged):
            self.schema_versions.refused(entries[0].location.tablet_id, error)
            for entry in [entry for entry in entries if entry.schema_version]:
                entry.pending.fail(entry.index, error)  # it was built for the other version
        elif isinstance(error, StoreUnusable):
            for entry in entries:
                entry.pending.fail(entry.index, error)  # waiting seconds does not help a full disk
        elif isinstance(error, TabletMoved) and error.locations:
            self.tablets.learn(error.locations)
        waiting = [entry for entry in entries if not entry.pending.is_answered(entry.index)]
        lost = isinstance(error, TabletMoved | UnknownServer | ExecutionUnknown)
        if waiting and isinstance(error, NotReady):
            lost = True  # it has been so for a while
        if waiting or lost:
            again = self._send_again(
                entries,
                waiting,
                look_up=lost,
                silent=isinstance(error, DeadlineExceeded),
                asked_seconds=error.retry_after_seconds,
            )
            self._start(again)

    async def _send_again(
        self,
        entries: list[Queued],
        waiting: list[Queued],
        *,
        look_up: bool,
        silent: bool,
        asked_seconds: float,
    ) -> None:
        if look_up:
            first = entries[0]
            if self.tablets.locate(first.table_id, first.row) is first.location:
                await self._look_up(first, silent=silent)
            attempts = max(entry.attempts for entry in entries)
            if attempts > 1:  # what we learned the first time did not help
                seconds = pause_seconds(
                    self._world.random,
                    RETRY_SECONDS_MIN,
                    RETRY_SECONDS_MAX,
                    doublings=attempts,
                    asked_seconds=asked_seconds,
                )
                await self._world.clock.sleep(seconds)
        by_request: dict[object, list[Queued]] = {}
        for entry in waiting:
            if not entry.pending.is_answered(entry.index) and not self._submit(entry):
                by_request.setdefault(entry.pending, []).append(entry)
        for rows in by_request.values():
            self._start(self._placing.place(rows))

    async def _look_up(self, entry: Queued, *, silent: bool) -> None:
        try:
            if silent:
                await self.tablets.refresh_server(entry.location.address)
            else:
                await self.tablets.refresh(entry.table_id, entry.row)
        except PercolatorError as error:
            # The old map is all we have. If it fails again, a master is asked again.
            entry.pending.last_problem = error

    # ------------------------------------------------------------------ silence

    def _look_for_silence(self) -> None:
        for dispatcher in self._dispatchers:
            if (
                dispatcher.silent_seconds() >= self._limits.silence_seconds
                and dispatcher.address not in self._silent
            ):
                self._silent.add(dispatcher.address)
                self._start(self._ask_about(dispatcher))

    async def _ask_about(self, dispatcher: Dispatcher) -> None:
        """A paused or disconnected server refuses nothing: only a master knows who took over."""
        try:
            # If no master answers either, the calls have their own deadlines.
            with suppress(PercolatorError):
                await self.tablets.refresh_server(dispatcher.address)
                dispatcher.leave(self._is_elsewhere)
            await self._world.clock.sleep(_STILL_SILENT_SECONDS)
        finally:
            self._silent.discard(dispatcher.address)

    def _is_elsewhere(self, row: Queued) -> bool:
        return self.tablets.locate(row.table_id, row.row) != row.location

    # ------------------------------------------------------------------ the end

    def _start(self, work: Coroutine[None, None, None]) -> None:
        if self._closed:
            work.close()
            return
        self._tasks.start(work)

    async def close(self) -> None:
        """Closes the router; callers that still wait get an error."""
        self._closed = True
        for dispatcher in self._dispatchers:
            await dispatcher.close()
        await self._tasks.cancel()
        for pending in self._open:
            pending.last_problem = Unavailable("the client was closed")
            pending.expire()
        if self._sweeper is not None:
            self._sweeper.cancel()

    @property
    def calls_sent(self) -> int:
        return self._calls_sent + sum(one.calls_sent for one in self._dispatchers)

    @property
    def rows_sent(self) -> int:
        return self._rows_sent + sum(one.rows_sent for one in self._dispatchers)


def _database_closed() -> UsageError:
    return UsageError("the database is closed")
