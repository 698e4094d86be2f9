"""Everything that this process sends to one tablet server.

The rows of all concurrent transactions share its calls: one call costs as much as thirty rows, so
one row per call would limit a machine to a tenth of its capacity. There is no timer: rows submitted
in one turn of the event loop are sent together. While calls are in flight, rows wait until a call
returns, until they are as many as the rows in flight, or until they fill a call. So a lone caller
waits for one round trip, a few callers do not wait for each other, and many callers fill the
batches.

Bounds: `server_calls_max` calls, of at most `batch_rows_max` rows or `batch_bytes_max` each;
`server_rows_max` rows or `server_bytes_max` queued and in flight together. Above that, callers
wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    InvariantViolation,
    NotExecuted,
    NotReady,
    Overloaded,
    PercolatorError,
    TabletMoved,
    Unavailable,
    UnknownServer,
)
from percolator.limits import Limits
from percolator.routing.cells import NotInOneRound
from percolator.routing.commit_lane import CommitLane
from percolator.routing.lanes import Lane, Problem, Queued
from percolator.routing.mutation_lane import MutationLane
from percolator.routing.pending_commit import PendingCommit
from percolator.routing.read_lane import ReadLane
from percolator.routing.schema_versions import SchemaVersions
from percolator.wire.backoff import asked_pause_seconds
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
        """Whether the task has begun to run: cancelled before that, it never does."""
        self.given_up: PercolatorError | None = None
        """Why it was given up; None while it is still awaited."""


class Dispatcher:
    """The queue in front of one server."""

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
        self._turns: deque[asyncio.Future[None]] = deque()
        self._last_answer = self._loop.time()
        self._cut_off_because = "the task of the call was cancelled"
        self.calls_sent = 0
        self.rows_sent = 0

    # ------------------------------------------------------------------ admission

    def has_room(self, size_bytes: int) -> bool:
        """Whether a row may enter now. Callers that already wait come first."""
        return not self._turns and self._fits(size_bytes)

    async def room(self, size_bytes: int) -> None:
        """Waits until a row may enter. The caller must submit it at once, without awaiting."""
        if self.has_room(size_bytes):
            return
        while True:
            turn = self._loop.create_future()
            self._turns.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self.wake()  # it leaves without using its turn
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
        """Takes a row whose location is set. A whole transaction is answered at once if it cannot
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
        return None if self._rows or self._turns else self._last_answer

    def _release(self, rows: int, size_bytes: int) -> None:
        """Frees the space of rows that have left, whatever their result."""
        self._rows -= rows
        self._bytes -= size_bytes
        if self._turns:
            self.wake()

    def wake(self) -> None:
        """Gives the next callers their turns. A caller that had a turn and did not use it calls
        this too, or the space that it left would go unnoticed."""
        free = self._limits.server_rows_max - self._rows
        while self._turns and free > 0:
            turn = self._turns.popleft()
            if not turn.done():  # done if its caller was cancelled
                turn.set_result(None)
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
        """Handles whole transactions. All but blameless neighbours are for the protocol to judge:
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
    """Whether the same server will probably serve the same tablet in a moment."""
    if isinstance(error, UnknownServer):
        return False
    return isinstance(error, Overloaded) or (
        isinstance(error, NotReady) and attempts <= HELD_ATTEMPTS_MAX
    )
