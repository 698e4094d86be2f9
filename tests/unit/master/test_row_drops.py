"""Tables of a row store that are dropped: when they go, and what becomes of their locks.

Mistakes in dropping tables of a row store, which the simulation finds, too: each makes the test
of the rule that it breaks fail.

The master's rounds over a row store: what they are told, and what they tell.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from percolator.aio import Snapshot
from percolator.bigtable.admin import delete_table, has_table
from percolator.errors import CellAddress, NotReady, SchemaError
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.protocol import steps
from percolator.protocol.announcing import Announcement
from percolator.routing.cells import APPLIED, CellMutation
from percolator.rowstore.intents import Intent
from percolator.services.master.cluster_map import Catalogue, Table
from percolator.services.master.collection import ClusterSafePoints
from percolator.services.master.row_term import RowCollecting, RowDrops
from percolator.testing.row_database import MODEL
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE
from percolator.v1.master_pb2 import CreateTableRequest, DeleteTableRequest
from tests.simulation import planted_shared_bugs as bugs
from tests.unit.history.row_site import ONE, OTHER, REST, SECONDS, VALUE, Site, site


class Kept:
    """The catalogue of a leader."""

    def __init__(self, tables: Mapping[int, Table]) -> None:
        self.current = Catalogue(tables=tables)
        self.leads = True

    async def change(self, decide: Callable[[Catalogue], tuple[Catalogue, None]]) -> None:
        if not self.leads:
            raise NotReady("another one leads")
        self.current, _ = decide(self.current)


async def _scanned(snapshot: Snapshot) -> object:
    return [row async for row in snapshot.scan(ONE)]


READS: dict[str, Callable[[Snapshot], Awaitable[object]]] = {
    "get": lambda snapshot: snapshot.get("a", VALUE),
    "get_many": lambda snapshot: snapshot.get_many(ONE, ["a"]),
    "scan": _scanned,
}


class Dropping:
    """The first table of a site, which is being dropped: its store, and its oracle."""

    def __init__(self, here: Site, one: int, other: int) -> None:
        self.here = here
        self.one, self.other = one, other
        self.catalogue = Kept({one: Table(one, "one"), other: Table(other, "other")})
        world = here.database.internal.engine.world
        acting: Any = self
        self.drops = RowDrops(world.clock, cast("Any", self.catalogue), acting, acting)
        self.collecting = RowCollecting(
            here.history, lambda: list(self.catalogue.current.tables), self.drops
        )

    async def drop(self) -> None:
        """By another client: the one of the test still knows the table."""
        await self.here.cluster.delete_table(DeleteTableRequest(name=ONE.name))
        dropped = Table(self.one, "one", deleting=True)
        self.catalogue.current = self.catalogue.current.with_tables(dropped)

    async def collect(self) -> None:
        """One round, as far as it may go."""
        below = await self.here.now()
        reads = dict.fromkeys(self.catalogue.current.tables, below)
        await self.collecting.collect(ClusterSafePoints(reads, below))

    async def is_gone(self) -> bool:
        is_known = self.one in self.catalogue.current.tables
        assert is_known == await self.has_table(self.one)
        return not is_known

    # ------------------------------------------------------------------ store and oracle

    async def has_table(self, table_id: int) -> bool:
        return await has_table(self.here.network, MODEL, table_id, SECONDS)

    async def delete_table(self, table_id: int) -> None:
        await delete_table(self.here.network, MODEL, table_id, SECONDS)

    async def raise_epoch(self, deadline: float) -> None:
        self.here.cluster.raise_epoch()

    def source(self) -> Any:
        return self.here.env.timestamps


@asynccontextmanager
async def dropping() -> AsyncIterator[Dropping]:
    async with site() as here:
        yield Dropping(here, await here.table_id(ONE), await here.table_id(OTHER))


async def test_a_dropped_table_goes_after_a_round_above_its_last_commits() -> None:
    async with dropping() as at:
        await at.here.set("a", 1)
        await at.drop()
        await at.collect()  # its safe point was decided before clients were told
        assert not await at.is_gone()
        await at.collect()
        assert await at.is_gone()
        async with at.here.database.snapshot() as snapshot:
            assert await snapshot.get("a", REST) == 1


async def test_a_round_that_resolved_less_does_not_finish() -> None:
    async with dropping() as at:
        before = await at.here.now()
        await at.drop()
        await at.drops.begin()
        await at.drops.finish(before)
        assert not await at.is_gone()
        await at.drops.finish(await at.here.now())
        assert await at.is_gone()


async def test_a_table_goes_after_what_was_committed_there_is_settled_elsewhere() -> None:
    async with dropping() as at:
        start = await at.here.lock(b"a", ttl_milliseconds=1)
        record = WriteRecord(start, RecordKind.PUT, b"3").encode()
        commit = await at.here.now()
        step = steps.commit_primary(b"a", VALUE.name, start, start + 1, commit, record, ())
        assert await at.here.answer(CellMutation(at.one, step)) is APPLIED
        await at.drop()
        for _ in range(2):
            await at.collect()
        assert await at.is_gone()
        assert not await at.here.cells(OTHER, SPACE_LOCK)
        assert await at.here.cells(OTHER, SPACE_WRITE) == 1


async def test_a_table_goes_although_a_transaction_there_has_not_ended() -> None:
    async with dropping() as at:
        start = await at.here.lock(b"a", ttl_milliseconds=600_000)
        await at.drop()
        for _ in range(2):
            await at.collect()
        assert await at.is_gone()
        assert not await at.here.cells(OTHER, SPACE_LOCK)
        record = WriteRecord(start, RecordKind.PUT, b"3").encode()
        commit = await at.here.now()
        step = steps.commit_primary(b"a", VALUE.name, start, start + 1, commit, record, ())
        assert await at.here.answer(CellMutation(at.one, step)) is not APPLIED


async def test_who_gets_a_commit_timestamp_after_the_drop_does_not_commit() -> None:
    """Its cells are still there: nothing else would refuse it."""
    async with dropping() as at:
        tx = at.here.database.transaction()
        await tx.timestamp()
        await tx.set("a", VALUE, 1)
        await tx.set("a", REST, 1)
        await at.drop()
        with pytest.raises(SchemaError, match="'one' was dropped while it was in use"):
            await tx.commit()
        async with at.here.database.snapshot() as snapshot:
            assert await snapshot.get("a", REST) is None


@pytest.mark.parametrize("comes_first", ["the table", "the timestamp"])
@pytest.mark.parametrize("in_past", [False, True])
@pytest.mark.parametrize("read", READS)
async def test_whoever_begins_to_read_after_the_drop_reads_nothing_of_the_table(
    read: str, comes_first: str, *, in_past: bool
) -> None:
    """Its cells are still there, and the store refuses no read of them."""
    async with dropping() as at:
        await at.here.set("a", 1)
        database = at.here.database
        past = await database.timestamp() if in_past else None
        async with database.snapshot(past) as snapshot:
            if comes_first == "the table":
                await snapshot._reader.info(ONE, database.internal.deadline(None))
            await at.drop()
            if comes_first == "the timestamp":
                await snapshot.timestamp()
            with pytest.raises(SchemaError, match="'one'"):
                await READS[read](snapshot)
            assert await snapshot.get("a", REST) == 1


async def test_the_next_table_of_the_name_is_read_by_those_who_know_the_former_one() -> None:
    async with dropping() as at:
        await at.here.set("a", 1)
        database = at.here.database
        assert await database.get("a", VALUE) == 1
        await at.drop()
        await at.here.cluster.create_table(CreateTableRequest(name=ONE.name))
        assert await database.get("a", VALUE) is None
        async with database.snapshot() as snapshot:
            assert [row async for row in snapshot.scan(ONE)] == []


async def test_who_knows_nothing_of_a_dropped_table_is_told_at_once() -> None:
    """And not at the deadline, as if the store were out of order."""
    async with dropping() as at:
        engine = at.here.database.internal.engine
        began = engine.now()
        tx = at.here.database.transaction()
        await tx.timestamp()
        await tx.set("a", VALUE, 1)
        await tx.set("a", REST, 1)
        await at.drop()
        engine.catalog.forget(at.one)
        with pytest.raises(SchemaError, match="'one' was dropped while it was in use"):
            await tx.commit()
        assert engine.now() < began + engine.limits.call_seconds / 2
        assert await engine.env.background.drain(SECONDS)  # its other locks go after the answer
        assert not await at.here.cells(OTHER, SPACE_LOCK)


async def test_without_a_look_at_the_epoch_it_would_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the test above can fail."""

    async def wrong(self: Announcement, deadline: float) -> None:
        pass

    monkeypatch.setattr(Announcement, "renew", wrong)
    async with dropping() as at:
        async with at.here.database.transaction() as tx:
            await tx.timestamp()
            await tx.set("a", VALUE, 1)
            await tx.set("a", REST, 1)
            await at.drop()
        async with at.here.database.snapshot() as snapshot:
            assert await snapshot.get("a", REST) == 1


async def test_a_lock_that_comes_after_the_end_is_rolled_back() -> None:
    """Its primary is in the table that is gone, so it never commits."""
    async with dropping() as at:
        await at.here.set("a", 1)
        await at.drop()
        for _ in range(2):
            await at.collect()
        assert await at.is_gone()
        start = await at.here.now()
        primary = CellAddress(at.one, b"a", VALUE.name)
        lock = LockRecord(start, start + 1, 1, RecordKind.PUT, b"", primary, b"3").encode()
        late = steps.prewrite(b"a", REST.name, start, lock, None)
        assert await at.here.answer(CellMutation(at.other, late)) is APPLIED
        async with at.here.database.snapshot() as snapshot:
            assert await snapshot.get("a", REST) == 1
        assert not await at.here.cells(OTHER, SPACE_LOCK)


async def test_intents_of_a_table_that_is_gone_are_cleared() -> None:
    async with dropping() as at:
        await at.drop()
        for _ in range(2):
            await at.collect()
        late = Intent(at.one, b"a", VALUE.name, b"o", await at.here.now(), is_certain=False)
        await at.here.intents.write([late], at.here.env.now() + SECONDS)
        await at.collect()
        assert await at.here.all_intents() == []


async def test_who_could_not_say_any_more_that_a_table_is_gone_is_no_obstacle() -> None:
    async with dropping() as at:
        await at.drop()
        await at.collect()
        at.catalogue.leads = False
        with pytest.raises(NotReady, match="another one leads"):
            await at.collect()
        at.catalogue.leads = True
        await at.collect()
        assert await at.is_gone()


_STAYS_AT_FIRST = test_a_dropped_table_goes_after_a_round_above_its_last_commits
_STAYS_IF_LESS = test_a_round_that_resolved_less_does_not_finish

FOUND_BY: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], Awaitable[None]]] = {
    bugs.dropped_table_deleted_at_once: _STAYS_AT_FIRST,
    bugs.locks_resolved_below_any_timestamp_are_enough: _STAYS_IF_LESS,
}


@pytest.mark.parametrize("plant", FOUND_BY, ids=lambda plant: plant.__name__)
async def test_it_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    test = FOUND_BY[plant]
    await test()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        await test()


async def test_what_was_committed_elsewhere_is_lost_with_a_table_that_goes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bugs.dropped_table_deleted_at_once(monkeypatch)
    with pytest.raises(AssertionError):
        await test_a_table_goes_after_what_was_committed_there_is_settled_elsewhere()


async def test_a_table_that_a_pin_keeps_is_told_to_keep_everything() -> None:
    async with site() as here:
        for value in (1, 2, 3):
            await here.set("a", value)
        one, other = await here.table_id(ONE), await here.table_id(OTHER)
        collecting = RowCollecting(here.history, lambda: (one, other), cast("Any", AsyncMock()))
        below = await here.now()
        # As `ClusterSafePoints.allowed_by` leaves it when a pin keeps the other table.
        await collecting.collect(ClusterSafePoints({one: below}, below))
        assert collecting.collected(one).cells == 2
        assert collecting.collected(one).below == below
        assert collecting.collected(other).cells == 0
        assert collecting.collected(other).below == 0
        assert collecting.locks_resolved == 0
        assert collecting.collected(99).below == 0, "a table that was created since"


async def test_a_table_that_is_gone_is_forgotten() -> None:
    async with site() as here:
        await here.set("a", 1)
        one, other = await here.table_id(ONE), await here.table_id(OTHER)
        tables = [one, other]
        collecting = RowCollecting(here.history, lambda: tables, cast("Any", AsyncMock()))
        below = await here.now()
        await collecting.collect(ClusterSafePoints({one: below, other: below}, below))
        assert collecting.collected(other).below == below
        tables.remove(other)
        await collecting.collect(ClusterSafePoints({one: below}, below))
        assert set(here.history.tables) == {one}
