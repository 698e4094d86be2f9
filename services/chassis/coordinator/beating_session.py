"""A session: a value that its owner writes again and again, each time with a new count.

Others see by the count that the owner is alive. One that has not changed for the grace period is
silent.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Protocol

import structlog

from percolator.errors import PercolatorError
from percolator.services.chassis.trouble import Trouble
from percolator.world import Clock

_COUNT_BYTES = 8
_log = structlog.get_logger("percolator.coordinator")


class SessionPlace(Protocol):
    """Where one session is written: a file or a row. Fails with `OSError` or `PercolatorError`."""

    async def put(self, content: bytes) -> None: ...

    async def remove(self) -> None: ...


class BeatingSession:
    """A session that is written until it is closed."""

    def __init__(
        self, place: SessionPlace, clock: Clock, name: str, value: bytes, *, beat_seconds: float
    ) -> None:
        self._place = place
        self._clock = clock
        self._name = name
        self._value = value
        self._beat_seconds = beat_seconds
        self._counts = itertools.count(1)
        self._beating: asyncio.Task[None] | None = None
        self._trouble = Trouble(_log, "session not renewed", "session renewed again", session=name)

    async def begin(self) -> None:
        await self._beat()
        self._beating = asyncio.create_task(self._keep_beating(), name=f"session {self._name}")

    async def close(self) -> None:
        beating, self._beating = self._beating, None
        if beating is None:
            return
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        try:
            await self._place.remove()
        except (OSError, PercolatorError) as error:
            # The session becomes silent instead.
            _log.info("session not removed", session=self._name, error=str(error))

    async def _keep_beating(self) -> None:
        while True:
            await self._clock.sleep(self._beat_seconds)
            try:
                await self._beat()
            except (OSError, PercolatorError) as error:
                self._trouble.lasts(error)
            else:
                self._trouble.is_over()

    async def _beat(self) -> None:
        count = next(self._counts).to_bytes(_COUNT_BYTES, "big")
        await self._place.put(count + self._value)


def value_of(content: bytes) -> bytes:
    """The value that a session was opened with."""
    return content[_COUNT_BYTES:]
