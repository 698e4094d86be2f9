"""A pin, for programs without asyncio."""

from __future__ import annotations

from types import TracebackType

from percolator import aio
from percolator.blocking.loop_thread import LoopCalls
from percolator.timestamps import Timestamp


class Pin:
    """Keeps history for the duration of its block: what is readable at its timestamp stays so.

    >>> with db.pin(at=yesterday) as pin, db.snapshot(at=pin.at) as snapshot: ...
    """

    def __init__(self, loop_thread: LoopCalls, pin: aio.Pin) -> None:
        self._loop_thread = loop_thread
        self._pin = pin

    @property
    def at(self) -> Timestamp:
        """The timestamp that is pinned: everything readable there stays readable."""
        return self._pin.at

    @property
    def is_lost(self) -> bool:
        """Whether it was released by someone else, or not renewed in time."""
        return self._pin.is_lost

    def check(self) -> None:
        """Raises `SessionExpired` if it was released by someone else, or not renewed in time."""
        self._pin.check()

    def close(self) -> None:
        """Releases the pin. Closing twice is harmless."""
        self._loop_thread.call(self._pin.close, self._pin.close)

    def __enter__(self) -> Pin:
        self._loop_thread.call(self._pin.set, self._pin.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
