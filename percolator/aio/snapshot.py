"""A snapshot: reads only, at one timestamp, of the present or of the past."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import datetime
from types import TracebackType
from typing import Any

from percolator.aio.engine import Engine
from percolator.aio.reading import Reading
from percolator.errors import InvalidArgument, UsageError
from percolator.protocol.scan import settled_cells
from percolator.schema import Table
from percolator.timestamps import Timestamp
from percolator.wire.questions import CellPage, RangeQuestion


class Snapshot(Reading):
    """Shows the store as it was at its timestamp, however much is written meanwhile.

    >>> async with db.snapshot() as snapshot:
    ...     print(await snapshot.get("bob", balance))
    """

    def __init__(
        self, engine: Engine, at: Timestamp | datetime | None, timeout_seconds: float | None
    ) -> None:
        super().__init__(engine, timeout_seconds)
        self._at = None if at is None else as_timestamp(at)

    async def scan_cells(
        self,
        table: Table[Any],
        *,
        start: bytes = b"",
        end: bytes = b"",
        columns: Sequence[bytes] | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[CellPage, None]:
        """The cells of a range of rows as they are stored, for whoever moves many of them.

        An empty `end` means to the last row. The time-out is that of each page.
        """
        deadline = self._deadline(timeout)
        info = await self._info(table, deadline)
        begun = self._start or await self._begin(deadline)
        names = None if columns is None else tuple(columns)
        question = RangeQuestion(info.table_id, start, end, names, begun)
        seconds = timeout or self._timeout_seconds
        engine = self._engine
        async with aclosing(engine.router.scan_cells(question, seconds)) as pages:
            async for page in pages:
                self._require_open()
                self.statistics.round_trips += 1
                yield await settled_cells(
                    engine.around, engine.cleanup, question, page, seconds, self.statistics
                )

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


def as_timestamp(at: object) -> Timestamp:
    """A moment of the past, as programs name it.

    A datetime is the first timestamp of its millisecond: what was committed in that millisecond is
    not seen, and what was committed before it is.
    """
    if isinstance(at, datetime):
        return Timestamp.from_datetime(at)
    if isinstance(at, int) and not isinstance(at, bool):
        if at == 0:
            raise InvalidArgument("at", "0 is before every commit: there is nothing to see")
        return Timestamp(at)
    raise UsageError(f"at: expected a Timestamp or a datetime, got {type(at).__name__}")
