"""Refuses timestamps that the oracle cannot have handed out yet, and never one that it has.

One timestamp from the future that is taken for real would block its cell, and every reader of it,
until that time comes. The oracle decides what is too far ahead, never this machine's clock: with a
clock that differs, the guard would refuse what the oracle has just handed out. All tablets of a
server share one guard, so a new tablet knows as much as an old one.

What the guard has heard may be old, and a timestamp far above it may have been handed out a
microsecond ago. So before the guard refuses a timestamp, it asks the oracle for one. The oracle's
timestamps only increase, so everything that was handed out before the request lies below the
answer. While the oracle does not answer, nothing is known, and the caller is told to retry.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from percolator.errors import InvalidArgument, NotReady, PercolatorError
from percolator.timestamps import SEQUENCE_BITS, Timestamp
from percolator.world import Clock

LEAD_MILLISECONDS = 3_600_000
"""A timestamp may lie this far above the newest known one without asking the oracle."""

_RETRY_SECONDS = 0.1

T = TypeVar("T")


class UnheardTimestamp(Exception):
    """The oracle must be asked before this timestamp is admitted. Nothing was executed."""

    def __init__(self, timestamp: int, field: str) -> None:
        super().__init__(timestamp, field)
        self.timestamp = timestamp
        self.field = field


class TimestampGuard:
    """Admits timestamps that do not lie far above what the oracle has handed out."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[int]],
        clock: Clock,
        *,
        lead_milliseconds: int = LEAD_MILLISECONDS,
    ) -> None:
        """`ask` returns a timestamp that the oracle handed out after the call."""
        self._ask = ask
        self._clock = clock
        self._lead = lead_milliseconds << SEQUENCE_BITS
        self._newest = 0
        self._heard_at = 0.0
        self.admitted_to = self._lead
        """Timestamps up to this one need no further check."""
        self.requests = 0
        """How often the oracle had to be asked."""
        self.refused = 0
        """Refused timestamps: the oracle had not handed them out."""

    @classmethod
    def by_own_clock(cls, clock: Clock) -> TimestampGuard:
        """For a tablet without a cluster: there is no oracle to ask."""

        async def wall_clock() -> int:
            return clock.wall_milliseconds() << SEQUENCE_BITS

        return cls(wall_clock, clock)

    def heard(self, timestamp: int) -> None:
        """Notes a timestamp that the oracle has handed out, as reported by it or by the master."""
        if timestamp > self._newest:
            self._newest = timestamp
            self._heard_at = self._clock.monotonic_seconds()
            self.admitted_to = max(self.admitted_to, timestamp + self._lead)

    def admit(self, timestamp: int, field: str, *places: int) -> None:
        """Raises `UnheardTimestamp` when the oracle has to be asked; catch it with `checked`.

        Called for each mutation: the field's `places` are written into it only when it fails.
        """
        if timestamp > self.admitted_to:
            raise UnheardTimestamp(timestamp, field % places)

    def check_read(self, timestamp: int, field: str, *places: int) -> None:
        """Like `admit`, for a timestamp that is required."""
        if not timestamp:
            raise InvalidArgument(field % places, "missing")
        if timestamp > self.admitted_to:
            raise UnheardTimestamp(timestamp, field % places)

    async def checked(self, check: Callable[[], T]) -> T:
        """Returns what `check` returns, once none of the timestamps that it meets is in doubt.

        It runs again after each request, so it must not have done anything when it raises.
        """
        while True:
            try:
                return check()
            except UnheardTimestamp as unheard:
                await self.settle(unheard)

    async def require(self, timestamp: int, field: str) -> None:
        """Returns once the timestamp may be used. Raises like `settle`."""
        if timestamp > self.admitted_to:
            await self.settle(UnheardTimestamp(timestamp, field))

    async def settle(self, unheard: UnheardTimestamp) -> None:
        """Returns once the timestamp is admitted. Raises `InvalidArgument` if the oracle cannot
        have handed it out, and `NotReady` while the oracle does not answer."""
        timestamp = unheard.timestamp
        self._let_time_pass()
        if timestamp <= self.admitted_to:
            return
        self.requests += 1
        try:
            answer = await self._ask()
        except PercolatorError as error:
            if timestamp <= self.admitted_to:
                return  # the master has reported it meanwhile
            raise NotReady(
                f"cannot tell whether the oracle has handed out {_named(timestamp)}: it does not "
                f"answer this server, last error: {error.message}",
                retry_after_seconds=_RETRY_SECONDS,
            ) from error
        self.heard(answer)
        if timestamp > self.admitted_to:
            self.refused += 1
            ahead = (timestamp >> SEQUENCE_BITS) - (self._newest >> SEQUENCE_BITS)
            raise InvalidArgument(
                unheard.field,
                f"{_named(timestamp)} was not handed out by the oracle: it lies "
                f"{ahead / 1000:.0f} s above {_named(self._newest)}, which was handed out later",
            )

    def _let_time_pass(self) -> None:
        """Advances the newest known timestamp while nothing is heard from the oracle. Its time
        still passes, so a server cut off from it and from the master keeps serving."""
        if self._newest:
            elapsed = int((self._clock.monotonic_seconds() - self._heard_at) * 1000)
            expected = self._newest + (elapsed << SEQUENCE_BITS)
            self.admitted_to = max(self.admitted_to, expected + self._lead)


def _named(timestamp: int) -> str:
    return f"{timestamp} ({Timestamp(timestamp).describe()})"
