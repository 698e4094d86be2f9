"""Rows that cannot be handed to a server at once: their tablets are not known, or there is no room.

Each request is placed by itself, and what it waits for holds up none of its other rows. The
heartbeats of all transactions of a client are one request, for example.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from percolator.errors import ExecutionUnknown, NotExecuted, PercolatorError, Unavailable
from percolator.routing.dispatcher import RETRY_SECONDS_MIN, Dispatcher
from percolator.routing.lanes import Queued
from percolator.routing.tablet_map import EVERYTHING, Searched, TabletMap
from percolator.row_text import quoted
from percolator.wire.backoff import Backoff
from percolator.wire.by_address import ByAddress
from percolator.world import World

RETRY_SECONDS_MAX = 1.0


class Placing:
    """Places the rows of one router."""

    def __init__(
        self,
        world: World,
        tablets: TabletMap,
        dispatchers: ByAddress[Dispatcher],
        start: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        """`start` starts a task."""
        self._world = world
        self._tablets = tablets
        self._dispatchers = dispatchers
        self._start = start

    async def place(self, entries: Sequence[Queued]) -> None:
        """Waits for tablets to be known and for room at their servers, until the request is done.

        Not in the caller's task: cancelled before its first step, that would leave the future open,
        and the deadline would set an exception that nothing retrieves.
        """
        await self._guarded(entries[0], self._find_places(entries))

    @staticmethod
    async def _guarded(entry: Queued, work: Coroutine[None, None, None]) -> None:
        future = entry.pending.future
        try:
            await work
        except Exception as error:  # noqa: BLE001  # a bug: the caller is waiting for the future
            if not future.done():
                future.set_exception(error)

    async def _find_places(self, entries: Sequence[Queued]) -> None:
        """Hands rows of one request to their servers. A tablet that no server has at the moment,
        a server without room, or a search that no master answers, holds up none but its own
        rows."""
        pending, world = entries[0].pending, self._world
        backoff = Backoff(world.clock, world.random, RETRY_SECONDS_MIN, RETRY_SECONDS_MAX)
        left = self._hand_over(entries)
        while left:
            searched: list[tuple[int, Searched]] = []
            for entry in left:
                if await self._search(entry, searched):
                    left = self._hand_over(left)  # now: the next search may take seconds
            if left and pending.last_problem is None:
                pending.last_problem = Unavailable(
                    f"no tablet is known to hold row {quoted(left[0].row)} "
                    f"of table {left[0].table_id}"
                )
            if left and not await backoff.pause(pending.deadline):
                pending.expire()
            left = self._hand_over(left)

    def _hand_over(self, entries: Sequence[Queued]) -> list[Queued]:
        """Hands over the rows whose tablets are known: at once, or when their servers have room.
        Returns those that have to be looked for."""
        left: list[Queued] = []
        full: dict[Dispatcher, list[Queued]] = {}
        for entry in entries:
            if entry.pending.is_answered(entry.index):
                continue
            location = self._tablets.locate(entry.table_id, entry.row)
            if location is None:
                left.append(entry)
                continue
            dispatcher = self._dispatchers.get(location.address)
            if dispatcher in full or not dispatcher.has_room(entry.size_bytes):
                full.setdefault(dispatcher, []).append(entry)
            else:
                entry.location = location
                dispatcher.submit(entry)
        for dispatcher, rows in full.items():
            self._start(self._enter(dispatcher, rows))
        return left

    async def _enter(self, dispatcher: Dispatcher, entries: Sequence[Queued]) -> None:
        await self._guarded(entries[0], self._wait_for_room(dispatcher, entries))

    async def _wait_for_room(self, dispatcher: Dispatcher, entries: Sequence[Queued]) -> None:
        """Hands rows of one request to a server as soon as it has room, or to whichever has them
        by then."""
        for entry in entries:
            if not (dispatcher.has_room(entry.size_bytes) or await self._room(dispatcher, entry)):
                return
            location = self._tablets.locate(entry.table_id, entry.row)
            if location is not None and location.address == dispatcher.address:
                entry.location = location
                dispatcher.submit(entry)
            else:
                dispatcher.wake()
                self._start(self.place([entry]))

    async def _search(self, entry: Queued, searched: list[tuple[int, Searched]]) -> bool:
        """Asks a master where the row is, unless that is known by now, or what this round has
        `searched` was about it. Returns whether a master has told where rows are."""
        table_id, row, pending = entry.table_id, entry.row, entry.pending
        if pending.is_answered(entry.index) or self._tablets.locate(table_id, row) is not None:
            return False
        if any(table_id == table and rows.has(row) for table, rows in searched):
            return False
        try:
            searched.append((table_id, await self._tablets.refresh(table_id, row)))
        except (NotExecuted, ExecutionUnknown) as error:
            pending.last_problem = error
            searched.append((table_id, EVERYTHING))
            return False
        except PercolatorError as error:  # such as: there is no such table
            pending.fail(entry.index, error)
            return False
        return True

    async def _room(self, dispatcher: Dispatcher, entry: Queued) -> bool:
        """Waits for room, or until the sweep ends the request; returns whether it may enter."""
        future = entry.pending.future
        turn = asyncio.ensure_future(dispatcher.room(entry.size_bytes))
        may_enter = False
        try:
            await asyncio.wait([turn, future], return_when=asyncio.FIRST_COMPLETED)
            may_enter = not future.done()
        finally:
            if not may_enter:
                turn.cancel()
                dispatcher.wake()
        return may_enter
