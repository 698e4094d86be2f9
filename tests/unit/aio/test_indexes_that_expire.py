"""Indexes over columns with a time to live: a row is found as long as it has its values.

Each rule is also left out once, to see that the tests notice it. The simulator judges those that
need no certain order of events (tests/simulation/planted_index_bugs.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from percolator import Column, ConflictError, Index, Table, UniqueViolation, codecs
from percolator.aio import Database, Transaction
from percolator.protocol import indexes
from tests.simulation.planted_index_bugs import (
    entries_are_found_after_their_values_have_expired,
    entries_that_stay_are_never_written_again,
    others_are_taken_to_have_expired,
)
from tests.unit.connected import put

HOUR = 3600.0
DAY = timedelta(days=1)

people = Table("people")
city = people.column("city", codecs.text, indexed=True)
street = people.column("street", codecs.text)
by_place = people.index("by place", city, street)
login = people.column("login", codecs.text)
by_login = people.index("by login", login, street, unique=True)
PLANTED = pytest.mark.parametrize("is_planted", [False, True], ids=["correct", "planted"])


@pytest.fixture(name="people_db")
@asynccontextmanager
async def with_people(db: Database) -> AsyncIterator[Database]:
    await db.create_table(people, ttl={city: DAY, login: DAY})
    yield db


async def found(
    db: Database, index: Index[str] | Column[Any], *values: str, **arguments: Any
) -> list[str]:
    async with db.snapshot() as snapshot:
        return [row.key async for row in snapshot.find(index, *values, **arguments)]


async def require_agreement(db: Database) -> None:
    for index in (city, by_place, by_login):
        assert await db.check_index(index) == []


@PLANTED
async def test_a_row_is_found_as_long_as_it_has_a_value_that_is_written_again(
    people_db: Database, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = people_db
    if is_planted:
        entries_that_stay_are_never_written_again(monkeypatch)
    await put(db, street, ann="Via A")
    await put(db, city, ann="Rome")
    for _ in range(2):
        await put(db, city, ann="Rome")
        await asyncio.sleep(18 * HOUR)
    await put(db, city, ann="Rome")
    await asyncio.sleep(18 * HOUR)
    rows = [] if is_planted else ["ann"]
    assert (await found(db, city, "Rome"), await found(db, by_place, "Rome")) == (rows, rows)
    assert (await db.check_index(city) == []) != is_planted
    await asyncio.sleep(6 * HOUR)
    assert (await found(db, city, "Rome"), await found(db, by_place, "Rome")) == ([], [])
    await require_agreement(db)


@PLANTED
@pytest.mark.parametrize("reverse", [False, True])
async def test_a_row_is_not_found_by_an_entry_that_outlives_its_values(
    people_db: Database, reverse: bool, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = people_db
    if is_planted:
        entries_are_found_after_their_values_have_expired(monkeypatch)
    rows = [f"row-{number:03}" for number in range(300)]
    await put(db, city, **dict.fromkeys(rows, "Rome"))
    await asyncio.sleep(18 * HOUR)
    await put(db, street, **dict.fromkeys(rows, "Via A"))
    await put(db, city, zoe="Rome", ann="Rome")
    await put(db, street, zoe="Via A", ann="Via A")
    await put(db, city, **{"row-000": "Rome", "row-150": "Rome", "row-299": "Rome"})
    assert len(await found(db, by_place, "Rome")) == 302
    await asyncio.sleep(7 * HOUR)
    lasting = ["ann", "row-000", "row-150", "row-299", "zoe"]
    lasting = lasting[::-1] if reverse else lasting
    if is_planted:
        assert len(await found(db, by_place, "Rome", reverse=reverse)) == 302
        return
    for limit in (None, 1, 2, 3, 4, 5, 6):
        assert await found(db, by_place, reverse=reverse, limit=limit) == lasting[:limit]
    await require_agreement(db)
    await asyncio.sleep(18 * HOUR)
    assert await entries_of(db, "by place") == 0


async def entries_of(db: Database, name: str) -> int:
    """How many entries are there, whatever they lead to."""
    info = await db.internal.engine.catalog.table("people", db.internal.engine.now() + 10.0)
    build = db._index(info, name, None)
    (index,) = [one for one in info.schema.indexes if one.name == name]
    reader = build._reader()
    return sum([len(page) async for page in build._pages(reader, index.table_id, (b"row",))])


async def test_a_row_that_changes_after_a_value_has_expired_is_found_by_its_new_ones(
    people_db: Database,
) -> None:
    db = people_db
    await put(db, city, ann="Rome")
    await asyncio.sleep(18 * HOUR)
    await put(db, street, ann="Via A")
    await asyncio.sleep(7 * HOUR)
    await put(db, city, ann="Bern")  # the former entry is still there
    assert await found(db, by_place) == ["ann"]
    assert await found(db, by_place, "Rome") == []
    await require_agreement(db)
    await put(db, city, ann="Rome")
    assert await found(db, by_place) == await found(db, by_place, "Rome", "Via A") == ["ann"]
    async with db.transaction() as tx:
        tx.delete("ann", city)
    assert await found(db, by_place) == []
    await require_agreement(db)


async def log_in(db: Database, row: str) -> None:
    async with db.transaction() as tx:
        tx.set(row, login, "a@x")
        tx.set(row, street, "Via A")


@PLANTED
async def test_a_unique_value_that_has_expired_can_be_given_to_another_row(
    people_db: Database, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = people_db
    await put(db, login, ann="a@x")
    await asyncio.sleep(18 * HOUR)
    await put(db, street, ann="Via A")
    if is_planted:
        others_are_taken_to_have_expired(monkeypatch)
        await log_in(db, "bob")
        assert await db.check_index(by_login) == ["row 'ann' has no entry"]
        return
    with pytest.raises(UniqueViolation):
        await log_in(db, "bob")
    await asyncio.sleep(7 * HOUR)
    await log_in(db, "bob")
    assert await found(db, by_login, "a@x") == ["bob"]
    async with db.transaction() as tx:
        tx.set("ann", street, "Via B")  # that entry is no longer its own
    await put(db, street, ann="Via A")
    assert await found(db, by_login, "a@x") == ["bob"]
    with pytest.raises(UniqueViolation) as caught:
        await put(db, login, ann="a@x")
    assert caught.value.rows == (b"ann", b"bob")
    await require_agreement(db)


@pytest.mark.parametrize("first", ["ann", "bob"])
async def test_of_two_rows_that_claim_an_expired_value_at_once_one_gets_it(
    people_db: Database, first: str
) -> None:
    db = people_db
    await put(db, login, ann="a@x")
    await asyncio.sleep(18 * HOUR)
    await put(db, street, ann="Via A")
    await asyncio.sleep(7 * HOUR)
    claims: dict[str, Transaction] = {row: db.transaction() for row in ("ann", "bob")}
    for row, tx in claims.items():
        await tx.timestamp()
        tx.set(row, login, "a@x")
        tx.set(row, street, "Via A")
    await claims.pop(first).commit()
    (other,) = claims.values()
    with pytest.raises(ConflictError):
        await other.commit()
    assert await found(db, by_login, "a@x") == [first]
    await require_agreement(db)


async def test_a_build_writes_again_what_is_older_than_its_values(
    people_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = people_db
    for row in ("ann", "kim"):
        await put(db, login, **{row: row})
        await put(db, street, **{row: "Via A"})
    await asyncio.sleep(18 * HOUR)
    with monkeypatch.context() as loaded:  # as a bulk load, which adds no entries
        loaded.setattr(indexes, "_rows_written", lambda *_: {})
        await put(db, login, ann="ann", kim="else")
    assert await db.create_index(by_login) == 2
    await asyncio.sleep(7 * HOUR)
    assert await found(db, by_login) == ["ann", "kim"]
    await require_agreement(db)


@pytest.mark.parametrize("both", [False, True])
async def test_a_build_takes_the_place_of_a_unique_entry_whose_values_have_expired(
    people_db: Database, both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = people_db
    await put(db, login, ann="a@x")
    await asyncio.sleep(18 * HOUR)
    await put(db, street, ann="Via A")
    await asyncio.sleep(7 * HOUR)
    with monkeypatch.context() as loaded:  # as a bulk load, which adds no entries
        loaded.setattr(indexes, "_rows_written", lambda *_: {})
        await log_in(db, "bob")
        if both:
            await put(db, login, ann="a@x")
    if both:
        with pytest.raises(UniqueViolation):
            await db.create_index(by_login)
        return
    await db.create_index(by_login)
    assert await found(db, by_login, "a@x") == ["bob"]
    await require_agreement(db)


async def test_a_check_reports_an_entry_that_no_expiry_explains(
    people_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = people_db
    await put(db, city, ann="Rome")
    await put(db, street, ann="Via A")
    with monkeypatch.context() as wrong:
        wrong.setattr(indexes, "_rows_written", lambda *_: {})
        await put(db, street, ann="Via B")
    assert await db.check_index(by_place) == [
        "row 'ann' has no entry",
        "row 'ann' has an entry for values that it does not have",
    ]
