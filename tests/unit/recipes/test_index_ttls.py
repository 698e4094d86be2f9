"""An index whose entries expire, as the column does: each write of the column renews both."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from percolator import codecs
from percolator.aio import Database
from percolator.recipes import Index
from percolator.v1.master_pb2 import SetTtlsRequest
from percolator.v1.tabletserver_pb2 import ColumnTtl
from tests.unit.connected import DistantMaster, accounts, connected, connected_to

HOUR = 3_600.0
DAY = timedelta(days=1)
city = accounts.column("city", codecs.text)


def _index(*, by_observer: bool) -> Index[str, str, str]:
    return Index("by city", on=city, value=codecs.text, by_observer=by_observer)


async def _set(db: Database, index: Index[str, str, str]) -> None:
    async with db.transaction() as tx:
        if not index.is_kept_by_observer:
            return await index.set(tx, "ann", "Rome")
        await tx.set("ann", city, "Rome")
    async with db.run_observers([index.observer()]):
        await db.wait_for_observers()


async def _require_agreement(db: Database, index: Index[str, str, str], found: list[str]) -> None:
    async with db.snapshot() as snapshot:
        assert await index.find(snapshot, "Rome") == found
        assert await index.check(snapshot) == []


@pytest.mark.parametrize("by_observer", [False, True])
async def test_a_value_that_is_written_again_stays_in_the_index_as_long_as_it_lives(
    by_observer: bool,
) -> None:
    index = _index(by_observer=by_observer)
    async with connected() as (db, _):
        await index.create(db)
        await db.set_ttl(city, DAY)
        for name in ("entry", "indexed"):
            await db.set_ttl(index.table.column(name, codecs.raw), DAY)
        for _ in range(3):
            await _set(db, index)
            await asyncio.sleep(18 * HOUR)
            await _require_agreement(db, index, ["ann"])
        await asyncio.sleep(18 * HOUR)
        await _require_agreement(db, index, [])


async def test_a_program_that_has_used_the_index_before_its_entries_expired_renews_them() -> None:
    index = _index(by_observer=False)
    async with connected_to(DistantMaster) as (db, cluster):
        await index.create(db)
        await _set(db, index)
        await asyncio.sleep(1.0)
        for table, name in (("accounts", b"city"), ("by city", b"entry"), ("by city", b"indexed")):
            ttl = ColumnTtl(column=name, ttl_milliseconds=86_400_000)
            await cluster.set_ttls(SetTtlsRequest(table=table, ttls=[ttl]))  # another program
        await asyncio.sleep(18 * HOUR)
        await _set(db, index)
        await asyncio.sleep(18 * HOUR)
        await _require_agreement(db, index, ["ann"])
