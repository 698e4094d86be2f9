"""Room on the disk: writes are refused before it is quite gone, and accepted again by themselves.

LevelDB needs some room to get rid of data (compaction writes before it deletes), and even to open.
A reserve keeps a full disk a refusal that is safe to repeat, instead of failed writes of which
nobody knows the outcome, and lets reads go on.
"""

from __future__ import annotations

from collections.abc import Callable

from structlog.stdlib import BoundLogger

from percolator.errors import StoreFault, StoreUnusable
from percolator.world import Clock

CHECK_SECONDS = 1.0


class DiskSpace:
    """Watches the free bytes of one disk. Lives on one event loop."""

    def __init__(
        self,
        free_bytes: Callable[[], int],
        clock: Clock,
        log: BoundLogger,
        *,
        reserve_bytes: int,
    ) -> None:
        self._free_bytes = free_bytes
        self._clock = clock
        self._log = log
        self._reserve_bytes = reserve_bytes
        self.bytes_free = 0
        self.full: StoreUnusable | None = None
        """The refusal of every write; None while there is room."""

    def check(self) -> None:
        """Looks once."""
        was_full = self.full is not None
        self.bytes_free = self._free_bytes()
        if self.bytes_free >= self._reserve_bytes:
            self.full = None
        else:
            self.full = StoreUnusable(
                f"{self.bytes_free >> 20} MiB are free on the disk, and "
                f"{self._reserve_bytes >> 20} MiB are kept in reserve",
                fault=StoreFault.DISK_FULL,
            )
        if was_full != (self.full is not None):
            say = self._log.info if was_full else self._log.error
            say(
                "writes are accepted again" if was_full else "the disk is full: refusing writes",
                bytes_free=self.bytes_free,
                reserve_bytes=self._reserve_bytes,
            )

    async def watch(self) -> None:
        """Looks every second. Never returns."""
        while True:
            await self._clock.sleep(CHECK_SECONDS)
            self.check()
