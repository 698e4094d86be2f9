"""Checks all the time whether the store still answers, independently of everything else.

A store that hangs may come back. Until it does, the process reports that it does not serve, and
everything that needs no store continues. A store that is gone does not come back for this process:
its file system was shut down, the program behind it has died, or its disk does nothing but fail.
Then the process has to end with a reason: a leader or an owner that can do nothing would otherwise
keep its place for as long as it lived.

A store that was unmounted is gone as well. Its files may stay open, but every path leads elsewhere:
to nothing, to the directory below the mount point, or to what was mounted in its place.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

from structlog.stdlib import BoundLogger

from percolator.services.chassis.files import Files, FileStatus
from percolator.world import Clock

LOOK_SECONDS = 1.0
STALLED_SECONDS = 5.0
PROBE = ".probe"
"""A file in the store root that every process writes again and again. Its content is unused."""

_PIECES = 5
"""In so many pieces this is waited for."""

LASTING_SECONDS = 10.0
"""Input and output that has failed for this long will not work again by itself."""

_SYNCED_LOOKS = 5
"""One in this many checks waits for the disk: otherwise memory may answer for a dead disk."""

_GONE = frozenset({errno.ESHUTDOWN, errno.ENOTCONN})
"""The file system was shut down, or the program behind it has died: even if something is mounted
there again, this one does not come back."""


class StoreReplaced(Exception):
    """The path of the store leads elsewhere than at the start of the process."""


class StoreWatch:
    """Watches one store. Belongs to one event loop; `run` has to run as a task."""

    def __init__(
        self,
        files: Files,
        root: Path,
        clock: Clock,
        log: BoundLogger,
        *,
        stalled: Callable[[bool], None],
        gone: Callable[[str], None],
    ) -> None:
        """`stalled` is called when the store begins to hang and when it answers again; `gone` once,
        with the reason."""
        self._files = files
        self._root = root
        self._clock = clock
        self._log = log
        self._stalled = stalled
        self._gone = gone
        self._looks = 0
        self._first: FileStatus | None = None
        """The store root as it was first seen."""
        self._failing_since: float | None = None
        self.trouble = ""
        """Why nothing can be written now; empty while it can."""

    async def run(self) -> None:
        """Returns when the store is gone."""
        while (reason := await self._look()) is None:
            await self._clock.sleep(LOOK_SECONDS)
        self._gone(reason)

    async def _look(self) -> str | None:
        """Why the store is gone; None while it may not be."""
        try:
            await self._patiently()
        except StoreReplaced as error:
            return str(error)
        except OSError as error:
            self.trouble = f"the store cannot be written: {error}"
            return self._judged(error)
        self._failing_since = None
        self.trouble = ""
        return None

    def _judged(self, error: OSError) -> str | None:
        if error.errno in _GONE:
            return str(error)
        if error.errno != errno.EIO:
            # Full, or not writable: writers get that error, and what is stored can be read.
            self._failing_since = None
            return None
        now = self._clock.monotonic_seconds()
        if self._failing_since is None:
            self._failing_since = now
            self._log.warning("the store fails", store=str(self._root), error=str(error))
        seconds = now - self._failing_since
        return f"{error}, for {seconds:.0f} s" if seconds >= LASTING_SECONDS else None

    async def _patiently(self) -> None:
        """Makes one check and waits for its end, which may take long."""
        looking = asyncio.create_task(self._probe())
        try:
            if await self._is_done_in_time(looking):
                return await looking
            self._log.error("the store hangs", store=str(self._root), seconds=STALLED_SECONDS)
            self.trouble = f"the store hangs: {self._root} gives no answer"
            self._stalled(True)
            try:
                return await looking
            finally:
                self._stalled(False)
                self._log.info("the store answers again", store=str(self._root))
        finally:
            looking.cancel()

    async def _is_done_in_time(self, looking: asyncio.Task[None]) -> bool:
        """Waits piece by piece: if this process is paused (SIGSTOP, a suspended machine), only one
        piece is over afterwards, and the store is not blamed for the pause."""
        for _ in range(_PIECES):
            waiting = asyncio.create_task(self._clock.sleep(STALLED_SECONDS / _PIECES))
            try:
                await asyncio.wait({looking, waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
            if looking.done():
                return True
        return False

    async def _probe(self) -> None:
        self._looks += 1
        # First of all, so that nothing is written into what is not the store.
        await self._require_the_same()
        async with await self._files.create(self._root / PROBE, exclusive=False) as file:
            await file.append(b".")
            if self._failing_since is not None or self._looks % _SYNCED_LOOKS == 0:
                await file.fsync()

    async def _require_the_same(self) -> None:
        try:
            found = await self._files.stat(self._root)
        except FileNotFoundError:
            raise StoreReplaced(f"{self._root} is no longer there; was it unmounted?") from None
        first = self._first = self._first or found
        if (found.inode, found.device) != (first.inode, first.device):
            raise StoreReplaced(
                f"{self._root} is no longer the directory that it was at the start; was it "
                "unmounted, or something else mounted there?"
            )
