"""All cells of all tables, wherever they are served: maps rows to tablets, and tablets to servers.

Dispatcher  the queue of one tablet server: batches rows into calls, and bounds what is in flight
Router      finds the tablet and the server of each row, and repeats what was not executed

What a server did not execute is sent again, to the tablet's current server: after a split, rows of
one batch may go to different servers. What it may have executed is sent again only if it is a read.
A mutation fails with that error, because only the protocol knows what repeating it would mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from percolator.codecs.readable import quoted
from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    InvariantViolation,
    NotExecuted,
    NotReady,
    Overloaded,
    PercolatorError,
    SchemaChanged,
    StoreUnusable,
    TabletMoved,
    Unavailable,
    UnknownServer,
    UsageError,
)
from percolator.limits import Limits
from percolator.routing.catalog import EVERYTHING, Searched, TabletMap
from percolator.routing.cells import (
    Answer,
    CellMutation,
    ChangesRequest,
    ChangesSeen,
    CommitAnswer,
    NotInOneRound,
    OneRoundCommit,
    RangePage,
    RangeRequest,
    ReadSize,
    RollForward,
    RowRequest,
    RowResult,
    StoredChange,
    Turn,
)
from percolator.routing.change_scan import ChangeLook, ChangeScan
from percolator.routing.lanes import (
    CellAnswer,
    CommitLane,
    Lane,
    MutationLane,
    PendingCell,
    PendingCommit,
    PendingRequest,
    PendingRow,
    Problem,
    Queued,
    ReadLane,
    SchemaVersions,
)
from percolator.routing.mutation_groups import MutationGroups
from percolator.routing.range_scan import RangeScan, SentPage
from percolator.routing.rolling_forward import RollForwardOrders
from percolator.routing.turns import TurnCalls
from percolator.tasks import Tasks
from percolator.v1.tabletserver_pb2 import Mutation
from percolator.wire.backoff import Backoff, asked_pause_seconds, pause_seconds
from percolator.wire.frames import ByAddress
from percolator.world import World

RETRY_SECONDS_MIN = 0.02
"""A tablet that could not serve is left alone at least this long, whatever it asks for."""
HELD_ATTEMPTS_MAX = 3
"""After so many refusals in a row, the tablet may be elsewhere: a server that is about to end
refuses everything until its last call has ended."""


class _Call:
    """A call in flight."""

    __slots__ = ("begun", "entries", "given_up", "size_bytes", "started", "task")

    def __init__(self, entries: list[Queued], size_bytes: int, started: float) -> None:
        self.entries = entries
        self.size_bytes = size_bytes
        self.started = started
        self.task: asyncio.Task[None] | None = None
        self.begun = False
        """True once the task has begun to run: cancelled before that, it never does."""
        self.given_up: PercolatorError | None = None
        """Why it was given up; None while it is still awaited."""


class Dispatcher:
    """The queue in front of one server: everything that this process sends to it.

    The rows of all concurrent transactions share its calls: one call costs as much as thirty rows,
    so one row per call would limit a machine to a tenth of its capacity. There is no timer: rows
    submitted in one turn of the event loop are sent together. While calls are in flight, rows wait
    until a call returns, until they are as many as the rows in flight, or until they fill a call.
    So a lone caller waits for one round trip, a few callers do not wait for each other, and many
    callers fill the batches.

    Bounds: `server_calls_max` calls, of at most `batch_rows_max` rows or `batch_bytes_max` each;
    `server_rows_max` rows or `server_bytes_max` queued and in flight together. Above that, callers
    wait.
    """

    def __init__(
        self,
        address: str,
        world: World,
        limits: Limits,
        versions: SchemaVersions,
        on_problem: Callable[[list[Queued], PercolatorError], None],
    ) -> None:
        """`on_problem` receives the rows that this server did not answer. Those whose caller still
        waits are its responsibility: they may be sent again, here or elsewhere."""
        self.address = address
        self._random = world.random
        self._limits = limits
        self._on_problem = on_problem
        self._loop = asyncio.get_running_loop()
        self._mutations = MutationLane(address, world.network, versions)
        self._reads = ReadLane(address, world.network, versions)
        self._commits = CommitLane(address, world.network, versions, world.clock)
        self._lanes: tuple[Lane, ...] = (self._mutations, self._commits, self._reads)
        self._calls = 0
        self._in_flight: dict[_Call, None] = {}
        """The calls in flight, oldest first; they are given up in that order."""
        self._scheduled = False
        self._held: dict[int, list[Queued]] = {}
        self._rows = 0
        self._bytes = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        """Callers that wait until their row fits, first come, first served."""
        self._last_answer = self._loop.time()
        self._cut_off_because = "the task of the call was cancelled"
        self.calls_sent = 0
        self.rows_sent = 0

    # ------------------------------------------------------------------ admission

    def has_capacity(self, size_bytes: int) -> bool:
        """True if a row may enter now. Callers that already wait come first."""
        return not self._waiters and self._fits(size_bytes)

    async def capacity(self, size_bytes: int) -> None:
        """Waits until a row may enter. The caller must submit it at once, without awaiting."""
        if self.has_capacity(size_bytes):
            return
        while True:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    self.wake()  # it leaves capacity that another can use
                raise
            if self._fits(size_bytes):
                return

    def _fits(self, size_bytes: int) -> bool:
        limits = self._limits
        return not self._rows or (
            self._rows < limits.server_rows_max
            and self._bytes + size_bytes <= limits.server_bytes_max
        )

    def submit(self, entry: Queued) -> None:
        """Takes a row whose location is set. A one-round commit is answered at once if it cannot
        be one message to this server."""
        # The location is that of the first row.
        if (
            isinstance(entry, PendingCommit)
            and entry.rows > 1
            and not entry.commit.lies_in(entry.location)
        ):
            entry.fail(0, NotInOneRound("the cells are not in one tablet"))
            return
        self._rows += 1
        self._bytes += entry.size_bytes
        if self._held and entry.location.tablet_id in self._held:
            self._held[entry.location.tablet_id].append(entry)
            return
        self._lane_of(entry).queue.append(entry)
        self._send_soon()

    def _lane_of(self, entry: Queued) -> Lane:
        if entry.pending.is_read:
            return self._reads
        return self._commits if isinstance(entry, PendingCommit) else self._mutations

    def unused_since(self) -> float | None:
        """Since when there is nothing here; None while rows are queued or in flight, or wait."""
        return None if self._rows or self._waiters else self._last_answer

    def _release(self, rows: int, size_bytes: int) -> None:
        """Frees the space of rows that have left, whatever their result."""
        self._rows -= rows
        self._bytes -= size_bytes
        if self._waiters:
            self.wake()

    def wake(self) -> None:
        """Wakes as many waiting callers as have rows that fit. A caller that was woken and does not
        submit its row calls this too, or the capacity that it leaves would go unnoticed."""
        free = self._limits.server_rows_max - self._rows
        while self._waiters and free > 0:
            waiter = self._waiters.popleft()
            if not waiter.done():  # done if its caller was cancelled
                waiter.set_result(None)
                free -= 1

    # ------------------------------------------------------------------ calls

    def _send_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            # In the next turn of the loop, so that all rows that are ready now are included.
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        """Sends calls as long as there are enough rows, and calls to spare."""
        self._scheduled = False
        calls_max, batch_rows_max = self._limits.server_calls_max, self._limits.batch_rows_max
        for lane in self._lanes:
            while (
                self._calls < calls_max
                and self._calls_like(lane) < calls_max - 1
                and len(lane.queue) >= min(max(lane.rows_in_flight, 1), batch_rows_max)
            ):
                entries, size_bytes = self._take(lane)
                if entries:
                    lane.calls += 1
                    lane.rows_in_flight += len(entries)
                    self._calls += 1
                    call = _Call(entries, size_bytes, self._loop.time())
                    self._in_flight[call] = None
                    call.task = self._loop.create_task(self._call(lane, call))
                    call.task.add_done_callback(partial(self._cut_off, lane, call))

    def _calls_like(self, lane: Lane) -> int:
        """How many calls in flight read, or write, as those of this lane do. Neither kind may take
        all: what writes waits for a disk, and reads should not have to wait for it."""
        reading = self._reads.calls
        return reading if lane is self._reads else self._calls - reading

    def _take(self, lane: Lane) -> tuple[list[Queued], int]:
        """Takes the rows of the next call; returns them and their bytes. Drops rows whose caller no
        longer waits."""
        queue, limits = lane.queue, self._limits
        entries: list[Queued] = []
        rows = size_bytes = gone = gone_bytes = 0
        while queue and rows < limits.batch_rows_max:
            entry = queue[0]
            if entry.pending.future.done():
                gone += 1
                gone_bytes += queue.popleft().size_bytes
                continue
            if entries and (entry.alone or size_bytes + entry.size_bytes > limits.batch_bytes_max):
                break
            entries.append(queue.popleft())
            entry.sent = True
            rows += entry.rows
            size_bytes += entry.size_bytes
            if entry.alone:
                break
        if gone:
            self._release(gone, gone_bytes)
        return entries, size_bytes

    async def _call(self, lane: Lane, call: _Call) -> None:
        entries = call.entries
        self.calls_sent += 1
        self.rows_sent += len(entries)
        call.begun = True
        problems: Sequence[Problem]
        try:
            if call.given_up is None:
                problems = await lane.call(entries, self._limits.attempt_seconds_max)
            else:
                problems = [(entries, call.given_up)]
        except PercolatorError as error:
            problems = [(entries, error)]
        except asyncio.CancelledError:
            if call.given_up is None:
                raise
            problems = [(entries, call.given_up)]
        except Exception as error:  # noqa: BLE001 - or its rows would count as in flight forever
            problems = [(entries, self._bug(lane, error))]
        self._ended(lane, call)
        for failed, problem in problems:
            self._failed(failed, problem)
        if any(lane.queue for lane in self._lanes):
            self._send_soon()

    def _ended(self, lane: Lane, call: _Call) -> None:
        """Notes that a call is no longer in flight."""
        del self._in_flight[call]
        lane.calls -= 1
        lane.rows_in_flight -= len(call.entries)
        self._calls -= 1
        self._last_answer = self._loop.time()
        self._release(len(call.entries), call.size_bytes)

    def _cut_off(self, lane: Lane, call: _Call, _: asyncio.Task[None]) -> None:
        """Answers a call whose task was cancelled, by `close` or by other code: its callers would
        wait, and it would count as in flight, forever. What is queued leaves with the next row, or
        ends at its deadline: the loop may be about to end."""
        if call in self._in_flight:
            self._ended(lane, call)
            for entry in call.entries:
                entry.pending.fail(entry.index, Unavailable(self._cut_off_because))

    # ------------------------------------------------------------------ problems

    def _bug(self, lane: Lane, error: Exception) -> PercolatorError:
        """Reports what no server and no network can have caused. Returns the error of its rows.

        Its text alone would look like trouble of the cluster, and a read would be repeated until
        its deadline.
        """
        message = f"a bug in the client: a call to the tablet server at {self.address} raised"
        self._loop.call_exception_handler({"message": message, "exception": error})
        if lane is self._reads:
            return InvariantViolation(f"{message} {error!r}", where=self.address)
        # It may have been sent before that.
        return ExecutionUnknown(f"{message} {error!r}", where=self.address)

    def _failed(self, entries: list[Queued], error: PercolatorError) -> None:
        """Handles rows of one tablet, or of one call, that share an error."""
        if isinstance(entries[0], PendingCommit):
            self._not_committed(entries, error)
        elif isinstance(error, NotExecuted):
            self._not_executed(entries, error)
        elif isinstance(error, ExecutionUnknown):
            # A read may be repeated in any case; for a mutation, only its sender can tell.
            if entries[0].pending.is_read:
                for entry in entries:
                    entry.attempts += 1
                    entry.pending.last_problem = error
            else:
                for entry in entries:
                    entry.pending.fail(entry.index, error)
            self._on_problem(entries, error)
        elif len(entries) == 1:
            entries[0].pending.fail(entries[0].index, error)
        else:
            self._send_each_alone(entries, error)

    def _not_committed(self, entries: list[Queued], error: PercolatorError) -> None:
        """Handles one-round commits. All but blameless neighbours are for the protocol to judge:
        only it knows whether a copy of the message may still arrive."""
        if isinstance(error, InvalidArgument) and len(entries) > 1:
            self._send_each_alone(entries, error)  # each copy of the message is refused as a whole
            return
        for entry in entries:
            entry.pending.fail(entry.index, error)
        if isinstance(error, NotExecuted | ExecutionUnknown):
            self._on_problem(entries, error)  # the caller knows, and the map may be outdated

    def _send_each_alone(self, entries: list[Queued], error: PercolatorError) -> None:
        """One invalid row, or transaction, fails its whole batch. The others are sent again."""
        for entry in entries:
            entry.alone = True
        self._on_problem(entries, error)

    def _not_executed(self, entries: list[Queued], error: NotExecuted) -> None:
        for entry in entries:
            entry.sent = False
            entry.attempts += 1
            entry.pending.last_problem = error
        attempts = max(entry.attempts for entry in entries)
        if _passes_by_itself(error, attempts):
            self._hold(entries, error.retry_after_seconds)
        else:
            self._on_problem(entries, error)

    def _hold(self, entries: Sequence[Queued], seconds: float) -> None:
        """Leaves the tablets of these rows alone for a while, and no others."""
        seconds = asked_pause_seconds(self._random, max(seconds, RETRY_SECONDS_MIN))
        for entry in entries:
            tablet_id = entry.location.tablet_id
            held = self._held.get(tablet_id)
            if held is None:
                held = self._held[tablet_id] = []
                self._loop.call_later(seconds, self._let_go, tablet_id)
            held.append(entry)
            self._rows += 1
            self._bytes += entry.size_bytes

    def _let_go(self, tablet_id: int) -> None:
        for entry in self._held.pop(tablet_id, ()):
            self._lane_of(entry).queue.append(entry)
        self._send_soon()

    # ------------------------------------------------------------------ silence

    def silent_seconds(self) -> float:
        """How long the oldest call has been waiting for its answer."""
        if not self._in_flight:
            return 0.0
        return self._loop.time() - min(call.started for call in self._in_flight)

    def leave(self, is_elsewhere: Callable[[Queued], bool]) -> None:
        """Gives up on this server, which has fallen silent, for tablets that others now serve.

        Calls in flight to such a tablet end with an unknown outcome: they may have been executed.
        Rows that still wait for such a tablet were not sent, and can be sent elsewhere.
        """
        for call in self._in_flight:
            if call.task is not None and any(map(is_elsewhere, call.entries)):
                call.given_up = DeadlineExceeded(
                    "no answer, and its tablets are now served elsewhere", where=self.address
                )
                if call.begun:
                    call.task.cancel()
        queues = [*(lane.queue for lane in self._lanes), *self._held.values()]
        for queue in queues:
            leaving = [row for row in queue if is_elsewhere(row)]
            if not leaving:
                continue
            staying = [row for row in queue if not is_elsewhere(row)]
            queue.clear()
            queue.extend(staying)
            self._release(len(leaving), sum(row.size_bytes for row in leaving))
            tablet = leaving[0].location
            error = TabletMoved(
                "the tablet is now served elsewhere", tablet_id=tablet.tablet_id, epoch=tablet.epoch
            )
            self._on_problem(leaving, error)

    async def close(self) -> None:
        """Gives up all calls in flight."""
        self._cut_off_because = "the client was closed"
        tasks = [call.task for call in self._in_flight if call.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _passes_by_itself(error: NotExecuted, attempts: int) -> bool:
    """True if the same server will probably serve the same tablet soon."""
    if isinstance(error, UnknownServer):
        return False
    return isinstance(error, Overloaded) or (
        isinstance(error, NotReady) and attempts <= HELD_ATTEMPTS_MAX
    )


RETRY_SECONDS_MAX = 1.0


class Placing:
    """Places the rows of one router that no server can take at once: their tablets are not known,
    or it is full.

    Each request is placed by itself, and what it waits for holds up none of its other rows. The
    heartbeats of all transactions of a client are one request, for example.
    """

    def __init__(
        self,
        world: World,
        tablets: TabletMap,
        dispatchers: ByAddress[Dispatcher],
        start: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        """`start` starts a task."""
        self._world = world
        self._tablets = tablets
        self._dispatchers = dispatchers
        self._start = start

    async def place(self, entries: Sequence[Queued]) -> None:
        """Waits for tablets to be known and their servers to have capacity, until the request ends.

        Not in the caller's task: cancelled before its first step, that would leave the future open,
        and the deadline would set an exception that nothing retrieves.
        """
        await self._guarded(entries[0], self._find_places(entries))

    @staticmethod
    async def _guarded(entry: Queued, work: Coroutine[None, None, None]) -> None:
        future = entry.pending.future
        try:
            await work
        except Exception as error:  # noqa: BLE001  # a bug: the caller is waiting for the future
            if not future.done():
                future.set_exception(error)

    async def _find_places(self, entries: Sequence[Queued]) -> None:
        """Hands rows of one request to their servers. A tablet that no server has at the moment,
        a server without capacity, or a search that no master answers, holds up none but its own
        rows."""
        pending, world = entries[0].pending, self._world
        backoff = Backoff(world.clock, world.random, RETRY_SECONDS_MIN, RETRY_SECONDS_MAX)
        left = self._hand_over(entries)
        while left:
            searched: list[tuple[int, Searched]] = []
            for entry in left:
                if await self._search(entry, searched):
                    left = self._hand_over(left)  # now: the next search may take seconds
            if left and pending.last_problem is None:
                pending.last_problem = Unavailable(
                    f"no tablet is known to hold row {quoted(left[0].row)} "
                    f"of table {left[0].table_id}"
                )
            if left and not await backoff.pause(pending.deadline):
                pending.expire()
            left = self._hand_over(left)

    def _hand_over(self, entries: Sequence[Queued]) -> list[Queued]:
        """Hands over the rows whose tablets are known, once their servers have capacity. Returns
        the others, which have to be looked for."""
        left: list[Queued] = []
        full: dict[Dispatcher, list[Queued]] = {}
        for entry in entries:
            if entry.pending.is_answered(entry.index):
                continue
            location = self._tablets.locate(entry.table_id, entry.row)
            if location is None:
                left.append(entry)
                continue
            dispatcher = self._dispatchers.get(location.address)
            if dispatcher in full or not dispatcher.has_capacity(entry.size_bytes):
                full.setdefault(dispatcher, []).append(entry)
            else:
                entry.location = location
                dispatcher.submit(entry)
        for dispatcher, rows in full.items():
            self._start(self._enter(dispatcher, rows))
        return left

    async def _enter(self, dispatcher: Dispatcher, entries: Sequence[Queued]) -> None:
        await self._guarded(entries[0], self._wait_for_capacity(dispatcher, entries))

    async def _wait_for_capacity(self, dispatcher: Dispatcher, entries: Sequence[Queued]) -> None:
        """Hands rows of one request to a server as soon as it has capacity, or to whichever has
        them by then."""
        for entry in entries:
            if not (
                dispatcher.has_capacity(entry.size_bytes) or await self._capacity(dispatcher, entry)
            ):
                return
            location = self._tablets.locate(entry.table_id, entry.row)
            if location is not None and location.address == dispatcher.address:
                entry.location = location
                dispatcher.submit(entry)
            else:
                dispatcher.wake()
                self._start(self.place([entry]))

    async def _search(self, entry: Queued, searched: list[tuple[int, Searched]]) -> bool:
        """Asks a master where the row is, unless that is known by now, or what this round has
        `searched` was about it. Returns whether a master has told where rows are."""
        table_id, row, pending = entry.table_id, entry.row, entry.pending
        if pending.is_answered(entry.index) or self._tablets.locate(table_id, row) is not None:
            return False
        if any(table_id == table and rows.has(row) for table, rows in searched):
            return False
        try:
            searched.append((table_id, await self._tablets.refresh(table_id, row)))
        except (NotExecuted, ExecutionUnknown) as error:
            pending.last_problem = error
            searched.append((table_id, EVERYTHING))
            return False
        except PercolatorError as error:  # such as: there is no such table
            pending.fail(entry.index, error)
            return False
        return True

    async def _capacity(self, dispatcher: Dispatcher, entry: Queued) -> bool:
        """Waits for capacity, or until the sweep ends the request; returns whether it may enter."""
        future = entry.pending.future
        capacity = asyncio.ensure_future(dispatcher.capacity(entry.size_bytes))
        may_enter = False
        try:
            await asyncio.wait([capacity, future], return_when=asyncio.FIRST_COMPLETED)
            may_enter = not future.done()
        finally:
            if not may_enter:
                capacity.cancel()
                dispatcher.wake()
        return may_enter


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
        self._dispatchers = ByAddress(
            lambda address: Dispatcher(address, world, limits, self.schema_versions, self._problem),
            self._left,
        )
        self._placing = Placing(world, tablets, self._dispatchers, self._start)
        self._turns = TurnCalls(world, tablets, self.schema_versions, limits)
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
        """Asks tablets to roll the locks of committed transactions forward."""
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

    def commit(self, commit: OneRoundCommit, deadline: float) -> Awaitable[CommitAnswer]:
        """Commits a transaction with one message, if all its cells are in one tablet. Nothing
        is sent again, whatever the answer is."""
        future: asyncio.Future[CommitAnswer] = self._loop.create_future()
        self._place_one(PendingCommit(future, commit, deadline))
        return future

    def scan(
        self, request: RangeRequest, timeout_seconds: float
    ) -> AsyncGenerator[RangePage, None]:
        return self._range_scan(request, timeout_seconds).pages()

    async def boundaries(self, table_id: int, start: bytes, end: bytes) -> list[bytes]:
        if self.tablets.locate(table_id, start) is None:
            await self.tablets.try_refresh(table_id, start)
        rows = [tablet.start for tablet in self.tablets.tablets(table_id)]
        return [row for row in rows if start < row and (not end or row < end)]

    def scan_cells(
        self, request: RangeRequest, timeout_seconds: float
    ) -> AsyncGenerator[SentPage, None]:
        """Like `scan`, at less cost: without an object for each cell."""
        return self._range_scan(request, timeout_seconds).sent_pages()

    async def await_turn(
        self, cell: CellAddress, place: int, start: int, wait_seconds: float, hold_seconds: float
    ) -> Turn:
        return await self._turns.await_turn(cell, place, start, wait_seconds, hold_seconds)

    def end_turn(self, cell: CellAddress, place: int) -> None:
        self._turns.end_turn(cell, place)

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
        """Hands the row to its server, if that is known and has capacity."""
        location = self.tablets.locate(entry.table_id, entry.row)
        if location is None:
            return False
        dispatcher = self._dispatchers.get(location.address)
        if not dispatcher.has_capacity(entry.size_bytes):
            return False
        entry.location = location
        dispatcher.submit(entry)
        return True

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
                dispatcher.leave(
                    lambda row: self.tablets.locate(row.table_id, row.row) != row.location
                )
            await self._world.clock.sleep(_STILL_SILENT_SECONDS)
        finally:
            self._silent.discard(dispatcher.address)

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
        await self._turns.close()
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
