"""One timer for all that a client keeps alive for shared transactions."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from percolator.errors import PercolatorError
from percolator.protocol.environment import Environment
from percolator.tasks import Tasks

_log = logging.getLogger(__name__)


class Beating(Protocol):
    """What has to be kept alive."""

    async def beat(self) -> None:
        """Raises its time to live. Raises only a `PercolatorError`, which is logged."""
        ...


class Beats:
    """Calls `beat` of everything added, once in every interval of heartbeats, or when the beat
    before has ended."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._beating: dict[Beating, asyncio.Task[None] | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks()

    def add(self, one: Beating) -> None:
        self._beating[one] = None
        if self._timer is None:
            self._wait()

    def discard(self, one: Beating) -> None:
        task = self._beating.pop(one, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        self._beating.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._tasks.cancel()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._env.limits.heartbeat_seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._beating:
            return
        for one, task in self._beating.items():
            if task is None or task.done():
                self._beating[one] = self._tasks.start(self._beat(one))
        self._wait()

    async def _beat(self, one: Beating) -> None:
        try:
            await one.beat()
        except PercolatorError as error:
            _log.debug("a part of a shared transaction was not kept alive: %s", error)
