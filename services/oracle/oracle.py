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
from collections import Counter
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from percolator.errors import (
    InvalidArgument,
    NotReady,
    PercolatorError,
    StoreUnusable,
    UsageError,
)
from percolator.services.oracle.allocator import Allocator
from percolator.services.oracle.physical_time import LEADING_SPEED, PhysicalTime
from percolator.timestamps import TIMESTAMPS_PER_REQUEST_MAX
from percolator.world import Clock

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


class DurableMark(Protocol):
    """Keeps the mark, which is above the physical part of every timestamp ever handed out."""

    @property
    def mark_milliseconds(self) -> int: ...

    @property
    def epoch(self) -> int:
        """The catalogue's epoch: durable, too."""
        ...

    async def advance_epoch(self, epoch: int) -> None:
        """Returns when an epoch at least as high is durable. Raises as `write`."""
        ...

    async def write(self, milliseconds: int) -> None:
        """Returns when the mark is durable. `StoreUnusable` means that it may or may not be,
        `NotReady` that another oracle leads."""
        ...


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
    """Hands out timestamps once `extend` has succeeded; `keep_extended` has to run beside it."""

    def __init__(
        self,
        clock: Clock,
        mark: DurableMark,
        may_answer: Callable[[], Awaitable[bool]],
        limits: OracleLimits,
        counts: OracleCounts | None = None,
        *,
        begin_milliseconds: int | None = None,
    ) -> None:
        """Time begins at `begin_milliseconds`, which is not below the mark. Without it, the wall
        clock is trusted: a jump of that clock looks like a long stop of the oracle."""
        self._clock = clock
        self._mark = mark
        self._may_answer = may_answer
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
            await self._check_may_answer()
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
        await self._check_may_answer()
        await self._mark.advance_epoch(epoch)
        await self._check_may_answer()
        return self._mark.epoch

    async def extend(self) -> None:
        """Makes a higher mark durable and opens the window up to it, or raises `StoreUnusable`."""
        try:
            await self._check_may_answer()
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
                    await self._check_may_answer()
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

    async def _check_may_answer(self) -> None:
        if self._is_deposed or not await self._may_answer():
            self._is_deposed = True
            raise NotReady("this oracle has lost its store, or another oracle has taken its place")

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
