"""Finds work by scanning tablets.

A pass visits every tablet of the watched tables in random order, each starting at a random row.
Rows that are found are locked, many at a time. If some are locked already, another worker is at
work there, and the pass jumps to another random place. Without that, workers that have met once
would move on side by side, like buses on a crowded line.

While streams deliver new notifications, young ones are left to the workers that received them.
Locks on watched columns that are older than a second are resolved: an owner that died after its
commit point leaves nothing else behind, and resolving the lock writes the notification.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from percolator.errors import PercolatorError, TabletLocation
from percolator.observers.finding.tablet_search import find_work
from percolator.observers.port import Admission, FoundWork, WorkRequest
from percolator.protocol.environment import Environment
from percolator.protocol.met_lock import MetLock
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.routing.catalog import Catalog
from percolator.routing.tablet_map import TabletMap
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1.cells_pb2 import Cell
from percolator.world import World

_log = logging.getLogger(__name__)

_TABLETS_AT_ONCE = 16
_ROWS_PER_ANSWER = 256
_OLD_LOCK_MILLISECONDS = 1_000
_YOUNG_MILLISECONDS = 2_000
"""By this age, the worker to which a notification was announced has had its chance."""
_JUMPS_MAX = 8
"""The most jumps in one pass."""
_RANDOM_BYTES = 8
_RESOLVE_SECONDS = 2.0
"""How long a pass waits, at most once, for primaries that no server has at the moment."""
_KNOWN_SECONDS = 0.1
"""The wait reported to `cleanup`. The locks are old, so it should check their owners at once."""


@dataclass(frozen=True)
class TabletContext:
    """What looking at tablets needs of a connection."""

    world: World
    env: Environment
    cleanup: Cleanup
    catalog: Catalog
    tablets: TabletMap

    def now(self) -> float:
        return self.world.clock.monotonic_seconds()

    def deadline(self) -> float:
        """The deadline of a call that begins now."""
        return self.now() + self.env.limits.call_seconds


class TabletPass:
    """One pass: every tablet once, and a few more random places."""

    def __init__(self, context: TabletContext, admission: Admission) -> None:
        self._context = context
        self._admission = admission
        self._tables: dict[int, WorkRequest] = {}
        for one in admission.watched:
            known = self._tables.setdefault(one.table_id, WorkRequest(one.table_id))
            strong = () if one.observer.weak else tuple(one.columns)
            self._tables[one.table_id] = replace(
                known,
                observers=(*known.observers, one.id),
                locked_columns=tuple(sorted({*known.locked_columns, *strong})),
                row_limit=_ROWS_PER_ANSWER,
            )
        self._places: list[WorkRequest] = []
        self._jumps = 0
        self._young_from = 0
        self._may_resolve = True

    async def run(self, *, everything: bool) -> int:
        """Returns the number of cells found for which this worker will run observers."""
        if not self._tables:
            return 0
        left = self._context.env.limits.call_seconds
        now = await self._context.env.timestamps.get(timeout_seconds=left)
        before = now - (_OLD_LOCK_MILLISECONDS << SEQUENCE_BITS)
        for table_id, request in self._tables.items():
            self._tables[table_id] = replace(request, locks_before=max(before, 0))
        if not everything:
            self._young_from = now - (_YOUNG_MILLISECONDS << SEQUENCE_BITS)
        for location in await self._tablets():
            self._places += self._from_random_row(location)
        while self._places:
            places, self._places = self._places[:_TABLETS_AT_ONCE], self._places[_TABLETS_AT_ONCE:]
            asked = [one for place in places if (one := self._for_those_with_room(place))]
            context = self._context
            for answer in await find_work(
                context.world, context.tablets, asked, context.deadline()
            ):
                await self._process(answer, now)
        return self._admission.admitted

    def _for_those_with_room(self, request: WorkRequest) -> WorkRequest | None:
        """The request without observers whose queue is full: they may have millions of cells."""
        roomy = tuple(
            one
            for one in request.observers
            if (watched := self._admission.observer(request.table_id, one)) is not None
            and self._admission.has_room(watched)
        )
        return replace(request, observers=roomy) if roomy else None

    async def _tablets(self) -> list[TabletLocation]:
        context = self._context
        found: list[TabletLocation] = []
        for table_id in self._tables:
            known = context.tablets.tablets(table_id)
            found += known or await context.catalog.all_tablets(table_id, context.deadline())
        context.world.random.shuffle(found)
        return found

    def _from_random_row(self, tablet: TabletLocation) -> list[WorkRequest]:
        """The tablet in two pieces: from a random row to its end, and what is before that row."""
        request = self._tables[tablet.table_id]
        row = self._random_row(tablet)
        if row is None:
            return [replace(request, start=tablet.start, end=tablet.end)]
        return [
            replace(request, start=row, end=tablet.end),
            replace(request, start=tablet.start, end=row),
        ]

    def _random_row(self, tablet: TabletLocation) -> bytes | None:
        """A random row inside the tablet; None if there is none between its ends."""
        start, end = tablet.start, tablet.end
        shared = 0
        while shared < min(len(start), len(end)) and start[shared] == end[shared]:
            shared += 1
        low = int.from_bytes(start[shared:][:_RANDOM_BYTES].ljust(_RANDOM_BYTES, b"\x00"), "big")
        high = int.from_bytes(end[shared:][:_RANDOM_BYTES].ljust(_RANDOM_BYTES, b"\x00"), "big")
        if not end:
            high = 1 << 8 * _RANDOM_BYTES
        if high - low < 2:
            return None
        middle = self._context.world.random.randrange(low + 1, high)
        return start[:shared] + middle.to_bytes(_RANDOM_BYTES, "big")

    # ------------------------------------------------------------------ what was found

    async def _process(self, answer: FoundWork, now: int) -> None:
        taken = await self._admission.take(
            one for one in answer.waiting if not 0 < self._young_from < one.timestamps[-1]
        )
        if answer.locks and self._may_resolve:
            await self._resolve(answer.request.table_id, answer.locks, now)
        if answer.problem is not None:
            return  # no server has it at the moment; the next pass tries again
        if not taken:
            self._jump()
        elif answer.rest is not None:
            start, end = answer.rest
            self._places.insert(0, replace(answer.request, start=start, end=end))

    async def _resolve(self, table_id: int, locks: Sequence[Cell], now: int) -> None:
        """Resolves locks, as far as their primaries answer.

        The next pass meets the others again; they do not hold up the work of other tablets.
        """
        deadline = min(self._context.now() + _RESOLVE_SECONDS, self._context.deadline())
        try:
            await self._context.cleanup.resolve(
                [MetLock.of(table_id, lock) for lock in locks],
                deadline=deadline,
                known_now=now,
                waited_seconds=_KNOWN_SECONDS,
            )
        except PercolatorError as error:
            _log.debug("old locks of table %d cannot be resolved now: %s", table_id, error)
            self._may_resolve = False
        else:
            self._may_resolve = self._context.now() < deadline

    def _jump(self) -> None:
        if self._jumps >= _JUMPS_MAX:
            return
        self._jumps += 1
        tablets = [
            tablet
            for table_id in self._tables
            for tablet in self._context.tablets.tablets(table_id)
        ]
        if tablets:
            self._places.append(
                self._from_random_row(self._context.world.random.choice(tablets))[0]
            )
