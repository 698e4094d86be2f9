"""Rows by the values of an index, through a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import pytest

from percolator import Table, codecs
from percolator.aio import find
from percolator.aio.index_build import IndexBuild
from percolator.errors import InvalidArgument, SchemaError
from percolator.protocol.indexes import BUILDING
from percolator.v1 import gateway_pb2 as pb
from tests.unit.gateway.gateways import Gateway

people = Table("people")
city = people.column("city", codecs.text, indexed=True)
age = people.column("age", codecs.integer)
email = people.column("email", codecs.text, unique=True)
by_place = people.index("by place", city, age)


def put(row: str, **values: str | int) -> list[pb.CellWrite]:
    return [
        pb.CellWrite(
            kind=pb.CellWrite.KIND_PUT,
            table="people",
            row=row.encode(),
            column=name.encode(),
            value=value.encode() if isinstance(value, str) else codecs.integer.encode(value),
        )
        for name, value in values.items()
    ]


@pytest.fixture
@asynccontextmanager
async def at(one: Gateway, other: Gateway) -> AsyncIterator[Gateway]:
    """A gateway; another one has written the rows."""
    await other.database.create_table(people)
    writes = [
        *put("ann", city="Rome", age=7, email="a@x"),
        *put("bob", city="Oslo", age=-3),
        *put("kim", city="Rome", age=-3),
        *put("zoe", city="Rom"),
    ]
    await other.commit(await other.begin(), writes)
    yield one


async def pages(gateway: Gateway, index: str, **request: Any) -> list[pb.FindRowsResponse]:
    start = request.pop("start_timestamp", 0) or await gateway.begin()
    asked = pb.FindRowsRequest(start_timestamp=start, table="people", index=index, **request)
    return [page async for page in gateway.handler.find_rows(asked)]


async def found(gateway: Gateway, index: str, **request: Any) -> list[str]:
    return [
        row.row.decode() for page in await pages(gateway, index, **request) for row in page.rows
    ]


async def test_rows_are_found_by_stored_values_in_the_order_of_the_index(at: Gateway) -> None:
    number = codecs.integer.encode
    assert await found(at, "city", values=[b"Rome"]) == ["ann", "kim"]
    assert await found(at, "city", values=[b"Ro"]) == []
    assert await found(at, "city", values=[b"R" * 100_000]) == [], "too long to have an entry"
    assert await found(at, "city", prefix=b"Ro") == ["zoe", "ann", "kim"]
    assert await found(at, "city", start=b"Rom", end=b"Rome") == ["zoe"]
    assert await found(at, "city", reverse=True, row_limit=2) == ["kim", "ann"]
    assert await found(at, "email") == ["ann"]
    assert await found(at, "by place") == ["bob", "kim", "ann"]
    assert await found(at, "by place", values=[b"Rome"], end=number(7)) == ["kim"]
    assert await found(at, "by place", values=[b"Rome", number(7)]) == ["ann"]
    assert await found(at, "by place", values=[b"Rome"], start=number(8), end=number(7)) == []


async def test_only_what_was_asked_for_is_shown_with_its_commit(at: Gateway) -> None:
    before = await at.begin()
    commit = await at.commit(before, put("bob", city="Rome"))
    (page,) = await pages(at, "city", values=[b"Rome"], columns=[b"age"], column_prefixes=[b"ci"])
    assert [row.row for row in page.rows] == [b"ann", b"bob", b"kim"]
    assert [(one.column, one.value) for one in page.rows[1].cells] == [
        (b"age", codecs.integer.encode(-3)),
        (b"city", b"Rome"),
    ]
    assert page.rows[1].cells[1].commit_timestamp == commit > page.rows[1].cells[0].commit_timestamp
    assert await found(at, "city", values=[b"Rome"], start_timestamp=before) == ["ann", "kim"]


async def test_a_call_continues_after_a_position(at: Gateway) -> None:
    for row in ("kim", "zoe"):
        await at.commit(await at.begin(), put(row, photo="x" * 900_000))
    for reverse in (False, True):
        all_pages = await pages(at, "city", reverse=reverse)
        assert len(all_pages) == 2
        rows = [[row.row for row in page.rows] for page in all_pages]
        for number, page in enumerate(all_pages):
            rest = await pages(at, "city", reverse=reverse, after=page.position)
            assert [row.row for page in rest for row in page.rows] == [*chain(*rows[number + 1 :])]
    (page,) = await pages(at, "by place", values=[b"Rome"], row_limit=1)
    assert await found(at, "by place", values=[b"Rome"], after=page.position) == ["ann"]
    assert await found(at, "by place", values=[b"Oslo"], after=page.position) == []


async def test_fewer_rows_are_read_at_once_if_they_are_large(
    at: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "BYTES_AT_ONCE", 100)
    rows = [f"row-{number:02d}" for number in range(20)]
    writes = [write for row in rows for write in put(row, city="Bonn", photo="x" * 40)]
    writes += put("row-07", photo_2="x" * 1_000)
    await at.commit(await at.begin(), writes)
    assert await found(at, "city", values=[b"Bonn"]) == rows
    assert await found(at, "city", values=[b"Bonn"], row_limit=9) == rows[:9]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no index": ({"index": ""}, "^index: is missing"),
    "no table": ({"table": ""}, "^table: is missing"),
    "too many values": (
        {"values": [b"a", b"b"]},
        "^values: index 'city' has 1 column, got 2 values",
    ),
    "no column left": ({"values": [b"a"], "prefix": b""}, "^prefix: index 'city' has no column"),
    "no text": ({"values": [b"\xff"]}, r"^values\[0\]: column 'city': "),
    "no text to begin with": ({"start": b"\xff"}, "^start: column 'city': "),
    "no text to end with": ({"end": b"\xff"}, "^end: column 'city': "),
    "half a letter": ({"prefix": "ä".encode()[:1]}, "^prefix: column 'city': "),
    "no number": ({"index": "by place", "values": [b"a", b"7"]}, r"^values\[1\]: column 'age'"),
    "a prefix of a number": (
        {"index": "by place", "values": [b"a"], "prefix": b"7"},
        "^prefix: values of codec integer have no prefixes",
    ),
    "a long position": ({"after": b"v" * 5_000}, "^after: has 5000 bytes"),
    "a bad column": ({"columns": [b"\0"]}, r"^columns\[0\]: begins with 00"),
    "a future timestamp": ({"start_timestamp": 1 << 63}, "^start_timestamp: .* future"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_requests_are_refused(case: str, at: Gateway) -> None:
    changed, reason = BAD[case]
    request = {"start_timestamp": await at.begin(), "table": "people", "index": "city", **changed}
    with pytest.raises(InvalidArgument, match=reason):
        async for _ in at.handler.find_rows(pb.FindRowsRequest(**request)):
            pass


async def test_an_index_that_cannot_answer_says_why(at: Gateway, other: Gateway) -> None:
    with pytest.raises(SchemaError, match="table 'people' has no index 'age'"):
        await found(at, "age")
    before = await at.begin()
    assert await found(at, "city", values=[b"Oslo"]) == ["bob"]
    await other.database.drop_index(people, "city")
    with pytest.raises(SchemaError, match="has no index 'city'"):
        await found(at, "city")
    await other.database.create_index(city)
    assert await found(at, "city", values=[b"Oslo"]) == ["bob"]
    with pytest.raises(SchemaError, match=r"'city' was completed after the snapshot, .* newer"):
        await found(at, "city", start_timestamp=before)
    engine = other.database.internal.engine
    info = await engine.catalog.table("people", engine.now() + 1)
    (index,) = [one for one in info.schema.indexes if one.name == "city"]
    await IndexBuild(other.database, engine, info.table_id, index, 1).mark(BUILDING)
    with pytest.raises(SchemaError, match=r"'city' is not complete at .* is being built"):
        await found(at, "city")
