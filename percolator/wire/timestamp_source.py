"""Timestamps for all callers in this process, many to a request.

At most one request is in flight. Callers that ask in the meantime share the *next* one, never the
one in flight: its timestamps may have been allocated before the call, and a transaction would miss
what was committed before it began. Without load, a timestamp costs one round trip; under load, a
request carries hundreds of calls, and no timer delays any of them.

Invariants:
- A timestamp is allocated after it was asked for.
- Each request's timestamps are above those of every request that finished before. If they are not,
  the oracle went backwards: all present and future calls fail with `TimestampRegression`, because
  an outage can be repaired and corrupted data cannot.
- Asking again is always safe: timestamps that were never received are only numbers.
- No caller waits beyond its own deadline, whatever the network does.
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Callable, Sequence
from copy import copy

from percolator import errors
from percolator.errors import DeadlineExceeded, ExecutionUnknown, NotReady, PercolatorError
from percolator.tasks import Tasks
from percolator.timestamps import TIMESTAMPS_PER_REQUEST_MAX
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.v1.oracle_pb2 import (
    CheckTimestampsRequest,
    GetTimestampsRequest,
    GetTimestampsResponse,
)
from percolator.wire.addresses import refuse_lone_address
from percolator.wire.backoff import pause_seconds
from percolator.wire.cluster import addresses_of, describe
from percolator.wire.methods import CHECK_TIMESTAMPS, GET_TIMESTAMPS
from percolator.world import RequestT, ResponseT, UnaryCall, UnaryMethod, World

WAITERS_MAX = 100_000
"""How many calls may wait at one time; further calls fail at once."""

ATTEMPT_SECONDS_MAX = 2.0
"""How long to wait for a silent oracle (paused, cut off) before asking the next address. An oracle
that waits for its disk says so earlier: its settings allow it less time than this."""

SUSPECT_SECONDS_MAX = 0.5
"""How long to wait for an oracle that was silent last time, if there are others: it may stay paused
for long, and every round that looks for its successor asks it again."""

REQUESTS_BEFORE_GROWTH = 100
"""After an oracle refused a request as too large, twice as much is tried after this many answers:
its limit may have been raised since. If not, this costs one request in a hundred."""

BACKOFF_SECONDS_MIN = 0.02
BACKOFF_SECONDS_MAX = 0.5
"""The pause after every address was tried without success."""

_WORTH_ANOTHER_TRY = (errors.NotExecuted, errors.ExecutionUnknown)


class _Batch:
    """The calls that share a request, in the order in which they came.

    Three lists instead of one list of tuples: besides its future, a call creates no object that the
    garbage collector has to look at.
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
        """Keeps the first calls that together want at most `count_max`, but at least one call.

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
        """Drops calls that no longer wait, and appends those of `later`."""
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
                # A copy each: raising a shared error would lengthen its traceback every time.
                future.set_exception(copy(error))


class TimestampSource:
    """Asks the oracles at `addresses` for timestamps. Belongs to one event loop.

    `addresses` is read before every request: its owner may change it as the cluster changes, but
    must never empty it.
    """

    def __init__(
        self,
        world: World,
        addresses: Sequence[str],
        *,
        timeout_seconds: float = 10.0,
        count_max: int = TIMESTAMPS_PER_REQUEST_MAX,
        on_trouble: Callable[[], None] = lambda: None,
        owner: str = "source of timestamps",
    ) -> None:
        """`on_trouble` is called when an oracle did not answer: another may have replaced it.
        `owner` is what is closed with it, as callers know it."""
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
        self._owner = owner
        self._next = 0
        self._suspects: set[str] = set()
        """Addresses that were silent when last asked."""
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
        self.catalogue_epoch = 0
        """The highest that came with a timestamp. Before a timestamp is known, its epoch is."""

    def get(self, count: int = 1, timeout_seconds: float | None = None) -> asyncio.Future[int]:
        """A future timestamp, larger than every one that was received before the call.

        With a `count`, the first of that many consecutive ones. `DeadlineExceeded` means that no
        oracle answered in time; the call may be repeated.
        """
        # This is called hundreds of thousands of times a second, so every line counts. It is not a
        # coroutine, which would cost another object and another frame.
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
        # Done: other code has cancelled it before its first step.
        if self._dispatcher is None or self._dispatcher.done():
            if _running_loop() is not self._loop:
                raise errors.UsageError("a source of timestamps belongs to one event loop")
            # The task starts in the next turn of the loop, after all calls of this turn were made.
            self._dispatcher = self._loop.create_task(self._dispatch())
        waiting = self._waiting
        if len(waiting.futures) >= WAITERS_MAX:
            raise errors.Overloaded(
                f"{WAITERS_MAX} calls are already waiting for timestamps",
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
        """Fails all calls that are waiting. Closing twice is harmless."""
        if self._ended is None:
            self._ended = errors.UsageError(f"the {self._owner} is closed")
        self._fail_all_calls()
        if self._reaper is not None:
            self._reaper.cancel()
        dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.cancel()
            await asyncio.wait([dispatcher])

    async def _dispatch(self) -> None:
        """Sends requests, one at a time, until no call is waiting."""
        failed_attempts = 0
        try:
            while self._waiting.futures:
                batch = self._in_flight = self._waiting
                self._waiting = _Batch()
                if batch.count > self._request_count_max:
                    self._waiting = batch.split(self._request_count_max)
                address = self._addresses[self._next % len(self._addresses)]
                try:
                    response = await self._call(address)(
                        GetTimestampsRequest(count=batch.count), self._patience(address)
                    )
                except _WORTH_ANOTHER_TRY as error:
                    failed_attempts += 1
                    if isinstance(error, errors.DeadlineExceeded):
                        self._suspects.add(address)
                    self._on_trouble()
                    self._last_failure = str(error)
                    self._put_back(batch)
                    await self._move_to_the_next(failed_attempts, error)
                except errors.PercolatorError as error:
                    refused = isinstance(error, errors.InvalidArgument) and error.field == "count"
                    if refused and len(batch.futures) > 1:
                        # The oracle's limit is set below the default.
                        self._request_count_max = max(batch.count // 2, 1)
                        self._grow_at = self.requests_answered + REQUESTS_BEFORE_GROWTH
                        self._put_back(batch)
                    else:
                        batch.fail(error)
                else:
                    failed_attempts = 0
                    self._suspects.clear()
                    self._distribute(batch, response)
        except Exception as error:
            self._ended = errors.InvariantViolation(f"asking for timestamps failed: {error!r}")
            self._fail_all_calls()
            raise
        except BaseException:
            # Cancelled, but not by `close`, or Ctrl-C, perhaps while timestamps were handed out.
            # The calls that have none wait for the next dispatcher, or their deadlines.
            self._put_back(self._in_flight)
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
            # Drop the calls of addresses that are no longer listed.
            self._calls = {one: c for one, c in self._calls.items() if one in self._addresses}
            call = self._calls[address] = self._network.unary(address, GET_TIMESTAMPS)
        return call

    def _put_back(self, batch: _Batch) -> None:
        """Puts calls that still wait at the head of the next request."""
        batch.take_over(self._waiting)
        self._waiting, self._in_flight = batch, _Batch()

    def _distribute(self, batch: _Batch, response: GetTimestampsResponse) -> None:
        first = response.first
        if first <= self._largest or response.count != batch.count:
            self._refuse_for_ever(first, batch.count, response.count)
            return
        self._largest = first + batch.count - 1
        self._last_failure = ""
        if response.catalogue_epoch > self.catalogue_epoch:
            self.catalogue_epoch = response.catalogue_epoch
        self.requests_answered += 1
        if self.requests_answered == self._grow_at:
            self._request_count_max = min(self._request_count_max * 2, self._count_max)
            self._grow_at += REQUESTS_BEFORE_GROWTH
        for future, count in zip(batch.futures, batch.counts, strict=True):
            # A call that was cancelled or has timed out in the meantime leaves a gap.
            if not future.done():
                future.set_result(first)
            first += count

    def _refuse_for_ever(self, first: int, asked: int, received: int) -> None:
        if received != asked:
            self._ended = errors.InvariantViolation(
                f"the oracle was asked for {asked} timestamps and returned {received}"
            )
        else:
            self._ended = errors.TimestampRegression(
                f"the oracle went back: it returned {first} after {self._largest} had been "
                "received; refusing to continue"
            )
        self._fail_all_calls()

    async def _move_to_the_next(self, failed_attempts: int, error: errors.PercolatorError) -> None:
        """Makes the next address the preferred one; pauses when all have been tried."""
        self._next += 1
        rounds, rest = divmod(failed_attempts, len(self._addresses))
        if rest:
            return
        seconds = pause_seconds(
            self._random,
            BACKOFF_SECONDS_MIN,
            BACKOFF_SECONDS_MAX,
            doublings=rounds - 1,
            asked_seconds=error.retry_after_seconds if isinstance(error, errors.Overloaded) else 0,
        )
        await self._clock.sleep(seconds)

    def _reap_no_later_than(self, deadline: float) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
        self._reap_at = deadline
        self._reaper = self._loop.call_at(deadline, self._reap)

    def _reap(self) -> None:
        """Fails the calls whose deadline has passed.

        One timer serves all: it is set to the earliest deadline of the calls since it was last set,
        so it fires at most once per timeout, not once per call.
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
                        errors.DeadlineExceeded(
                            f"the oracle did not answer in time; last error: {reason}"
                        )
                    )
                else:
                    earliest = min(earliest, deadline)
        self._reaper, self._reap_at = None, math.inf
        if earliest < math.inf:
            self._reap_no_later_than(earliest)

    def _fail_all_calls(self) -> None:
        if self._ended is not None:
            self._in_flight.fail(self._ended)
            self._waiting.fail(self._ended)
        self._waiting = _Batch()


def _whole(field: str, number: int) -> int:
    """The number as an int: anything else would break the request that carries all calls."""
    try:
        return operator.index(number)
    except TypeError:
        raise errors.InvalidArgument(field, f"{number!r} is not a whole number") from None


def _check_timeout(seconds: float) -> None:
    """Refuses NaN: it is neither before nor after any deadline, so the call would wait forever."""
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
        raise errors.UsageError(
            "a source of timestamps must be used within an event loop"
        ) from None


# The source of a server, which finds the oracles itself.

ANSWER_SECONDS_MAX = 1.0
"""The call that needs the timestamp waits meanwhile, and its caller has a deadline too."""


_CHECK_SECONDS = 1.0
_CHECK_AGAIN_SECONDS = 0.1


class OracleOfCluster:
    """Timestamps from the oracle that the masters name, for servers. Belongs to one event loop.

    A tablet server needs commit timestamps for transactions in one round, all the time. Its
    `TimestampGuard` asks what time it is, rarely: when it has just started, or when time has
    jumped. A gateway takes the start timestamps of callers with rights to some tables only. The
    masters are asked when the first timestamp is, and when the oracle does not answer.
    """

    def __init__(self, world: World, masters: Sequence[str]) -> None:
        self._world = world
        self._masters = masters
        self._addresses: list[str] = []
        """Where oracles were last known to be. The source asks whatever is listed here."""
        self._source: TimestampSource | None = None
        self._looking: asyncio.Task[PercolatorError | None] | None = None
        """The one attempt to find oracles, which all callers share."""
        self._tasks = Tasks()

    def take(self, count: int = 1) -> asyncio.Future[int]:
        """The first of that many timestamps, which were handed out after the call. Raises
        `PercolatorError`, after `ANSWER_SECONDS_MAX` at the latest."""
        if self._source is not None:
            return self._source.get(count, ANSWER_SECONDS_MAX)
        return self._tasks.start(self._take_first(count))

    async def _take_first(self, count: int) -> int:
        now = self._world.clock.monotonic_seconds
        deadline = now() + ANSWER_SECONDS_MAX
        source = await self._first_source(ANSWER_SECONDS_MAX)
        return await source.get(count, max(deadline - now(), 0.0))

    async def take_for(self, token: str) -> int:
        """A timestamp for a caller whose token has this name and rights to some tables only. Raises
        `NotReady` if the oracle does not answer."""
        request = GetTimestampsRequest(count=1, token=token)
        return (await self._asked(GET_TIMESTAMPS, request, "hands out a timestamp")).first

    async def handed_out(self, token: str, timestamps: Sequence[int]) -> Sequence[bool]:
        """Which of these were handed out to the token of this name, which has rights to some tables
        only. Raises `NotReady` if the oracle does not say."""
        request = CheckTimestampsRequest(token=token, timestamps=timestamps)
        asked = await self._asked(CHECK_TIMESTAMPS, request, "says whose timestamps these are")
        return asked.handed_out

    async def _asked(
        self, method: UnaryMethod[RequestT, ResponseT], request: RequestT, what: str
    ) -> ResponseT:
        """Asks the oracles, until one answers."""
        await self._first_source(ANSWER_SECONDS_MAX)
        problem: PercolatorError | None = None
        for address in [*self._addresses]:
            try:
                return await self._world.network.unary(address, method)(request, _CHECK_SECONDS)
            except (NotReady, ExecutionUnknown) as error:
                problem = error
        self._on_trouble()
        raise NotReady(f"no oracle {what}: {problem}", retry_after_seconds=_CHECK_AGAIN_SECONDS)

    async def close(self) -> None:
        if self._source is not None:
            await self._source.close()
        await self._tasks.cancel()

    async def _first_source(self, timeout_seconds: float) -> TimestampSource:
        looking = self._look()
        await asyncio.wait((looking,), timeout=timeout_seconds)
        if self._source is not None:
            return self._source
        if not looking.done():
            raise DeadlineExceeded("no master said in time where the oracle is")
        problem = None if looking.cancelled() else looking.result()
        raise copy(problem) if problem is not None else NotReady("the server is closing")

    def _look(self) -> asyncio.Task[PercolatorError | None]:
        """Asks the masters for the oracles, unless such a request is in flight."""
        if self._looking is None:
            self._looking = self._tasks.start(self._find())
        return self._looking

    async def _find(self) -> PercolatorError | None:
        """Returns why no oracle was found. The known ones are kept: they may answer again."""
        try:
            cluster = await describe(self._world.network, self._masters, ANSWER_SECONDS_MAX)
        except PercolatorError as problem:
            return problem
        finally:
            self._looking = None
        found = addresses_of(cluster, ServiceKind.SERVICE_KIND_ORACLE)
        if not found and not self._addresses:
            return NotReady("no oracle is registered")
        self._addresses[:] = found or self._addresses
        if self._source is None:
            self._source = TimestampSource(
                self._world, self._addresses, on_trouble=self._on_trouble
            )
        return None

    def _on_trouble(self) -> None:
        """The oracle did not answer: another one may lead. Until it is found, the known ones are
        still asked: they may answer again, and commits must not queue behind silent masters."""
        self._look()
