"""Finding work for observers: asked of the tablets that have it, or told by them as it comes.

`find_work` asks tablets what waits, one call per tablet server for all that it serves, and follows
tablets that moved or were split. `watch_work` is told of notifications as they are written: hints,
quick and incomplete; whatever a stream did not deliver is found by `find_work`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotExecuted,
    PercolatorError,
    TabletLocation,
    TabletMoved,
    Unavailable,
)
from percolator.v1 import tabletserver_pb2 as wire
from percolator.v1.cells_pb2 import Cell, RowRange
from percolator.wire.backoff import Backoff
from percolator.wire.methods import SCAN_NOTIFICATIONS
from percolator.wire.status import from_detail
from percolator.wire.tablet_map import TabletMap
from percolator.world import World

LOCKS_OF_ANY_AGE = 2**64 - 1

_SCANS_PER_CALL_MAX = 64
_ATTEMPT_SECONDS_MAX = 5.0
_RETRY_SECONDS_MIN = 0.02
_RETRY_SECONDS_MAX = 1.0


@dataclass(frozen=True)
class WorkQuestion:
    """Where to look, and for what."""

    table_id: int
    start: bytes = b""
    end: bytes = b""
    """Rows from start (included) to end (excluded); an empty end means to the last row."""
    observers: tuple[bytes, ...] = ()
    """Whose notifications; of all, if there is none."""
    locked_columns: tuple[bytes, ...] = ()
    """Locks on these are work, too: an owner that died after its commit point leaves nothing else
    behind, and resolving such a lock writes the notification."""
    locks_before: int = 0
    """Only locks with a start timestamp below it."""
    row_limit: int = 0
    """Of each tablet's answer; 0 for what the tablet server thinks right."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The notifications of one observer about one cell."""

    table_id: int
    row: bytes
    column: bytes
    observer: bytes
    timestamps: tuple[int, ...]
    """Commit timestamps, newest first; of very many, only the oldest."""


@dataclass(frozen=True, slots=True)
class FoundWork:
    """What one tablet answered to one question."""

    question: WorkQuestion
    """As it was asked of this tablet: its range lies in the tablet."""
    location: TabletLocation | None
    """The tablet, with its epoch. None when nobody answered."""
    waiting: list[Waiting]
    """Row by row; all of a row are in one answer."""
    locks: list[Cell]
    """With their stored records."""
    rest: tuple[bytes, bytes] | None
    """What remains of the range: ask again from there. None when nothing does."""
    notifications_written: int
    """By the tablet, since it was opened at this epoch, as of this answer."""
    problem: PercolatorError | None
    """Why nobody answered in time; then all of the range remains."""


async def find_work(
    world: World, tablets: TabletMap, questions: Sequence[WorkQuestion], deadline: float
) -> list[FoundWork]:
    """What waits in these ranges, an answer per tablet, in the order of the questions and rows.

    A tablet that moves or is split meanwhile is asked where it is by then. Raises nothing: what was
    not answered by the deadline says why.
    """
    return await _Search(world, tablets, deadline).answer(questions)


class _Part:
    """A piece of a question that is not answered yet."""

    __slots__ = ("location", "order", "problem", "question")

    def __init__(self, order: tuple[int, bytes], question: WorkQuestion) -> None:
        self.order = order
        self.question = question
        self.location: TabletLocation | None = None
        self.problem: PercolatorError | None = None


class _Search:
    """One `find_work`."""

    def __init__(self, world: World, tablets: TabletMap, deadline: float) -> None:
        self._world = world
        self._tablets = tablets
        self._deadline = deadline
        self._answers: list[tuple[tuple[int, bytes], FoundWork]] = []

    async def answer(self, questions: Sequence[WorkQuestion]) -> list[FoundWork]:
        clock = self._world.clock
        backoff = Backoff(clock, self._world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
        left = [_Part((index, asked.start), asked) for index, asked in enumerate(questions)]
        while left:
            placed, left = await self._place(left)
            calls = [self._ask(address, parts) for address, parts in _by_server(placed)]
            for unanswered in await asyncio.gather(*calls):
                left += unanswered
            if left and not await backoff.pause(self._deadline):
                self._answers += [(part.order, _unanswered(part)) for part in left]
                break
        return [answer for _, answer in sorted(self._answers, key=lambda pair: pair[0])]

    async def _place(self, parts: Sequence[_Part]) -> tuple[list[_Part], list[_Part]]:
        """The parts, cut at the borders of tablets, and those whose tablet is not known."""
        placed: list[_Part] = []
        lost: list[_Part] = []
        for part in parts:
            start, asked = part.question.start, part.question
            while True:
                piece = _Part((part.order[0], start), replace(asked, start=start))
                piece.problem = part.problem
                location = await self._locate(piece)
                if location is None:
                    if not isinstance(piece.problem, _PASSING):
                        self._answers.append((piece.order, _unanswered(piece)))
                    else:
                        lost.append(piece)
                    break
                ends = [end for end in (asked.end, location.end) if end]
                piece.location = location
                piece.question = replace(piece.question, end=min(ends) if ends else b"")
                placed.append(piece)
                start = location.end
                if not start or (asked.end and start >= asked.end):
                    break
        return placed, lost

    async def _locate(self, part: _Part) -> TabletLocation | None:
        table_id, row = part.question.table_id, part.question.start
        location = self._tablets.locate(table_id, row)
        if location is not None:
            return location
        try:
            await self._tablets.refresh(table_id, row)
        except PercolatorError as error:
            part.problem = error
            return None
        location = self._tablets.locate(table_id, row)
        if location is None:
            part.problem = Unavailable(f"no tablet is known to hold row {row!r}")
        return location

    async def _ask(self, address: str, parts: list[_Part]) -> list[_Part]:
        """Answers what it can; the parts to be asked again, of whoever serves them by then."""
        seconds = self._deadline - self._world.clock.monotonic_seconds()
        call = self._world.network.unary(address, SCAN_NOTIFICATIONS)
        request = wire.ScanNotificationsRequest(scans=[_scan(part) for part in parts])
        try:
            response = await call(request, min(max(seconds, 0.001), _ATTEMPT_SECONDS_MAX))
            if len(response.scans) != len(parts):
                raise ExecutionUnknown("a tablet server's answer has another number of scans")
        except PercolatorError as error:
            await self._look_up(parts[0], error)
            for part in parts:
                part.problem = error
            return self._still_open(parts)
        unanswered = []
        for part, result in zip(parts, response.scans, strict=True):
            if result.HasField("error"):
                part.problem = from_detail(result.error)
                await self._look_up(part, part.problem)
                unanswered.append(part)
            else:
                self._answers.append((part.order, _found(part, result)))
        return self._still_open(unanswered)

    async def _look_up(self, part: _Part, error: PercolatorError) -> None:
        location, asked = part.location, part.question
        if location is None or not isinstance(error, TabletMoved | ExecutionUnknown):
            return
        if isinstance(error, TabletMoved):
            self._tablets.learn(error.locations)
        if self._tablets.locate(asked.table_id, asked.start) is not location:
            return
        try:
            if isinstance(error, DeadlineExceeded):
                await self._tablets.refresh_server(location.address)
            else:
                await self._tablets.refresh(asked.table_id, asked.start)
        except PercolatorError:
            return  # the old map is all there is; the next attempt may come here again

    def _still_open(self, parts: list[_Part]) -> list[_Part]:
        """Those that may still be answered. What is wrong for good is an answer."""
        lasting = [part for part in parts if not isinstance(part.problem, _PASSING)]
        self._answers += [(part.order, _unanswered(part)) for part in lasting]
        return [part for part in parts if isinstance(part.problem, _PASSING)]


_PASSING = (NotExecuted, ExecutionUnknown)
"""Another attempt may be answered."""


def _by_server(parts: Sequence[_Part]) -> list[tuple[str, list[_Part]]]:
    """Calls: to whom, and with which parts."""
    servers: dict[str, list[_Part]] = {}
    for part in parts:
        if part.location is not None:
            servers.setdefault(part.location.address, []).append(part)
    return [
        (address, placed[at : at + _SCANS_PER_CALL_MAX])
        for address, placed in servers.items()
        for at in range(0, len(placed), _SCANS_PER_CALL_MAX)
    ]


def _scan(part: _Part) -> wire.NotificationScan:
    asked = part.question
    scan = wire.NotificationScan(
        range=RowRange(start=asked.start, end=asked.end),
        observers=asked.observers,
        locked_columns=asked.locked_columns,
        locks_before=asked.locks_before,
        row_limit=asked.row_limit,
    )
    if part.location is not None:
        scan.target.tablet_id, scan.target.epoch = part.location.tablet_id, part.location.epoch
    return scan


def _found(part: _Part, result: wire.NotificationScanResult) -> FoundWork:
    table_id = part.question.table_id
    return FoundWork(
        question=part.question,
        location=part.location,
        waiting=[
            Waiting(table_id, one.row, one.column, one.observer, tuple(one.timestamps))
            for one in result.notifications
        ],
        locks=list(result.locks),
        rest=(result.rest.start, result.rest.end) if result.HasField("rest") else None,
        notifications_written=result.notifications_written,
        problem=None,
    )


def _unanswered(part: _Part) -> FoundWork:
    asked = part.question
    return FoundWork(asked, None, [], [], (asked.start, asked.end), 0, part.problem)
