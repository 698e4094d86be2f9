"""Work that goes on after its caller was answered: other cells to commit, or to roll back.

Nothing depends on it. Whatever is not done when the process ends is done by whoever meets the
locks. It is bounded: with too much of it, committers do their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from percolator.errors import PercolatorError

_log = logging.getLogger(__name__)

R = TypeVar("R")


class Background:
    """The tasks of one client."""

    def __init__(self, tasks_max: int) -> None:
        self._tasks_max = tasks_max
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """In the order in which they began, which is the one in which they are given up."""

    @property
    def full(self) -> bool:
        return len(self._tasks) >= self._tasks_max

    def start(self, work: Coroutine[None, None, R]) -> asyncio.Task[R]:
        """Whoever waits for the task must not cancel it: its time to end is `drain`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, PercolatorError):
            _log.warning("left to whoever meets the locks: %s", error)
        elif error is not None:
            _log.error("failed in the background", exc_info=error)

    async def drain(self, timeout_seconds: float) -> None:
        """Waits for what is going on, and what that begins, then gives up the rest."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while self._tasks and loop.time() < deadline:
            await asyncio.wait(list(self._tasks), timeout=deadline - loop.time())
        unfinished = list(self._tasks)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)
