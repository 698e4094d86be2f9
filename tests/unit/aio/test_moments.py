"""A datetime shows what was committed before its millisecond, and nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from percolator.aio import Database
from percolator.errors import InvalidArgument
from percolator.timestamps import Timestamp
from tests.unit.connected import accounts, balance, connected


async def at_the_first_timestamp_of_a_millisecond(db: Database) -> Timestamp:
    async with db.transaction() as tx:
        await tx.get("a", balance)
        await tx.set("a", balance, 1)
        await asyncio.sleep(1)
    assert tx.commit_timestamp is not None
    assert tx.commit_timestamp.sequence == 0
    return tx.commit_timestamp


async def test_a_datetime_does_not_show_a_commit_at_the_first_timestamp_of_its_millisecond() -> (
    None
):
    async with connected() as (db, _):
        await db.set_change_feed(accounts, on=True)
        begin = await db.timestamp()
        commit = await at_the_first_timestamp_of_a_millisecond(db)
        moment = commit.to_datetime()
        async with db.snapshot(at=moment) as snapshot:
            assert await snapshot.get("a", balance) is None
        async with db.snapshot(at=commit) as snapshot:
            assert await snapshot.get("a", balance) == 1
        now = await db.timestamp()
        until = [one async for one in db.changes(accounts, after=begin, until=moment)]
        after = [one async for one in db.changes(accounts, after=moment, until=now)]
        assert (len(until), len(after)) == (0, 1)


NAMED: dict[str, Callable[[Database, Any], object]] = {
    "at": lambda db, moment: db.snapshot(at=moment),
    "after": lambda db, moment: db.changes(accounts, after=moment),
    "until": lambda db, moment: db.changes(accounts, until=moment),
}


@pytest.mark.parametrize("field", NAMED)
@pytest.mark.parametrize(
    "moment",
    [
        datetime(2027, 1, 15, tzinfo=UTC).replace(tzinfo=None),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(9999, 1, 1, tzinfo=UTC),
        Timestamp(0),
        5,
    ],
    ids=str,
)
async def test_a_bad_moment_is_refused_by_the_name_of_its_argument(
    field: str, moment: object
) -> None:
    async with connected() as (db, _):
        with pytest.raises(InvalidArgument, match=f"^{field}: ") as refused:
            NAMED[field](db, moment)
        assert refused.value.field == field
