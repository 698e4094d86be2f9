"""What may happen to a message, and how often it happened.

All probabilities are per message (a call is a request and a reply) and drawn from one `Random`, so
the seed decides everything. Every fault that strikes is counted: a run without faults proves
nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from percolator.errors import InvalidArgument
from percolator.world import Random


class Fault(Enum):
    """A fault; its value is the name under which it is counted."""

    SLOW = "message slow"
    REORDERED = "message overtaken"
    DUPLICATED = "request duplicated"
    REQUEST_DROPPED = "request dropped"
    REPLY_DROPPED = "reply dropped"
    BROKEN_BEFORE = "connection broken before the request arrived"
    BROKEN_AFTER = "connection broken after the request arrived"
    CUT_OFF = "message lost in a partition"
    SLOW_LINK = "message on a slow link"
    REFUSED = "connection refused"
    GIVEN_UP = "call given up by its caller"
    CRASH = "process crash"
    PAUSE = "process pause"
    RESTART = "process restart"

    __hash__ = object.__hash__
    """By identity: each member exists once. Every second message is counted, and Enum's own hash is
    slow."""


FaultCounts = Counter[Fault]


@dataclass(frozen=True)
class NetworkFaults:
    """How bad the network is. The default is a good one, with ordinary delays."""

    delay_seconds_min: float = 0.0002
    delay_seconds_max: float = 0.001
    slow: float = 0.0
    """Probability of a delay of up to `slow_seconds_max`: the source of late arrivals."""
    slow_seconds_max: float = 5.0
    duplicate: float = 0.0
    """Probability that a request arrives twice, the second time later."""
    drop_request: float = 0.0
    """Probability that a request is lost, and its caller waits for its time-out."""
    drop_reply: float = 0.0
    break_connection: float = 0.0
    """Probability that the caller is told at once that the connection broke, while the request
    may or may not have been executed."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay_seconds_min <= self.delay_seconds_max:
            raise InvalidArgument("delay_seconds_min", "expected 0 <= min <= max")
        for name in ("slow", "duplicate", "drop_request", "drop_reply", "break_connection"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgument(name, "expected a probability, 0 to 1")
        for limits in (self._request_limits, self._reply_limits):
            if limits and limits[-1][0] > 1:
                raise InvalidArgument("faults", "expected probabilities that add up to at most 1")

    @cached_property
    def _request_limits(self) -> tuple[tuple[float, Fault], ...]:
        half = self.break_connection / 2
        return _limits(
            (self.drop_request, Fault.REQUEST_DROPPED),
            (half, Fault.BROKEN_BEFORE),
            (half, Fault.BROKEN_AFTER),
            (self.duplicate, Fault.DUPLICATED),
            (self.slow, Fault.SLOW),
        )

    @cached_property
    def _reply_limits(self) -> tuple[tuple[float, Fault], ...]:
        return _limits(
            (self.drop_reply, Fault.REPLY_DROPPED),
            (self.break_connection, Fault.BROKEN_AFTER),
            (self.slow, Fault.SLOW),
        )

    def fate(self, random: Random, *, is_reply: bool) -> Fault | None:
        """What happens to a message; None if it arrives once, as it should."""
        limits = self._reply_limits if is_reply else self._request_limits
        if not limits:
            return None
        drawn = random.random()
        if drawn >= limits[-1][0]:
            return None
        return next(fault for limit, fault in limits if drawn < limit)

    def delay_seconds(self, random: Random) -> float:
        least = self.delay_seconds_min
        return least + random.random() * (self.delay_seconds_max - least)

    def long_delay_seconds(self, random: Random) -> float:
        """The delay of a slow message or a duplicate: sometimes longer than any time-out."""
        return self.delay_seconds(random) + random.random() ** 2 * self.slow_seconds_max


def _limits(*faults: tuple[float, Fault]) -> tuple[tuple[float, Fault], ...]:
    total = 0.0
    limits = []
    for probability, fault in faults:
        if probability:
            total += probability
            limits.append((total, fault))
    return tuple(limits)


PERFECT = NetworkFaults()
"""Nothing is lost, duplicated or broken."""
