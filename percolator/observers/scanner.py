"""Finding work by looking: the safety net under the streams, and how a backlog is shared.

A pass visits every tablet of the watched tables, in random order, each from a random row on. What
is found is locked, many rows at a time; where somebody else holds one, another worker is at work,
and the scanner jumps to another random place. Without that, workers that have met once would move
on side by side, like buses on a crowded line.

While streams tell of new notifications, young ones are left to whoever was told. Locks on watched
columns that are older than a second are settled: an owner that died after its commit point leaves
nothing else behind, and settling the lock writes the notification.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from percolator.errors import PercolatorError, TabletLocation
from percolator.observers.client import Client
from percolator.observers.row_locks import RowLocks, lock_name
from percolator.observers.watched import Watched
from percolator.observers.work import WorkQueue
from percolator.protocol.cleanup import MetLock
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1.cells_pb2 import Cell
from percolator.wire.notifications import FoundWork, Waiting, WorkQuestion, find_work

_log = logging.getLogger(__name__)

_TABLETS_AT_ONCE = 16
_ROWS_PER_ANSWER = 256
_OLD_LOCK_MILLISECONDS = 1_000
_YOUNG_MILLISECONDS = 2_000
"""Whoever was told of a notification has had its chance by then."""
_PAUSE_SECONDS_MIN = 0.2
_JUMPS_MAX = 8
"""Of one pass."""
_RANDOM_BYTES = 8
_SETTLE_SECONDS = 2.0
"""How long a pass waits, at most once, for primaries that nobody serves at the moment."""
_KNOWN_SECONDS = 0.1
"""What `cleanup` takes for patience: owners of locks so old are asked for."""


class Scanner:
    """Of one worker."""

    def __init__(
        self,
        client: Client,
        queue: WorkQueue,
        locks: RowLocks,
        watched: Callable[[], Sequence[Watched]],
        *,
        pause_seconds_max: float,
    ) -> None:
        """`watched` are the observers to be run at the moment."""
        self._client = client
        self._queue = queue
        self._locks = locks
        self._watched = watched
        self._pause_seconds_max = pause_seconds_max
        self._woken = asyncio.Event()
        self.passes = 0
        """Finished ones."""

    def wake(self) -> None:
        """Something may have been missed: the next pass begins at once, and leaves out nothing."""
        self._woken.set()

    async def scan_forever(self) -> None:
        pause = _PAUSE_SECONDS_MIN
        while True:
            everything = self._woken.is_set()
            self._woken.clear()
            try:
                found = await _Pass(self._client, self._queue, self._locks, self._watched()).run(
                    everything=everything
                )
            except PercolatorError as error:
                # The oracle or the masters do not answer: so does nobody's transaction.
                _log.debug("a pass over the tablets was broken off: %s", error)
                found = 0
            self.passes += 1
            pause = _PAUSE_SECONDS_MIN if found else min(pause * 2, self._pause_seconds_max)
            await self._sleep(pause)

    async def _sleep(self, seconds: float) -> None:
        chance = self._client.world.random.random()
        try:
            async with asyncio.timeout(seconds * (0.5 + 0.5 * chance)):
                await self._woken.wait()
        except TimeoutError:
            return


class _Pass:
    """Every tablet once, and a few random places more."""

    def __init__(
        self, client: Client, queue: WorkQueue, locks: RowLocks, watched: Sequence[Watched]
    ) -> None:
        self._client = client
        self._queue = queue
        self._locks = locks
        self._by_name = {(one.table_id, one.id): one for one in watched}
        self._tables: dict[int, WorkQuestion] = {}
        for one in watched:
            known = self._tables.setdefault(one.table_id, WorkQuestion(one.table_id))
            strong = () if one.observer.weak else tuple(one.columns)
            self._tables[one.table_id] = replace(
                known,
                observers=(*known.observers, one.id),
                locked_columns=tuple(sorted({*known.locked_columns, *strong})),
                row_limit=_ROWS_PER_ANSWER,
            )
        self._places: list[WorkQuestion] = []
        self._jumps = 0
        self._young_from = 0
        self._found = 0
        self._may_settle = True

    async def run(self, *, everything: bool) -> int:
        """Returns how many cells were found that this worker is to run for."""
        if not self._tables:
            return 0
        left = self._client.around.limits.call_seconds
        now = await self._client.around.timestamps.get(timeout_seconds=left)
        before = now - (_OLD_LOCK_MILLISECONDS << SEQUENCE_BITS)
        for table_id, question in self._tables.items():
            self._tables[table_id] = replace(question, locks_before=max(before, 0))
        if not everything:
            self._young_from = now - (_YOUNG_MILLISECONDS << SEQUENCE_BITS)
        for location in await self._tablets():
            self._places += self._from_random_row(location)
        while self._places:
            places, self._places = self._places[:_TABLETS_AT_ONCE], self._places[_TABLETS_AT_ONCE:]
            asked = [one for place in places if (one := self._for_those_with_room(place))]
            client = self._client
            for answer in await find_work(client.world, client.tablets, asked, client.deadline()):
                await self._work_off(answer, now)
        return self._found

    def _for_those_with_room(self, question: WorkQuestion) -> WorkQuestion | None:
        """Nobody is asked for what would find no room: there may be millions of it."""
        roomy = tuple(
            one
            for one in question.observers
            if self._queue.has_room(self._by_name[question.table_id, one])
        )
        return replace(question, observers=roomy) if roomy else None

    async def _tablets(self) -> list[TabletLocation]:
        client = self._client
        found: list[TabletLocation] = []
        for table_id in self._tables:
            known = client.tablets.tablets(table_id)
            found += known or await client.catalog.all_tablets(table_id, client.deadline())
        client.world.random.shuffle(found)
        return found

    def _from_random_row(self, tablet: TabletLocation) -> list[WorkQuestion]:
        """The tablet in two pieces: from somewhere to its end, and what lies before."""
        question = self._tables[tablet.table_id]
        row = self._random_row(tablet)
        if row is None:
            return [replace(question, start=tablet.start, end=tablet.end)]
        return [
            replace(question, start=row, end=tablet.end),
            replace(question, start=tablet.start, end=row),
        ]

    def _random_row(self, tablet: TabletLocation) -> bytes | None:
        """Inside of the tablet; None when there is no room between its ends."""
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
        middle = self._client.world.random.randrange(low + 1, high)
        return start[:shared] + middle.to_bytes(_RANDOM_BYTES, "big")

    # ------------------------------------------------------------------ what was found

    async def _work_off(self, answer: FoundWork, now: int) -> None:
        taken = await self._take(answer)
        if answer.locks and self._may_settle:
            await self._settle(answer.question.table_id, answer.locks, now)
        if answer.problem is not None:
            return  # nobody serves it at the moment; the next pass comes again
        if not taken:
            self._jump()
        elif answer.rest is not None:
            start, end = answer.rest
            self._places.insert(0, replace(answer.question, start=start, end=end))

    async def _take(self, answer: FoundWork) -> bool:
        """Locks and queues what was found. False when somebody else is at work there."""
        fresh: list[tuple[Watched, Waiting]] = []
        for one in answer.waiting:
            watched = self._by_name.get((one.table_id, one.observer))
            if watched is None or 0 < self._young_from < one.timestamps[-1]:
                continue
            if (watched, one.row, one.column) in self._queue:
                self._queue.offer(watched, one.row, one.column, one.timestamps)
            else:
                fresh.append((watched, one))
        if not fresh:
            return True
        names = [lock_name(watched, one.row) for watched, one in fresh]
        held = await self._locks.take(names)
        unneeded = []
        for (watched, one), name, is_held in zip(fresh, names, held, strict=True):
            if not is_held:
                continue
            work = self._queue.offer(watched, one.row, one.column, one.timestamps)
            if work is None:  # no room any more, or answered meanwhile
                unneeded.append(name)
            else:
                work.is_locked = True
                self._found += 1
        self._locks.release_names(unneeded)
        return all(held)

    async def _settle(self, table_id: int, locks: Sequence[Cell], now: int) -> None:
        """As far as primaries answer. What could not be settled is met again by the next pass, and
        keeps nobody from the work of other tablets."""
        deadline = min(self._client.now() + _SETTLE_SECONDS, self._client.deadline())
        try:
            await self._client.cleanup.clear(
                [MetLock.of(table_id, lock) for lock in locks],
                deadline=deadline,
                known_now=now,
                waited_seconds=_KNOWN_SECONDS,
            )
        except PercolatorError as error:
            _log.debug("old locks of table %d are not settled now: %s", table_id, error)
            self._may_settle = False
        else:
            self._may_settle = self._client.now() < deadline

    def _jump(self) -> None:
        if self._jumps >= _JUMPS_MAX:
            return
        self._jumps += 1
        random = self._client.world.random
        tablets = [
            tablet for table_id in self._tables for tablet in self._client.tablets.tablets(table_id)
        ]
        if tablets:
            self._places.append(self._from_random_row(random.choice(tablets))[0])
