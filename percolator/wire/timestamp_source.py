"""Timestamps for everybody in this process, many to a request.

At most one request is in flight. Whoever asks meanwhile shares the *next* one, never the one in
flight: that one's timestamps may have been allocated before the question was asked, and a
transaction would miss what was committed before it began. Without load a question is one round
trip; under load a request carries hundreds, and no timer delays anybody.

Invariants:
- A timestamp is allocated after it was asked for.
- Each request's timestamps lie above those of every request that was finished before. If they do
  not, the oracle went back: everything asked for now and ever after fails with
  `TimestampRegression`, because an outage can be repaired and corrupted data cannot.
- Asking again is always safe: timestamps that nobody received are only numbers.
- Nobody waits beyond the own deadline, whatever the network does.
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Callable, Sequence
from copy import copy

from percolator import errors
from percolator.timestamps import TIMESTAMPS_PER_REQUEST_MAX
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.wire.addresses import refuse_lone_address
from percolator.wire.methods import GET_TIMESTAMPS
from percolator.world import UnaryCall, World

WAITERS_MAX = 100_000
"""Questions waiting at one time; a program that asks more of them is told so at once."""

ATTEMPT_SECONDS_MAX = 2.0
"""A silent oracle (paused, cut off) is given up after this, and the next address is asked. One that
waits for its disk says so before: its settings hold it to less."""

SUSPECT_SECONDS_MAX = 0.5
"""So long is an oracle waited for that was silent when it was asked last, while there are others:
it may be paused for long, and each round that looks for its successor comes by."""

REQUESTS_BEFORE_GROWTH = 100
"""An oracle that refused a request as too large is asked for twice as much after so many answers:
it may have been set to more meanwhile. If not, this costs one request in a hundred."""

BACKOFF_SECONDS_MIN = 0.02
BACKOFF_SECONDS_MAX = 0.5
"""The pause after every address was tried in vain: doubled each time, half of it by chance."""

_WORTH_ANOTHER_TRY = (errors.NotExecuted, errors.ExecutionUnknown)


class _Batch:
    """Those who share a request, in the order in which they asked.

    Three lists instead of one of tuples: nothing that the garbage collector would have to look at
    is made per question besides its future.
    """

    __slots__ = ("count", "counts", "deadlines", "futures")

    def __init__(self) -> None:
        self.futures: list[asyncio.Future[int]] = []
        self.counts: list[int] = []
        self.deadlines: list[float] = []
        """In the event loop's time."""
        self.count = 0
        """The sum of the counts."""

    def split(self, count_max: int) -> _Batch:
        """Keeps the first ones, who want `count_max` together at most, or the first one alone.

        Returns the rest.
        """
        kept, count = 1, self.counts[0]
        while kept < len(self.counts) and count + self.counts[kept] <= count_max:
            count += self.counts[kept]
            kept += 1
        rest = _Batch()
        rest.futures, self.futures = self.futures[kept:], self.futures[:kept]
        rest.counts, self.counts = self.counts[kept:], self.counts[:kept]
        rest.deadlines, self.deadlines = self.deadlines[kept:], self.deadlines[:kept]
        rest.count, self.count = self.count - count, count
        return rest

    def take_over(self, later: _Batch) -> None:
        """Drops those who wait no more, and lets those of `later` follow."""
        both = zip(
            self.futures + later.futures,
            self.counts + later.counts,
            self.deadlines + later.deadlines,
            strict=True,
        )
        waiting = [entry for entry in both if not entry[0].done()]
        self.futures = [future for future, _, _ in waiting]
        self.counts = [count for _, count, _ in waiting]
        self.deadlines = [deadline for _, _, deadline in waiting]
        self.count = sum(self.counts)

    def fail(self, error: errors.PercolatorError) -> None:
        for future in self.futures:
            if not future.done():
                # Each its own: every waiter's raise would lengthen the traceback of a shared one.
                future.set_exception(copy(error))


class TimestampSource:
    """Asks the oracles at `addresses` for timestamps. Belongs to one event loop.

    `addresses` is read before every request: its owner may change it as the cluster changes, but
    never empties it.
    """

    def __init__(
        self,
        world: World,
        addresses: Sequence[str],
        *,
        timeout_seconds: float = 10.0,
        count_max: int = TIMESTAMPS_PER_REQUEST_MAX,
        on_trouble: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_trouble` is called when an oracle did not answer: there may be another one by now."""
        refuse_lone_address(addresses)
        if not addresses:
            raise errors.InvalidArgument("addresses", "is empty; expected the oracle's host:port")
        if _whole("count_max", count_max) < 1:
            raise errors.InvalidArgument("count_max", f"{count_max} is below 1")
        _check_timeout(timeout_seconds)
        self._clock = world.clock
        self._random = world.random
        self._network = world.network
        self._addresses = addresses
        self._on_trouble = on_trouble
        self._turn = 0
        self._suspects: set[str] = set()
        """Addresses that were silent when they were asked last."""
        self._calls: dict[str, UnaryCall[GetTimestampsRequest, GetTimestampsResponse]] = {}
        self._timeout_seconds = timeout_seconds
        self._count_max = count_max
        self._request_count_max = count_max
        self._grow_at = 0
        loop = _running_loop()
        self._loop = loop
        self._now = loop.time
        self._create_future = loop.create_future
        self._waiting = _Batch()
        self._in_flight = _Batch()
        self._dispatcher: asyncio.Task[None] | None = None
        self._reaper: asyncio.TimerHandle | None = None
        self._reap_at = math.inf
        self._largest = 0
        self._last_failure = ""
        self._ended: errors.PercolatorError | None = None
        self.requests_answered = 0

    def get(self, count: int = 1, timeout_seconds: float | None = None) -> asyncio.Future[int]:
        """A timestamp larger than every one that was received before the call: await it.

        With a `count`, the first of so many consecutive ones. `DeadlineExceeded` means that no
        oracle answered in time; the call may be repeated.
        """
        # Hundreds of thousands of calls a second come by here, so that each line costs: this is no
        # coroutine, which would be one object and one frame more.
        if count.__class__ is not int:
            count = _whole("count", count)
        if not 0 < count <= self._count_max:
            raise errors.InvalidArgument("count", f"{count} is outside 1 .. {self._count_max}")
        if self._ended is not None:
            raise copy(self._ended)
        if timeout_seconds is None:
            timeout_seconds = self._timeout_seconds
        else:
            _check_timeout(timeout_seconds)
        deadline = self._now() + timeout_seconds
        if self._dispatcher is None:
            if _running_loop() is not self._loop:
                raise errors.UsageError("a source of timestamps belongs to one event loop")
            # The task starts after everybody who is asking at this very moment has asked.
            self._dispatcher = self._loop.create_task(self._dispatch())
        waiting = self._waiting
        if len(waiting.futures) >= WAITERS_MAX:
            raise errors.Overloaded(
                f"{WAITERS_MAX} questions for timestamps are waiting already",
                retry_after_seconds=BACKOFF_SECONDS_MAX,
            )
        future = self._create_future()
        waiting.futures.append(future)
        waiting.counts.append(count)
        waiting.deadlines.append(deadline)
        waiting.count += count
        if deadline < self._reap_at:
            self._reap_no_later_than(deadline)
        return future

    async def close(self) -> None:
        """Gives up whatever is waited for. Closing twice is harmless."""
        if self._ended is None:
            self._ended = errors.UsageError("the source of timestamps is closed")
        self._fail_everybody()
        if self._reaper is not None:
            self._reaper.cancel()
        dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.cancel()
            await asyncio.wait([dispatcher])

    async def _dispatch(self) -> None:
        """Sends requests, one at a time, until nobody waits."""
        tries_in_vain = 0
        try:
            while self._waiting.futures:
                batch = self._in_flight = self._waiting
                self._waiting = _Batch()
                if batch.count > self._request_count_max:
                    self._waiting = batch.split(self._request_count_max)
                address = self._addresses[self._turn % len(self._addresses)]
                try:
                    response = await self._call(address)(
                        GetTimestampsRequest(count=batch.count), self._patience(address)
                    )
                except _WORTH_ANOTHER_TRY as error:
                    tries_in_vain += 1
                    if isinstance(error, errors.DeadlineExceeded):
                        self._suspects.add(address)
                    self._on_trouble()
                    self._last_failure = str(error)
                    self._put_back(batch)
                    await self._turn_to_the_next(tries_in_vain, error)
                except errors.PercolatorError as error:
                    if _is_too_many(error) and len(batch.futures) > 1:
                        # The oracle is set to less than it grants by default.
                        self._request_count_max = max(batch.count // 2, 1)
                        self._grow_at = self.requests_answered + REQUESTS_BEFORE_GROWTH
                        self._put_back(batch)
                    else:
                        batch.fail(error)
                else:
                    tries_in_vain = 0
                    self._suspects.clear()
                    self._distribute(batch, response)
        except asyncio.CancelledError:
            # By a stranger: they wait for the next dispatcher, or for their deadlines.
            self._put_back(self._in_flight)
            raise
        except Exception as error:
            self._ended = errors.InvariantViolation(f"asking for timestamps broke: {error!r}")
            self._fail_everybody()
            raise
        finally:
            self._in_flight = _Batch()
            self._dispatcher = None

    def _patience(self, address: str) -> float:
        if address in self._suspects and len(self._addresses) > 1:
            return SUSPECT_SECONDS_MAX
        return ATTEMPT_SECONDS_MAX

    def _call(self, address: str) -> UnaryCall[GetTimestampsRequest, GetTimestampsResponse]:
        call = self._calls.get(address)
        if call is None:
            # An address that is no longer among them is not called again.
            self._calls = {one: c for one, c in self._calls.items() if one in self._addresses}
            call = self._calls[address] = self._network.unary(address, GET_TIMESTAMPS)
        return call

    def _put_back(self, batch: _Batch) -> None:
        """Those who still wait go first into the next request."""
        batch.take_over(self._waiting)
        self._waiting, self._in_flight = batch, _Batch()

    def _distribute(self, batch: _Batch, response: GetTimestampsResponse) -> None:
        first = response.first
        if first <= self._largest or response.count != batch.count:
            self._refuse_for_ever(first, batch.count, response.count)
            return
        self._largest = first + batch.count - 1
        self._last_failure = ""
        self.requests_answered += 1
        if self.requests_answered == self._grow_at:
            self._request_count_max = min(self._request_count_max * 2, self._count_max)
            self._grow_at += REQUESTS_BEFORE_GROWTH
        for future, count in zip(batch.futures, batch.counts, strict=True):
            # Whoever was cancelled or came to the deadline meanwhile leaves a gap.
            if not future.done():
                future.set_result(first)
            first += count

    def _refuse_for_ever(self, first: int, asked: int, received: int) -> None:
        if received != asked:
            self._ended = errors.InvariantViolation(
                f"the oracle was asked for {asked} timestamps and answered with {received}"
            )
        else:
            self._ended = errors.TimestampRegression(
                f"the oracle went back: it answered {first} after {self._largest} had been "
                "received; nothing may go on"
            )
        self._fail_everybody()

    async def _turn_to_the_next(self, tries_in_vain: int, error: errors.PercolatorError) -> None:
        """Makes the next address the preferred one; pauses when all have been tried."""
        self._turn += 1
        rounds, rest = divmod(tries_in_vain, len(self._addresses))
        if rest:
            return
        seconds = min(BACKOFF_SECONDS_MIN * 2 ** min(rounds - 1, 10), BACKOFF_SECONDS_MAX)
        if isinstance(error, errors.Overloaded):
            seconds = max(seconds, error.retry_after_seconds)
        await self._clock.sleep(seconds * (0.5 + self._random.random() / 2))

    def _reap_no_later_than(self, deadline: float) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
        self._reap_at = deadline
        self._reaper = self._loop.call_at(deadline, self._reap)

    def _reap(self) -> None:
        """Ends the waiting of those whose deadline has come.

        One timer serves all: it is set to the earliest deadline of those who asked since it was
        last set, so it fires once per time-out at most, not once per question.
        """
        now = self._now()
        earliest = math.inf
        for batch in (self._in_flight, self._waiting):
            for future, deadline in zip(batch.futures, batch.deadlines, strict=True):
                if future.done():
                    continue
                if deadline <= now:
                    reason = self._last_failure or "no answer yet"
                    future.set_exception(
                        errors.DeadlineExceeded(f"no timestamp in time; last seen: {reason}")
                    )
                else:
                    earliest = min(earliest, deadline)
        self._reaper, self._reap_at = None, math.inf
        if earliest < math.inf:
            self._reap_no_later_than(earliest)

    def _fail_everybody(self) -> None:
        if self._ended is not None:
            self._in_flight.fail(self._ended)
            self._waiting.fail(self._ended)
        self._waiting = _Batch()


def _is_too_many(error: errors.PercolatorError) -> bool:
    return isinstance(error, errors.InvalidArgument) and error.field == "count"


def _whole(field: str, number: int) -> int:
    """Anything else would break the request that carries everybody's questions."""
    try:
        return operator.index(number)
    except TypeError:
        raise errors.InvalidArgument(field, f"{number!r} is not a whole number") from None


def _check_timeout(seconds: float) -> None:
    """Not a number is neither before nor after any deadline: it would be waited for for ever."""
    try:
        wrong = math.isnan(seconds)
    except TypeError:
        wrong = True
    if wrong:
        raise errors.InvalidArgument("timeout_seconds", f"{seconds!r} is not a number of seconds")


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise errors.UsageError("a source of timestamps is used within an event loop") from None
