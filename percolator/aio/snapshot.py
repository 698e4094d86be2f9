"""A snapshot: reads only, at one timestamp, of the present or of the past."""

from __future__ import annotations

from datetime import datetime
from types import TracebackType

from percolator.aio.engine import Engine
from percolator.aio.reading import Reading
from percolator.errors import UsageError
from percolator.timestamps import Timestamp


class Snapshot(Reading):
    """Shows the store as it was at its timestamp, however much is written meanwhile.

    >>> async with db.snapshot() as snapshot:
    ...     print(await snapshot.get("bob", balance))
    """

    def __init__(
        self, engine: Engine, at: Timestamp | datetime | None, timeout_seconds: float | None
    ) -> None:
        super().__init__(engine, timeout_seconds)
        self._at = None if at is None else _as_timestamp(at)

    async def close(self) -> None:
        """Lets go of history: from now on it may be collected."""
        self._end()

    def _end(self) -> None:
        self._ended = "closed"
        self._over = True
        if self._start:
            self._engine.open_starts.discard(self)

    async def __aenter__(self) -> Snapshot:
        self._require_open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def __del__(self) -> None:
        if self._start and not self._ended:
            self._engine.open_starts.discard(self)


def _as_timestamp(at: object) -> Timestamp:
    if isinstance(at, datetime):
        return Timestamp.from_datetime(at)
    if isinstance(at, int) and not isinstance(at, bool):
        return Timestamp(at)
    raise UsageError(f"at: expected a Timestamp or a datetime, got {type(at).__name__}")
