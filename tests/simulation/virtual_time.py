"""An event loop whose time costs nothing: when nothing can run, it jumps to the next timer.

A test that waits for a lease of an hour to expire takes microseconds, and takes the same course
every time: it has no threads, no sockets and no wall clock.
"""

from __future__ import annotations

import asyncio
from asyncio import base_events
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeftToHappen(RuntimeError):
    """Every task waits for something that no timer and no other task will bring about."""


class _JumpingSelector:
    """Takes the place of an event loop's selector, which waits for sockets: it moves the clock."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise NothingLeftToHappen("every task waits, and no timer is set: a deadlock")
        self._loop.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(base_events.BaseEventLoop):
    """An asyncio event loop on virtual time, which begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector = _JumpingSelector(self)
        # Two timers closer than this fire together; virtual time has no jitter to absorb.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no sockets, so there are no events."""

    def _write_to_self(self) -> None:
        """Does nothing: no other thread may touch this loop, so it never needs waking."""


WALL_MILLISECONDS = 1_800_000_000_000
"""Wall-clock time when virtual time begins, unless set otherwise: in January 2027."""


class VirtualClock:
    """The clock of one simulated machine. Only its wall clock can be set."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, wall_milliseconds: int = WALL_MILLISECONDS
    ) -> None:
        self._loop = loop
        self._wall_offset_milliseconds = wall_milliseconds - int(loop.time() * 1000)

    def wall_milliseconds(self) -> int:
        return self._wall_offset_milliseconds + int(self._loop.time() * 1000)

    def monotonic_seconds(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def set_wall_back(self, milliseconds: int) -> None:
        """Sets the clock back, as an operator or a time server may do at any time. A negative
        number sets it forward."""
        self._wall_offset_milliseconds -= milliseconds


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` on a fresh virtual-time loop, and cancels what it left running."""
    loop = VirtualTimeLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
