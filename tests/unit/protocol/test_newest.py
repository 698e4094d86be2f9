"""Reads of one cell as it is now: when they take a timestamp all the same."""

from __future__ import annotations

from datetime import timedelta

import pytest

from percolator.aio import Database
from percolator.codecs import integer
from percolator.errors import InvalidArgument
from percolator.routing.catalog import Catalog, TableSchema
from percolator.routing.lanes import CellAnswer
from percolator.routing.router import Router
from percolator.schema import Table
from percolator.testing import connect_async
from percolator.wire.timestamp_source import TimestampSource

_accounts = Table("accounts")
_balance = _accounts.column("balance", integer)


def _timestamps(db: Database) -> int:
    timestamps = db._engine.timestamps
    assert isinstance(timestamps, TimestampSource)
    return timestamps.requests_answered


async def test_a_single_read_asks_for_no_timestamp_unless_it_meets_a_lock() -> None:
    """The lock is that of a transaction that has been acknowledged and not yet cleaned up."""
    async with connect_async() as db:
        await db.create_table(_accounts)
        async with db.transaction() as tx:
            await tx.set("bob", _balance, 1)
        before = _timestamps(db)
        assert await db.get("bob", _balance) == 1
        assert await db.get("joe", _balance, default=5) == 5
        assert _timestamps(db) == before
        two = db.transaction()
        two._only_two_phases = True
        await two.set("amy", _balance, 2)
        await two.set("bob", _balance, 2)
        await two.commit()  # bob is committed in the background
        before = _timestamps(db)
        assert await db.get("bob", _balance) == 2
        assert _timestamps(db) == before + 1
        assert await db.get("bob", _balance) == 2
        assert _timestamps(db) == before + 1


async def test_a_cell_whose_values_expire_takes_a_timestamp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if only its tablet knows that they do."""
    async with connect_async() as db:
        await db.create_table(_accounts, ttl={_balance: timedelta(hours=1)})
        async with db.transaction() as tx:
            await tx.set("bob", _balance, 1)
        before = _timestamps(db)
        assert await db.get("bob", _balance) == 1
        assert _timestamps(db) == before + 1
        monkeypatch.setattr(Catalog, "get", lambda *_: TableSchema())
        assert await db.get("bob", _balance) == 1
        assert _timestamps(db) == before + 2


async def test_another_refusal_of_a_single_read_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object) -> CellAnswer:
        raise InvalidArgument("reads[0].columns", "reserved")

    async with connect_async() as db:
        await db.create_table(_accounts)
        monkeypatch.setattr(Router, "read_cell", refused)
        with pytest.raises(InvalidArgument, match="columns"):
            await db.get("bob", _balance)
