"""Everything that this process sends to one tablet server.

The rows of all concurrent transactions share its calls: one call costs as much as thirty rows, so
one row per call would cap a machine at a tenth of what it can do. There is no timer: what is asked
in one turn of the event loop leaves together. A further call beside others has to carry as many
rows as they do, or all that a call may; what is fewer waits for one of them. So a lone caller waits
for one round trip, few callers do not wait for each other, and a crowd fills the batches.

Bounds: `server_calls_max` calls, of at most `batch_rows_max` rows or `batch_bytes_max` each;
`server_rows_max` rows or `server_bytes_max` queued and in flight together: above, callers wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotExecuted,
    NotReady,
    Overloaded,
    PercolatorError,
    TabletMoved,
    Unavailable,
)
from percolator.limits import Limits
from percolator.wire.lanes import Lane, MutationLane, Problem, ReadLane, Row, SchemaVersions
from percolator.world import Network, Random

RETRY_SECONDS_MIN = 0.02
"""At least so long is a tablet left alone that could not serve, whatever it says itself."""


class _Call:
    """One in flight."""

    __slots__ = ("begun", "given_up", "rows", "size_bytes", "started", "task")

    def __init__(self, rows: list[Row], size_bytes: int, started: float) -> None:
        self.rows = rows
        self.size_bytes = size_bytes
        self.started = started
        self.task: asyncio.Task[None] | None = None
        self.begun = False
        """A task that is cancelled before would end without having let go of anything."""
        self.given_up: PercolatorError | None = None


class Dispatcher:
    """The queue in front of one server."""

    def __init__(
        self,
        address: str,
        network: Network,
        random: Random,
        limits: Limits,
        versions: SchemaVersions,
        on_problem: Callable[[list[Row], PercolatorError], None],
    ) -> None:
        """`on_problem` is told what this server did not answer, and takes back those rows whose
        caller still waits: they may be sent again, here or elsewhere."""
        self.address = address
        self._random = random
        self._limits = limits
        self._on_problem = on_problem
        self._loop = asyncio.get_running_loop()
        self._mutations = MutationLane(address, network, versions)
        self._reads = ReadLane(address, network, versions)
        self._calls = 0
        self._in_flight: dict[_Call, None] = {}
        """In the order in which they were sent, which is the one in which they are given up."""
        self._scheduled = False
        self._held: dict[int, list[Row]] = {}
        self._rows = 0
        self._bytes = 0
        self._turns: deque[asyncio.Future[None]] = deque()
        self.calls_sent = 0
        self.rows_sent = 0

    # ------------------------------------------------------------------ the way in

    def has_room(self, size_bytes: int) -> bool:
        """Whether a row may enter now. Those who wait already come first."""
        return not self._turns and self._fits(size_bytes)

    async def room(self, size_bytes: int) -> None:
        """Waits for its turn to enter; the caller enters at once, without waiting again."""
        if self.has_room(size_bytes):
            return
        while True:
            turn = self._loop.create_future()
            self._turns.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self.wake()  # it goes without having entered
                raise
            if self._fits(size_bytes):
                return

    def _fits(self, size_bytes: int) -> bool:
        limits = self._limits
        return not self._rows or (
            self._rows < limits.server_rows_max
            and self._bytes + size_bytes <= limits.server_bytes_max
        )

    def submit(self, entry: Row) -> None:
        """Takes a row whose location is set."""
        self._rows += 1
        self._bytes += entry.size_bytes
        if self._held and entry.location.tablet_id in self._held:
            self._held[entry.location.tablet_id].append(entry)
            return
        lane = self._reads if entry.asked.is_read else self._mutations
        lane.queue.append(entry)
        self._send_soon()

    def _release(self, rows: int, size_bytes: int) -> None:
        """They have left, whatever has become of them."""
        self._rows -= rows
        self._bytes -= size_bytes
        if self._turns:
            self.wake()

    def wake(self) -> None:
        """Whoever had a turn and did not take it calls this: else nobody knows of that room."""
        free = self._limits.server_rows_max - self._rows
        while self._turns and free > 0:
            turn = self._turns.popleft()
            if not turn.done():  # or its caller has gone
                turn.set_result(None)
                free -= 1

    # ------------------------------------------------------------------ calls

    def _send_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            # In the next turn of the loop: everybody who is ready now comes along.
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        """Fills calls as long as there are rows and calls to spare."""
        self._scheduled = False
        calls_max, batch_rows_max = self._limits.server_calls_max, self._limits.batch_rows_max
        for lane in (self._mutations, self._reads):
            # Neither kind may take all calls: mutations wait for a disk, which reads need not.
            while (
                self._calls < calls_max
                and lane.calls < calls_max - 1
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

    def _take(self, lane: Lane) -> tuple[list[Row], int]:
        """The rows of the next call, and their bytes. Drops those whose caller has gone."""
        queue, limits = lane.queue, self._limits
        entries: list[Row] = []
        size_bytes = gone = gone_bytes = 0
        while queue and len(entries) < limits.batch_rows_max:
            entry = queue[0]
            if entry.asked.future.done():
                gone += 1
                gone_bytes += queue.popleft().size_bytes
                continue
            if entries and (entry.alone or size_bytes + entry.size_bytes > limits.batch_bytes_max):
                break
            entries.append(queue.popleft())
            entry.sent = True
            size_bytes += entry.size_bytes
            if entry.alone:
                break
        if gone:
            self._release(gone, gone_bytes)
        return entries, size_bytes

    async def _call(self, lane: Lane, call: _Call) -> None:
        entries = call.rows
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
                _closed(entries)
                raise
            problems = [(entries, call.given_up)]
        except Exception as error:  # noqa: BLE001 - else its rows would hold their places for ever
            problems = [(entries, ExecutionUnknown(f"the call broke: {error!r}"))]
        self._in_flight.pop(call, None)
        lane.calls -= 1
        lane.rows_in_flight -= len(entries)
        self._calls -= 1
        self._release(len(entries), call.size_bytes)
        for failed, problem in problems:
            self._failed(failed, problem)
        if self._mutations.queue or self._reads.queue:
            self._send_soon()

    # ------------------------------------------------------------------ problems

    def _failed(self, entries: list[Row], error: PercolatorError) -> None:
        """Rows of one tablet, or of one call, that have no answer of their own."""
        if isinstance(error, NotExecuted):
            self._not_executed(entries, error)
        elif isinstance(error, ExecutionUnknown):
            # A read may be repeated whatever happened; of a mutation, only its sender knows.
            if entries[0].asked.is_read:
                for entry in entries:
                    entry.attempts += 1
                    entry.asked.last_problem = error
            else:
                for entry in entries:
                    entry.asked.fail(entry.index, error)
            self._on_problem(entries, error)
        elif len(entries) == 1:
            entries[0].asked.fail(entries[0].index, error)
        else:
            # One row that is refused for itself takes its batch with it: each is asked again alone.
            for entry in entries:
                entry.alone = True
            self._on_problem(entries, error)

    def _not_executed(self, entries: list[Row], error: NotExecuted) -> None:
        for entry in entries:
            entry.sent = False
            entry.attempts += 1
            entry.asked.last_problem = error
        if isinstance(error, Overloaded | NotReady):
            self._hold(entries, error.retry_after_seconds)
        else:
            self._on_problem(entries, error)

    def _hold(self, entries: Sequence[Row], seconds: float) -> None:
        """Leaves these tablets alone for a while, and them only."""
        seconds = max(seconds, RETRY_SECONDS_MIN) * (1.0 + 0.25 * self._random.random())
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
            lane = self._reads if entry.asked.is_read else self._mutations
            lane.queue.append(entry)
        self._send_soon()

    # ------------------------------------------------------------------ silence

    def silent_seconds(self) -> float:
        """For how long the oldest call has had no answer."""
        if not self._in_flight:
            return 0.0
        return self._loop.time() - min(call.started for call in self._in_flight)

    def leave(self, is_elsewhere: Callable[[Row], bool]) -> None:
        """Gives up what this server, which has fallen silent, need not be waited for any more.

        Calls about tablets that others serve by now: what was sent in them may have been executed.
        And rows that wait for such a tablet, which were not sent.
        """
        for call in self._in_flight:
            if call.task is not None and any(map(is_elsewhere, call.rows)):
                call.given_up = DeadlineExceeded(
                    "no answer, and others serve its tablets by now", where=self.address
                )
                if call.begun:
                    call.task.cancel()
        queues = [self._mutations.queue, self._reads.queue, *self._held.values()]
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
                "it is served elsewhere by now", tablet_id=tablet.tablet_id, epoch=tablet.epoch
            )
            self._on_problem(leaving, error)

    async def close(self) -> None:
        """Gives up all calls in flight."""
        for call in self._in_flight:
            if not call.begun:
                _closed(call.rows)
        tasks = [call.task for call in self._in_flight if call.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _closed(entries: Iterable[Row]) -> None:
    """The client is being closed: whoever still waits must not wait for ever."""
    for entry in entries:
        entry.asked.fail(entry.index, Unavailable("the client was closed"))
