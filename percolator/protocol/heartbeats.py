"""Keeping commits alive that take long.

A lock's time to live is short, so that a dead owner holds others up for seconds only. While its
owner lives and is committing, the primary's time to live is raised every second; other locks are
never looked at for it. One timer serves all commits of a client, since most end before it rings.
"""

from __future__ import annotations

import asyncio

from percolator.protocol.commit_point import CommitPoint
from percolator.protocol.surroundings import Surroundings

ATTEMPTS_PER_BEAT_MAX = 4
"""A reader that pushes the lock makes the heartbeat fail that was built for it as it was before."""


class Heartbeats:
    """The commits in progress."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._points: dict[CommitPoint, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, point: CommitPoint) -> None:
        self._points[point] = None
        if self._timer is None:
            self._wait()

    def discard(self, point: CommitPoint) -> None:
        self._points.pop(point, None)

    def close(self) -> None:
        self._points.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._around.limits.heartbeat_seconds, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._points:
            self._around.background.start(self._beat())
            self._wait()

    async def _beat(self) -> None:
        clock, limits = self._around.clock, self._around.limits
        now = clock.monotonic_seconds()
        due = [point for point in self._points if point.wants_heartbeat(now)]
        # An unanswered one is repeated by the next: there are two in a time to live.
        deadline = now + limits.heartbeat_seconds
        for _ in range(ATTEMPTS_PER_BEAT_MAX):
            if not due:
                return
            beats = [point.heartbeat() for point in due]
            answers = await self._around.cells.mutate([step for step, _ in beats], deadline)
            # Whoever was refused is sent again at once: if it waited for the next beat, a reader
            # a second, each of which pushes the lock, would let a living owner's lock expire.
            due = [
                point
                for point, (_, ttl_milliseconds), answer in zip(due, beats, answers, strict=True)
                if point.after_heartbeat(ttl_milliseconds, answer) and point in self._points
            ]
