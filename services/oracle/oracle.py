"""The oracle: strictly increasing timestamps, whatever happens to the process, disk or clock.

Timestamps are handed out from a *window* that ends at the mark. The mark is durable before any part
of the window is served, and a new oracle starts at the mark of the previous one, so no number is
used again after a restart. A task extends the window before it is used up, so that requests do not
normally wait for the disk: with windows of 2.9 s it writes every 2 s.

Invariants:
- Each timestamp is below a mark that was durable before, and above all that were handed out.
- Before each answer, and *after* its timestamps were allocated, the oracle checks that it may still
  answer: if it was paused in between, it may have a successor by now.
- While the mark cannot be made durable, the rest of the window is served, and then nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Self

import structlog

from percolator.errors import (
    InvalidArgument,
    InvariantViolation,
    NotReady,
    Overloaded,
    PercolatorError,
    PermissionDenied,
    StoreFault,
    StoreUnusable,
    UsageError,
    WrongCluster,
)
from percolator.services.chassis.coordinator import Candidacy, Leadership
from percolator.services.chassis.rpc import caller_identity
from percolator.timestamps import (
    PHYSICAL_MILLISECONDS_MAX,
    SEQUENCE_BITS,
    TIMESTAMPS_PER_REQUEST_MAX,
)
from percolator.v1.oracle_pb2 import (
    AdvanceEpochRequest,
    AdvanceEpochResponse,
    CheckTimestampsRequest,
    CheckTimestampsResponse,
    GetTimestampsRequest,
    GetTimestampsResponse,
)
from percolator.wire.roles import Role
from percolator.world import Clock

LEADING_SPEED = 0.99
"""Relative speed while the wall clock lags: a lead of an hour is gone in about 4 days. An operator
may have it slower, to get rid of a lead sooner."""


class PhysicalTime:
    """The physical part of timestamps: milliseconds since 1970-01-01 UTC that only grow.

    It follows this machine's wall clock, protected against its jumps.

    Rules, in the order in which they are applied at each reading:
    - It never goes back.
    - A wall clock that is ahead by at most `jump_seconds_max` is followed at once.
    - A wall clock that is further ahead has jumped: an operator's mistake, or a bad time server.
      Following it would expire every lock and all history, and could never be undone. So the
      physical part advances with the monotonic clock instead, unless following was asked for.
    - While the wall clock lags (it was set back, or the oracle restarted and began above its mark),
      the physical part advances with the monotonic clock, so that locks still expire. It runs
      slower than that clock, by 1 % unless it is told otherwise, so that the lead shrinks instead
      of adding up over restarts.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        begin_milliseconds: int,
        jump_seconds_max: float,
        follow_jumps: bool,
        leading_speed: float = LEADING_SPEED,
    ) -> None:
        self._clock = clock
        self._jump_milliseconds_max = float("inf") if follow_jumps else jump_seconds_max * 1000
        self._read_at = clock.monotonic_seconds()
        self._leading_speed = leading_speed
        self._now = float(begin_milliseconds)
        self._wall_lead = clock.wall_milliseconds() - self._now

    def now_milliseconds(self) -> int:
        """The current physical part."""
        monotonic = self._clock.monotonic_seconds()
        elapsed = (monotonic - self._read_at) * 1000
        self._read_at = monotonic
        wall = self._clock.wall_milliseconds()
        steady = self._now + elapsed
        if wall - steady > self._jump_milliseconds_max:
            self._now = steady
        else:
            self._now = max(float(wall), self._now + elapsed * self._leading_speed)
        self._wall_lead = wall - self._now
        return int(self._now)

    @property
    def wall_lead_seconds(self) -> float:
        """How far the wall clock was ahead at the last reading; negative while it lags."""
        return self._wall_lead / 1000

    @property
    def is_ignoring_a_jump(self) -> bool:
        """True if the wall clock was too far ahead to be followed at the last reading."""
        return self._wall_lead > self._jump_milliseconds_max


class Allocator:
    """Hands out blocks of consecutive timestamps from a window: arithmetic, without clock or disk.

    Invariants:
    - No number is handed out twice: each block begins above the end of the one before.
    - No number at or above the *limit* is handed out. The limit is what a durable mark allows, so a
      successor that starts at the mark cannot hand out a number again.
    - The limit only grows.
    - However many are requested, their physical part runs at most `lead_milliseconds_max` ahead of
      time. Otherwise one greedy client would make all locks expire.
    """

    def __init__(self, mark_milliseconds: int, *, lead_milliseconds_max: int) -> None:
        """Starts at the persisted mark with an empty window, which `extend` opens."""
        self._next = mark_milliseconds << SEQUENCE_BITS
        self._limit = self._next
        self._lead_milliseconds_max = lead_milliseconds_max

    @property
    def limit_milliseconds(self) -> int:
        """The physical part of every timestamp stays below this."""
        return self._limit >> SEQUENCE_BITS

    def extend(self, mark_milliseconds: int) -> None:
        """Opens the window up to a mark, which must be durable already."""
        if mark_milliseconds > PHYSICAL_MILLISECONDS_MAX:
            raise InvariantViolation(f"the mark {mark_milliseconds} ms does not fit a timestamp")
        limit = mark_milliseconds << SEQUENCE_BITS
        if limit < self._limit:
            raise InvariantViolation(
                f"the mark would go back from {self.limit_milliseconds} to {mark_milliseconds} ms"
            )
        self._limit = limit

    def allocate(self, count: int, now_milliseconds: int) -> int | None:
        """The first of `count` consecutive timestamps, not older than `now_milliseconds`.

        None if the window does not hold them; then none is taken. A block may run over into the
        following milliseconds, since their numbers are like any others.
        """
        first = max(self._next, now_milliseconds << SEQUENCE_BITS)
        after = first + count
        if after > now_milliseconds + self._lead_milliseconds_max << SEQUENCE_BITS:
            lead_milliseconds = (after >> SEQUENCE_BITS) - now_milliseconds
            raise Overloaded(
                "timestamps are requested faster than time passes: a millisecond has "
                f"{1 << SEQUENCE_BITS}",
                retry_after_seconds=(lead_milliseconds - self._lead_milliseconds_max + 1) / 1000,
            )
        if after > self._limit:
            return None
        self._next = after
        return first


FORMAT = 2
"""The format of a mark with an epoch; a mark without one has format 1."""

_CLUSTER_ID = re.compile(r"[\x21-\x7e]{0,128}")
_FIRST_LINE = re.compile(rb"percolator-oracle-mark ([0-9]{1,9})\n")
_FORMAT_1 = re.compile(
    rb"(percolator-oracle-mark 1\n"
    rb"cluster=([\x21-\x7e]{0,128})\n"
    rb"milliseconds=([0-9]{1,14})\n)"
    rb"crc32=([0-9a-f]{8})\n"
)
_FORMAT_2 = re.compile(
    rb"(percolator-oracle-mark 2\n"
    rb"cluster=([\x21-\x7e]{0,128})\n"
    rb"milliseconds=([0-9]{1,14})\n"
    rb"epoch=([0-9]{1,19})\n)"
    rb"crc32=([0-9a-f]{8})\n"
)


@dataclass(frozen=True)
class Mark:
    """The physical part of every timestamp ever handed out is below `milliseconds`."""

    milliseconds: int
    cluster_id: str
    """The cluster of the timestamps; empty for an oracle that served without a master."""
    epoch: int = 0
    """The catalogue's epoch; 0 if it was never raised."""

    def __post_init__(self) -> None:
        # An id that does not fit the format could be written, and then never be read again.
        if not _CLUSTER_ID.fullmatch(self.cluster_id):
            raise InvalidArgument("cluster_id", f"{self.cluster_id[:64]!r} is not printable ASCII")

    def encode(self) -> bytes:
        body = (
            f"percolator-oracle-mark {FORMAT if self.epoch else 1}\n"
            f"cluster={self.cluster_id}\n"
            f"milliseconds={self.milliseconds}\n" + (f"epoch={self.epoch}\n" if self.epoch else "")
        ).encode("ascii")
        return body + f"crc32={zlib.crc32(body):08x}\n".encode("ascii")

    @classmethod
    def decode(cls, data: bytes, where: str) -> Mark:
        """Refuses everything that `encode` of this version cannot have written."""
        first_line = _FIRST_LINE.match(data)
        if first_line is not None and int(first_line[1]) > FORMAT:
            raise WrongCluster(
                f"{where} was written by a newer version: format {int(first_line[1])}, "
                f"this one knows {FORMAT}",
                expected=f"format {FORMAT}",
                found=f"format {int(first_line[1])}",
            )
        whole = _FORMAT_1.fullmatch(data) or _FORMAT_2.fullmatch(data)
        if whole is None or zlib.crc32(whole[1]) != int(whole[whole.re.groups], 16):
            raise _damaged(where)
        epoch = int(whole[4]) if whole.re is _FORMAT_2 else 0
        milliseconds = int(whole[3])
        if milliseconds > PHYSICAL_MILLISECONDS_MAX:
            raise _damaged(where)
        return cls(milliseconds, whole[2].decode("ascii"), epoch)


def _damaged(where: str) -> StoreUnusable:
    return StoreUnusable(
        f"{where} is damaged, and a guess could hand out timestamps twice; docs/formats.md says "
        "how to write a new one",
        fault=StoreFault.DAMAGED,
    )


ROLE = "oracle"
MARK = "mark"
SERVED = "served"
"""Written once, after the first mark of a store. From then on a missing mark is a loss."""


class DurableMark:
    """The durable mark: a value of the role "oracle", which only the leading oracle can write.

    Made by `open`.

    Invariants:
    - `write` returns only when the mark is durable and this oracle still led afterwards.
    - The mark is read from the directory that this leader has taken over, where the leader before
      can no longer write. Otherwise that one could raise the mark after it was read, and hand out
      timestamps that this one hands out again.
    - A mark that cannot be read, or is missing where there was one, is never replaced by a guess.
    """

    def __init__(self, leadership: Leadership, mark: Mark, *, has_served: bool) -> None:
        self.leadership = leadership
        self._mark = mark
        self._has_served = has_served
        self._writing = asyncio.Lock()
        """Each write keeps what the one before has written."""

    @classmethod
    async def open(cls, leadership: Leadership, *, cluster_id: str) -> Self:
        """Reads what the previous leader left. Only the leader may call it."""
        has_served = await leadership.get(SERVED) is not None
        mark = await _read(leadership, cluster_id)
        if mark is None and has_served:
            raise StoreUnusable(
                f"the value {MARK!r} of the role {ROLE!r} is missing, though an oracle has served "
                "from it; see docs/formats.md",
                fault=StoreFault.DAMAGED,
            )
        return cls(leadership, mark or Mark(0, cluster_id), has_served=has_served)

    @property
    def mark_milliseconds(self) -> int:
        """Above the physical part of every timestamp ever handed out. 0 at first."""
        return self._mark.milliseconds

    async def write(self, milliseconds: int) -> None:
        """Returns when the mark is durable. Raises `NotReady` if another oracle leads by now.

        After `StoreUnusable` a successor may find this mark or the previous one. Writing a higher
        one next is right in both cases.
        """
        if milliseconds < self._mark.milliseconds:
            raise InvariantViolation(
                f"the mark would go back from {self._mark.milliseconds} to {milliseconds} ms"
            )
        async with self._writing:
            await self._put(replace(self._mark, milliseconds=milliseconds))
        if not self._has_served:
            await self.leadership.put(SERVED, b"")
            self._has_served = True

    @property
    def epoch(self) -> int:
        """The catalogue's epoch, as far as it is durable."""
        return self._mark.epoch

    async def advance_epoch(self, epoch: int) -> None:
        """Returns when an epoch at least as high is durable. Raises as `write`."""
        async with self._writing:
            if epoch > self._mark.epoch:
                await self._put(replace(self._mark, epoch=epoch))

    async def _put(self, mark: Mark) -> None:
        await self.leadership.put(MARK, mark.encode())
        self._mark = mark


async def _read(leadership: Leadership, cluster_id: str) -> Mark | None:
    """None if no oracle has ever served from this store."""
    data = await leadership.get(MARK)
    if data is None:
        return None
    mark = Mark.decode(data, f"the value {MARK!r} of the role {ROLE!r}")
    if cluster_id and mark.cluster_id and mark.cluster_id != cluster_id:
        raise WrongCluster(
            f"the oracle's mark belongs to cluster {mark.cluster_id}, not to {cluster_id}",
            expected=cluster_id,
            found=mark.cluster_id,
        )
    return replace(mark, cluster_id=mark.cluster_id or cluster_id)


WINDOW_LEFT_AT_EXTENSION = 0.3
"""The share of the window that is left when its extension begins. An extension costs two fsyncs,
there should be at most one fsync a second, and the window has to be shorter than 3 s
(`OracleLimits`). So 0.7 of the window is used first, and 0.87 s are left for the disk."""

LEAD_PART_OF_WINDOW = 0.15
"""How far a burst may run ahead of time: half of what is left when an extension begins."""

_RETRY_SECONDS = 0.25
_START_JUMP_DAYS_MAX = 366
_MILLISECONDS_PER_DAY = 86_400_000
_LAG_WORTH_A_WARNING_SECONDS = 10.0

_log = structlog.get_logger("percolator.oracle")


@dataclass(frozen=True)
class OracleLimits:
    """The bounds of one oracle."""

    window_seconds: float = 2.9
    """How far ahead the mark is set. A crash makes time jump by at most this, which is less than a
    lock's time to live (3 s), so a restart alone makes no fresh lock expire."""

    count_max: int = TIMESTAMPS_PER_REQUEST_MAX
    """Timestamps in one request."""

    wait_seconds_max: float = 1.5
    """How long a request waits for the disk. Shorter than the 2 s for which the caller waits
    (`percolator.wire.timestamp_source.ATTEMPT_SECONDS_MAX`), so that it learns the reason."""

    jump_seconds_max: float = 60.0
    """A wall clock that jumps further forward than this is not followed."""

    leading_speed: float = LEADING_SPEED
    """How fast timestamps go while the wall clock lags behind them."""

    follow_jumps: bool = False
    """Follow the wall clock however far it jumps."""


@dataclass(slots=True)
class OracleCounts:
    """Totals since the start of the process."""

    timestamps: int = 0
    extensions: int = 0
    extension_failures: int = 0
    waits: int = 0
    """Requests that had to wait for the disk."""
    refused: Counter[str] = field(default_factory=Counter)
    """By the name of the error."""


class Oracle:
    """Hands out timestamps once `extend` has succeeded; `keep_extended` has to run in a task."""

    def __init__(
        self,
        clock: Clock,
        mark: DurableMark,
        may_answer: Callable[[], Awaitable[bool]],
        limits: OracleLimits,
        counts: OracleCounts | None = None,
        *,
        may_extend: Callable[[], Awaitable[bool]] | None = None,
        begin_milliseconds: int | None = None,
    ) -> None:
        """`may_extend` is asked before a mark is written. That needs no proof: `mark` refuses it if
        another oracle leads. Without it, `may_answer` is asked. Time begins at
        `begin_milliseconds`, which is not below the mark. Without it, the wall clock is trusted: a
        jump of that clock looks like a long stop of the oracle."""
        self._clock = clock
        self._mark = mark
        self._may_answer = may_answer
        self._may_extend = may_extend or may_answer
        self._limits = limits
        self._window_milliseconds = int(limits.window_seconds * 1000)
        if begin_milliseconds is None:
            begin_milliseconds = max(clock.wall_milliseconds(), mark.mark_milliseconds)
        _check_start(begin_milliseconds, mark.mark_milliseconds, limits)
        self._time = PhysicalTime(
            clock,
            begin_milliseconds=begin_milliseconds,
            jump_seconds_max=limits.jump_seconds_max,
            follow_jumps=limits.follow_jumps,
            leading_speed=limits.leading_speed,
        )
        self._allocator = Allocator(
            mark.mark_milliseconds,
            lead_milliseconds_max=int(self._window_milliseconds * LEAD_PART_OF_WINDOW),
        )
        self._is_deposed = False
        self._failure: StoreUnusable | None = None
        self._extension_wanted = asyncio.Event()
        self._extension_ended = asyncio.Event()
        self._clock_complaint = ""
        self.counts = counts or OracleCounts()

    async def get_timestamps(self, count: int) -> int:
        """The first of `count` consecutive timestamps, none of which is ever handed out again."""
        try:
            if not 0 < count <= self._limits.count_max:
                raise InvalidArgument("count", f"{count} is outside 1 .. {self._limits.count_max}")
            first = self._allocator.allocate(count, self._time.now_milliseconds())
            if first is None:
                first = await self._allocate_when_extended(count)
            # Only a check that begins after the allocation proves that the timestamps are ours.
            await self.check_may_answer()
        except PercolatorError as error:
            self.counts.refused[type(error).__name__] += 1
            raise
        self.counts.timestamps += count
        return first

    @property
    def catalogue_epoch(self) -> int:
        """To be read after timestamps were taken: it may be higher than when they were."""
        return self._mark.epoch

    async def advance_epoch(self, epoch: int) -> int:
        """From now on, whoever gets a timestamp gets an epoch at least as high. Returns it."""
        await self.check_may_answer()
        await self._mark.advance_epoch(epoch)
        await self.check_may_answer()
        return self._mark.epoch

    async def check_may_answer(self) -> None:
        """Raises `NotReady` if another oracle may lead by now."""
        await self._check(self._may_answer)

    async def _check(self, may: Callable[[], Awaitable[bool]]) -> None:
        if self._is_deposed or not await may():
            self._is_deposed = True
            raise NotReady("this oracle has lost its store, or another oracle has taken its place")

    async def extend(self) -> None:
        """Makes a higher mark durable and opens the window up to it, or raises `StoreUnusable`."""
        try:
            await self._check(self._may_extend)
            milliseconds = self._time.now_milliseconds() + self._window_milliseconds
            await self._mark.write(milliseconds)
        except StoreUnusable as error:
            self._failed(error)
            raise
        else:
            self._allocator.extend(milliseconds)
            self._succeeded()
        finally:
            # Waiting requests look again, whatever the outcome, and ask again if they have to.
            self._extension_wanted.clear()
            self._extension_ended.set()
            self._extension_ended = asyncio.Event()

    async def keep_extended(self) -> None:
        """Extends the window when little of it is left. Ends only with an error."""
        while True:
            await self._until_extension_is_due()
            try:
                await self.extend()
            except StoreUnusable:
                # Counted and logged by `extend`; requests that arrive meanwhile are refused.
                await self._clock.sleep(_RETRY_SECONDS)
            self._watch_clock()

    @property
    def wall_lead_seconds(self) -> float:
        """How far the wall clock is ahead of the timestamps; negative while it lags."""
        return self._time.wall_lead_seconds

    @property
    def mark_milliseconds(self) -> int:
        """The durable mark. Everything handed out is below it."""
        return self._allocator.limit_milliseconds

    async def _allocate_when_extended(self, count: int) -> int:
        self.counts.waits += 1
        try:
            async with asyncio.timeout(self._limits.wait_seconds_max):
                while True:
                    if self._failure is not None:
                        # Copied: raising one error many times would lengthen its traceback.
                        raise copy(self._failure)
                    await self.check_may_answer()
                    self._extension_wanted.set()
                    await self._extension_ended.wait()
                    first = self._allocator.allocate(count, self._time.now_milliseconds())
                    if first is not None:
                        return first
        except TimeoutError:
            raise NotReady(
                f"the disk took longer than {self._limits.wait_seconds_max:g} s to extend the mark"
            ) from None

    async def _until_extension_is_due(self) -> None:
        left = self._allocator.limit_milliseconds - self._time.now_milliseconds()
        unused = left - self._window_milliseconds * WINDOW_LEFT_AT_EXTENSION
        if unused > 0:
            # If a jump of the clock uses up the window earlier, a request sets the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(unused / 1000):
                    await self._extension_wanted.wait()

    def _failed(self, error: StoreUnusable) -> None:
        self.counts.extension_failures += 1
        if self._failure is None:
            _log.error("the mark cannot be made durable", error=str(error))
        self._failure = error

    def _succeeded(self) -> None:
        self.counts.extensions += 1
        if self._failure is not None:
            _log.info("the mark is durable again")
        self._failure = None

    def _watch_clock(self) -> None:
        """Warns when the wall clock begins to disagree, and logs when it agrees again."""
        lead = self._time.wall_lead_seconds
        complaint = ""
        if self._time.is_ignoring_a_jump:
            complaint = (
                "the wall clock jumped forward and is not followed; if it is right, restart the "
                "oracle, or set --follow-clock-jumps"
            )
        elif lead < -_LAG_WORTH_A_WARNING_SECONDS:
            complaint = (
                "the wall clock lags behind the timestamps, which advance without it; correct it "
                "if it is wrong"
            )
        if complaint == self._clock_complaint:
            return
        self._clock_complaint = complaint
        if complaint:
            _log.warning(complaint, wall_lead_seconds=round(lead, 3))
        else:
            _log.info("the wall clock agrees with the timestamps again")


def _check_start(begin_milliseconds: int, mark_milliseconds: int, limits: OracleLimits) -> None:
    """A long stop looks like a jump of the clock, so only an absurd one is refused."""
    days = (begin_milliseconds - mark_milliseconds) / _MILLISECONDS_PER_DAY
    if mark_milliseconds and days > _START_JUMP_DAYS_MAX and not limits.follow_jumps:
        raise UsageError(
            f"the wall clock is {days:.0f} days above the persisted mark; if it is right, start "
            "once with --follow-clock-jumps"
        )


HANDED_OUT_MAX = 1_000_000


class HandedOut:
    """The timestamps that were handed out to tokens with rights to some tables only: the last ones.

    Tablet servers and gateways ask about them (percolator/services/tabletserver/own_steps.py): such
    a caller must not write under the timestamp of another transaction.
    """

    def __init__(self, blocks_max: int = HANDED_OUT_MAX) -> None:
        self._blocks_max = blocks_max
        self._blocks = 0
        self._tokens: dict[str, tuple[array[int], array[int]]] = {}
        """By the name of the token: where blocks begin and end, both ascending."""

    def note(self, token: str, first: int, count: int) -> None:
        firsts, ends = self._tokens.setdefault(token, (array("Q"), array("Q")))
        if firsts and first < ends[-1]:
            # Two requests that were answered in another order than they were executed.
            at = bisect_right(firsts, first)
            firsts.insert(at, first)
            ends.insert(at, first + count)
        else:
            firsts.append(first)
            ends.append(first + count)
        self._blocks += 1
        if self._blocks > self._blocks_max:
            # Of the one that has most: who asks for many takes nothing from others.
            starts, stops = max(self._tokens.values(), key=lambda one: len(one[0]))
            half = len(starts) // 2 + 1
            del starts[:half], stops[:half]
            self._blocks -= half

    def has(self, token: str, timestamp: int) -> bool:
        found = self._tokens.get(token)
        if found is None:
            return False
        firsts, ends = found
        at = bisect_right(firsts, timestamp) - 1
        return at >= 0 and timestamp < ends[at]


class OracleHandler:
    """`percolator.v1.OracleService`."""

    def __init__(self, candidacy: Candidacy[Oracle]) -> None:
        self._candidacy = candidacy
        self._handed_out = HandedOut()

    async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        count, oracle = request.count, self._candidacy.term
        if oracle is None:
            oracle = self._candidacy.serving()  # which says who leads
        caller, token = caller_identity(), request.token
        if token and caller.role != Role.SERVER:
            raise PermissionDenied("only servers ask for timestamps for another caller")
        if caller.rights is not None:
            token = caller.name
        first = await oracle.get_timestamps(count)
        if token:
            self._handed_out.note(token, first, count)
        return GetTimestampsResponse(
            first=first, count=count, catalogue_epoch=oracle.catalogue_epoch
        )

    async def advance_epoch(self, request: AdvanceEpochRequest) -> AdvanceEpochResponse:
        epoch = await self._candidacy.serving().advance_epoch(request.catalogue_epoch)
        return AdvanceEpochResponse(catalogue_epoch=epoch)

    async def check_timestamps(self, request: CheckTimestampsRequest) -> CheckTimestampsResponse:
        # A former leader does not know what the present one has handed out.
        await self._candidacy.serving().check_may_answer()
        has = self._handed_out.has
        return CheckTimestampsResponse(
            handed_out=[has(request.token, one) for one in request.timestamps]
        )
