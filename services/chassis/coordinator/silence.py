"""How long others have been silent, by the time during which this process was running.

A reader judges by its own clock, and by what has changed. One that has just started takes everybody
for alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from percolator.services.chassis.lived_time import LivedTime, milliseconds_between
from percolator.world import Clock

_FORGET_FACTOR = 20
"""A session that was silent for this many grace periods is removed."""


class Silence:
    """Measures how long nothing has changed."""

    def __init__(self, clock: Clock, grace_seconds: float) -> None:
        self._time = LivedTime(clock)
        self._grace_milliseconds = round(grace_seconds * 1000)
        self._last: object = None
        self._changed = 0

    def lasts(self, seen: object) -> bool:
        """Whether `seen` has been the same for the whole grace period."""
        now = self._time.tick()
        if seen != self._last:
            self._last, self._changed = seen, now
        return milliseconds_between(self._changed, now) > self._grace_milliseconds


@dataclass
class Judged:
    """What follows from one look at the sessions."""

    alive: dict[str, bytes] = field(default_factory=dict)
    """By name, as they were found."""
    forgotten: list[str] = field(default_factory=list)
    """Silent for so long that they are to be removed."""


@dataclass
class _Seen:
    content: bytes
    changed: int


class SilentSessions:
    """What one reader knows about all sessions, each of which changes while its owner lives."""

    def __init__(self, clock: Clock, grace_seconds: float) -> None:
        self._time = LivedTime(clock)
        self._grace_milliseconds = round(grace_seconds * 1000)
        self._seen: dict[str, _Seen] = {}

    def tick(self) -> int:
        """The time of a look that begins now."""
        return self._time.tick()

    def judge(self, now: int, prefix: str, found: Mapping[str, bytes]) -> Judged:
        """`found` is all sessions with names of that prefix, at a look that began `now`."""
        self._seen = {
            name: seen
            for name, seen in self._seen.items()
            if name in found or not name.startswith(prefix)
        }
        judged = Judged()
        for name, content in found.items():
            seen = self._seen.get(name)
            if seen is None or seen.content != content:
                seen = self._seen[name] = _Seen(content, now)
            silence = milliseconds_between(seen.changed, now)
            if silence <= self._grace_milliseconds:
                judged.alive[name] = content
            elif silence > _FORGET_FACTOR * self._grace_milliseconds:
                judged.forgotten.append(name)
        return judged
