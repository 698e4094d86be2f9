"""Checks all the time whether a row store still answers, and is still that of this cluster.

A store that does not answer may come back: until it does, the process reports that it does not
serve. One that has lost this cluster's identity, or has another, does not come back: somebody
deleted its tables, or started an empty emulator in its place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from structlog.stdlib import BoundLogger

from percolator.errors import StoreUnusable
from percolator.services.chassis.store_kinds.row_identity import RowIdentity
from percolator.world import Clock

LOOK_SECONDS = 1.0
STALLED_SECONDS = 5.0


class RowStoreWatch:
    """Watches one store. Belongs to one event loop; `run` has to run as a task."""

    def __init__(
        self,
        look: Callable[[], Awaitable[RowIdentity | None]],
        expected: RowIdentity,
        name: str,
        clock: Clock,
        log: BoundLogger,
        *,
        stalled: Callable[[bool], None],
        gone: Callable[[str], None],
    ) -> None:
        """`stalled` is called when the store falls silent and when it answers again; `gone` once,
        with the reason."""
        self._look = look
        self._expected = expected
        self._name = name
        self._clock = clock
        self._log = log
        self._stalled = stalled
        self._gone = gone
        self._silent_since: float | None = None
        self.trouble = ""
        """Why nothing can be written at the moment; empty while it can."""

    async def run(self) -> None:
        """Returns when the store is gone."""
        while True:
            try:
                found = await self._look()
            except StoreUnusable as error:
                self._silent(error)
            else:
                if found != self._expected:
                    whose = "no cluster" if found is None else f"cluster {found.cluster_id}"
                    self._gone(
                        f"{self._name} now belongs to {whose}: its tables were deleted, or an "
                        "empty emulator was started in its place"
                    )
                    return
                self._answered()
            await self._clock.sleep(LOOK_SECONDS)

    def _silent(self, error: StoreUnusable) -> None:
        now = self._clock.monotonic_seconds()
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= STALLED_SECONDS and not self.trouble:
            self._log.error("the store does not answer", store=self._name, error=str(error))
            self.trouble = str(error)
            self._stalled(True)

    def _answered(self) -> None:
        self._silent_since = None
        if self.trouble:
            self.trouble = ""
            self._log.info("the store answers again", store=self._name)
            self._stalled(False)
