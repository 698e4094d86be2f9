"""Space on the disk: refuses writes before it runs out, and accepts them again without help.

LevelDB needs some space to delete data (compaction writes before it deletes), and even to open.
Thanks to a reserve, writes to a full disk get a refusal that is safe to repeat, instead of failing
with an unknown outcome, and reads continue.

Half of the reserve is for roll-backs, of a few bytes each. Without them a client could not say
whether a transaction that met the full disk is aborted, and its locks would stay.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from structlog.stdlib import BoundLogger

from percolator.errors import StoreFault, StoreUnusable
from percolator.services.chassis.coordinator import Trouble
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_ROLLBACK
from percolator.world import Clock

CHECK_SECONDS = 1.0


class DiskSpace:
    """Watches the free bytes of one disk. Lives on one event loop."""

    def __init__(
        self,
        free_bytes: Callable[[], Awaitable[int]],
        clock: Clock,
        log: BoundLogger,
        *,
        reserve_bytes: int,
        store_trouble: Callable[[], str] = lambda: "",
    ) -> None:
        """`store_trouble` says why nothing can be written at the moment, for another reason than
        the reserve; it is empty while something can."""
        self._free_bytes = free_bytes
        self._clock = clock
        self._log = log
        self._reserve_bytes = reserve_bytes
        self.store_trouble = store_trouble
        self._trouble = Trouble(
            log, "the free space of the disk is unknown", "the free space of the disk is known"
        )
        self.bytes_free = 0
        self.full: StoreUnusable | None = None
        """The error with which writes are refused; None while there is space."""

    def refuses(self, mutation: pb.Mutation) -> bool:
        """Whether there is no room for this mutation."""
        if self.full is None:
            return False
        if self.bytes_free < self._reserve_bytes // 2:
            return bool(mutation.changes)
        return not all(map(_frees_or_marks, mutation.changes))

    def trouble(self) -> StoreUnusable | None:
        """Why the server can store nothing; None while it can."""
        if self.full is None and (trouble := self.store_trouble()):
            return StoreUnusable(trouble, fault=StoreFault.INPUT_OUTPUT)
        return self.full

    async def check(self) -> None:
        """Checks once."""
        was_full = self.full is not None
        self.bytes_free = await self._free_bytes()
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
        """Checks every second. Never returns."""
        while True:
            await self._clock.sleep(CHECK_SECONDS)
            try:
                await self.check()
            except OSError as error:
                # Whether the store is gone is for the watch of the store to decide.
                self._trouble.lasts(error)
            else:
                self._trouble.is_over()


def _frees_or_marks(change: pb.Change) -> bool:
    """Whether it deletes something, or is a roll-back marker."""
    return change.kind != pb.Change.KIND_PUT or (
        change.space == SPACE_ROLLBACK and not change.value
    )
