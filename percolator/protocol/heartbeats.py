"""Keeping long commits alive.

A lock's time to live is short, so that a dead owner holds others up for seconds only. While its
owner is alive and committing, the primary's time to live is raised every second; the time to live
of the other locks does not matter. One timer serves all commits of a client, since most end before
it fires.
"""

from __future__ import annotations

import asyncio

from percolator.protocol.commit_point import CommitPoint
from percolator.protocol.environment import Environment

ATTEMPTS_PER_BEAT_MAX = 4
"""A reader that pushes the lock makes a heartbeat fail. The next one has a longer lead."""


class Heartbeats:
    """The commits in progress."""

    def __init__(self, env: Environment) -> None:
        self._env = env
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
        self._timer = loop.call_later(self._env.limits.heartbeat_seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._points:
            self._env.background.start(self._beat())
            self._wait()

    async def _beat(self) -> None:
        env, limits = self._env, self._env.limits
        now = env.now()
        due = [point for point in self._points if point.wants_heartbeat(now)]
        # The next beat repeats one that gets no answer: there are two in each time to live.
        deadline = now + limits.heartbeat_seconds
        for _ in range(ATTEMPTS_PER_BEAT_MAX):
            if not due:
                return
            beats = [point.heartbeat() for point in due]
            began = env.now()
            answers = await env.cells.mutate([beat.step for beat in beats], deadline)
            took = env.now() - began
            # A refused heartbeat is sent again at once. If it waited for the next beat, one reader
            # a second, each pushing the lock, would be enough to let a live owner's lock expire.
            due = [
                point
                for point, beat, answer in zip(due, beats, answers, strict=True)
                if point.after_heartbeat(beat, answer, took) and point in self._points
            ]
