"""Workers on a row store, beside a transaction that has announced changes and is still open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from percolator.errors import CellAddress
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.observers.context import Claim
from percolator.observers.intent_notifications import IntentNotifications
from percolator.protocol import steps
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.routing.cells import APPLIED, CellMutation
from percolator.rowstore.intents import BUCKETS, Intent
from tests.simulation.virtual_time import VirtualClock
from tests.unit.history.row_site import ONE, OTHER, REST, VALUE, Site, site

CELLS = 3_000
LIVES_MILLISECONDS = 1_000_000
_OBSERVER = b"watcher"


class Observer:
    """What a pass asks about."""

    id = _OBSERVER

    def __init__(self, table_id: int) -> None:
        self.table_id = table_id


class Worker:
    """Takes everything that a pass finds, as `percolator.observers.context.Admission`."""

    def __init__(self, table_id: int) -> None:
        self.watched = [Observer(table_id)]
        self.rows: set[bytes] = set()

    @property
    def admitted(self) -> int:
        return len(self.rows)

    def observer(self, table_id: int, observer: bytes) -> Any:
        (one,) = self.watched
        return one if (table_id, observer) == (one.table_id, one.id) else None

    def has_space(self, watched: object) -> bool:
        return True

    def knows(self, claim: Claim) -> bool:
        return claim.row in self.rows

    async def claim(self, claims: Sequence[Claim]) -> list[bool]:
        return [True] * len(claims)

    def admit(self, claim: Claim, timestamps: Iterable[int]) -> None:
        self.rows.add(claim.row)

    def release(self, claims: Iterable[Claim]) -> None:
        """Nothing is held."""


class Watching:
    """A worker beside one transaction, and what its passes cost."""

    def __init__(self, at: Site, table_id: int, primary: CellAddress) -> None:
        self.at = at
        self.table_id = table_id
        self.primary = primary
        self.start = 0
        self.worker = Worker(table_id)
        self.asked = 0
        self.pages = 0
        self._mutate, self._page = at.env.cells.mutate, at.intents.page
        cells = SimpleNamespace(mutate=self._counted)
        env: Any = SimpleNamespace(
            cells=cells, limits=at.env.limits, timestamps=at.env.timestamps, now=at.env.now
        )
        intents: Any = SimpleNamespace(
            page=self._read, delete=at.intents.delete, touch=at.intents.touch
        )
        world = at.database.internal.engine.world
        self.notifications = IntentNotifications(world, env, Cleanup(at.env), intents)

    async def _counted(self, mutations: Sequence[CellMutation], deadline: float) -> list[Any]:
        self.asked += len(mutations)
        return await self._mutate(mutations, deadline)

    async def _read(self, *arguments: Any) -> Any:
        self.pages += 1
        return await self._page(*arguments)

    async def announce(self, cells: int, *, ttl_milliseconds: int = LIVES_MILLISECONDS) -> None:
        """Locks the primary, and so many cells that are observed."""
        self.start = await self.at.now()
        lock = LockRecord(
            self.start, self.start + 1, ttl_milliseconds, RecordKind.PUT, b"", self.primary, b"3"
        )
        cells_of_it = [self.primary, *map(self.cell, range(cells))]
        prewrites = [
            CellMutation(
                one[0], steps.prewrite(one.row, one.column, self.start, lock.encode(), None)
            )
            for one in cells_of_it
        ]
        answers = await self._mutate(prewrites, self.at.env.now() + 60.0)
        assert set(answers) == {APPLIED}
        intents = [Intent(*one, _OBSERVER, self.start, is_certain=False) for one in cells_of_it[1:]]
        if intents:
            await self.at.intents.write(intents, self.at.env.now() + 60.0)

    def cell(self, number: int) -> CellAddress:
        return CellAddress(self.table_id, b"row %05d" % number, VALUE.name)

    async def commit(self, *cells: CellAddress) -> None:
        commit = await self.at.now()
        record = WriteRecord(self.start, RecordKind.PUT, b"3").encode()
        done = [
            CellMutation(
                one.table_id,
                steps.commit_secondary(one.row, one.column, self.start, commit, record, ()),
            )
            for one in cells
        ]
        assert set(await self._mutate(done, self.at.env.now() + 60.0)) == {APPLIED}

    async def look(self) -> tuple[int, int]:
        """A pass. Returns how many steps and pages it has asked for."""
        self.asked = self.pages = 0
        await self.notifications.look(cast("Any", self.worker), everything=True)
        return self.asked, self.pages


@asynccontextmanager
async def watching() -> AsyncIterator[Watching]:
    async with site(VirtualClock(asyncio.get_running_loop())) as at:
        other = await at.table_id(OTHER)
        yield Watching(at, await at.table_id(ONE), CellAddress(other, b"primary", REST.name))


async def test_a_pass_asks_once_for_an_open_transaction_however_many_cells_it_has() -> None:
    async with watching() as at:
        await at.announce(CELLS)
        asked, _ = await at.look()
        assert asked <= CELLS
        asked, pages = await at.look()
        assert asked == 1
        assert pages <= 2 * len(BUCKETS), "behind one page, all others of it are passed"


async def test_it_is_asked_about_the_less_often_the_longer_it_is_open() -> None:
    async with watching() as at:
        await at.announce(100)
        await at.look()
        await asyncio.sleep(160.0)
        looks = 0
        for _ in range(100):
            looks += (await at.look())[0]
            await asyncio.sleep(0.2)
        assert 20.0 / 2.0 <= looks <= 20.0 / 2.0 + 2


async def test_its_changes_are_found_in_the_next_pass_after_it_has_committed() -> None:
    async with watching() as at:
        await at.announce(CELLS)
        for _ in range(10):
            await at.look()
            await asyncio.sleep(0.2)
        await asyncio.sleep(12.0)  # the passes that follow begin far behind its intents
        await at.look()
        await at.commit(at.primary, *map(at.cell, range(CELLS)))
        await asyncio.sleep(2.0)
        await at.look()
        assert len(at.worker.rows) == CELLS


async def test_of_a_cell_that_the_owner_did_not_commit_any_more_the_change_is_found() -> None:
    async with watching() as at:
        await at.announce(10, ttl_milliseconds=100)
        await at.look()
        await at.commit(at.primary, at.cell(0))
        for _ in range(3):
            await asyncio.sleep(2.0)
            await at.look()
        assert len(at.worker.rows) == 10


async def test_what_a_dead_owner_has_announced_is_rolled_back_and_cleared() -> None:
    async with watching() as at:
        await at.announce(300, ttl_milliseconds=100)
        for _ in range(4):
            await at.look()
            await asyncio.sleep(2.0)
        assert await at.at.all_intents() == []
        assert not at.worker.rows


async def test_other_changes_are_found_while_it_is_open() -> None:
    async with watching() as at:
        await at.announce(CELLS)
        await at.look()
        first, at.start = at.start, 0
        await asyncio.sleep(1.0)
        at.primary = at.cell(CELLS)
        await at.announce(0)
        intent = Intent(*at.primary, _OBSERVER, at.start, is_certain=False)
        await at.at.intents.write([intent], at.at.env.now() + 60.0)
        await at.commit(at.primary)
        await at.look()
        assert at.worker.rows == {at.primary.row}
        assert first < at.start
