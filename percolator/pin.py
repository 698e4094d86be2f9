"""A pin, for programs without asyncio."""

from __future__ import annotations

from types import TracebackType

from percolator import aio
from percolator.loop_thread import LoopCalls
from percolator.timestamps import Timestamp


class Pin:
    """What was readable at its timestamp stays readable, from its block's beginning to its end.

    >>> with db.pin(at=yesterday) as pin, db.snapshot(at=pin.at) as snapshot: ...
    """

    def __init__(self, loop_thread: LoopCalls, pin: aio.Pin) -> None:
        self._loop_thread = loop_thread
        self._pin = pin

    @property
    def at(self) -> Timestamp:
        """From here on nothing is collected."""
        return self._pin.at

    @property
    def is_lost(self) -> bool:
        """Whether somebody has released it, or it was not renewed in time."""
        return self._pin.is_lost

    def check(self) -> None:
        """Raises `SessionExpired` once somebody has released it, or it was not renewed in time."""
        self._pin.check()

    def close(self) -> None:
        """Lets go of history. Twice is harmless."""
        self._loop_thread.call(self._pin.close)

    def __enter__(self) -> Pin:
        self._loop_thread.call(self._pin.set)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
