"""What a coordinator does for its own process, alike in both back ends.

It knows what the process leads and which sessions it has opened, and ends all of it at the end. A
value is watched by reading it again: neither back end can be told of a change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Generic, Protocol, TypeVar

import structlog

from percolator.services.chassis.coordinator.beating_session import BeatingSession, SessionPlace
from percolator.services.chassis.coordinator.times import CoordinatorTimes
from percolator.world import Clock

_log = structlog.get_logger("percolator.coordinator")


class Led(Protocol):
    """A leadership of this process."""

    @property
    def epoch(self) -> int: ...

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and nothing of it is left to do."""
        ...

    async def resign(self) -> None: ...


LedT = TypeVar("LedT", bound=Led)


class OwnProcess(ABC, Generic[LedT]):
    """The roles and sessions of one process. Belongs to one event loop."""

    def __init__(self, clock: Clock, times: CoordinatorTimes) -> None:
        self._clock = clock
        self._times = times
        self._open: list[BeatingSession] = []
        self._led: list[LedT] = []
        """Those that may still stand, or have not noticed yet that they do not."""

    @abstractmethod
    async def read(self, role: str, key: str) -> bytes | None:
        """See `Coordinator.read`."""

    async def watch(self, role: str, key: str) -> AsyncGenerator[bytes | None, None]:
        last = await self.read(role, key)
        yield last
        while True:
            await self._clock.sleep(self._times.poll_seconds)
            value = await self.read(role, key)
            if value != last:
                last = value
                yield value

    def _leads(self, role: str, leadership: LedT) -> LedT:
        """Notes that this process leads from now on."""
        self._led = [former for former in self._led if not former.is_over]
        self._led.append(leadership)
        _log.info("leading", role=role, epoch=leadership.epoch)
        return leadership

    async def _begin_session(self, place: SessionPlace, name: str, value: bytes) -> BeatingSession:
        session = BeatingSession(
            place, self._clock, name, value, beat_seconds=self._times.beat_seconds
        )
        await session.begin()
        self._open.append(session)
        return session

    async def close(self) -> None:
        for session in self._open:
            await session.close()
        for leadership in self._led:
            await leadership.resign()
        self._open.clear()
        self._led.clear()
