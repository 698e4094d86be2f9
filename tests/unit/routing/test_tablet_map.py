"""The map finds rows, and learns only what is newer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.errors import SchemaError, TabletLocation, Unavailable
from percolator.routing.catalog import TabletMap

from .tablet_servers import tablet


def _map(*locations: TabletLocation) -> TabletMap:
    tablets = TabletMap()
    tablets.learn(locations)
    return tablets


def test_a_row_is_in_the_tablet_whose_range_holds_it() -> None:
    tablets = _map(tablet("a:1", b"", b"m"), tablet("b:1", b"m", b"", tablet_id=2))
    found = [tablets.locate(1, row) for row in (b"", b"l\xff", b"m", b"z")]
    assert [location and location.address for location in found] == ["a:1", "a:1", "b:1", "b:1"]
    assert tablets.locate(2, b"a") is None


def test_the_last_rows_below_an_end_are_in_the_tablet_before_it() -> None:
    tablets = _map(tablet("a:1", b"", b"m"), tablet("b:1", b"m", b"", tablet_id=2))
    found = [tablets.locate_below(1, end) for end in (b"a", b"m", b"m\x00", b"")]
    assert [location and location.address for location in found] == ["a:1", "a:1", "b:1", "b:1"]


def test_a_row_in_a_gap_is_not_located() -> None:
    tablets = _map(tablet("a:1", b"b", b"d"), tablet("b:1", b"f", b"h", tablet_id=2))
    assert [tablets.locate(1, row) for row in (b"a", b"d", b"e", b"h")] == [None] * 4
    assert [tablets.locate_below(1, end) for end in (b"b", b"e", b"f", b"", b"a")] == [None] * 5


def test_children_take_the_place_of_their_parent() -> None:
    tablets = _map(tablet("a:1"))
    tablets.learn([tablet("a:1", b"", b"m", tablet_id=2), tablet("b:1", b"m", b"", tablet_id=3)])
    assert [location.tablet_id for location in tablets.tablets(1)] == [2, 3]


def test_an_older_epoch_changes_nothing() -> None:
    tablets = _map(tablet("b:1", epoch=3))
    tablets.learn([tablet("a:1", epoch=2)])
    assert [location.address for location in tablets.tablets(1)] == ["b:1"]


def test_a_tablet_without_a_server_leaves_a_gap() -> None:
    tablets = _map(tablet("a:1", epoch=3))
    tablets.learn([tablet("", epoch=4)])
    assert tablets.locate(1, b"row") is None


async def test_for_a_silent_server_each_of_its_tables_is_looked_up_once() -> None:
    asked: list[tuple[int, bytes]] = []

    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        asked.append((table_id, row))
        return []

    tablets = TabletMap(find)
    tablets.learn(
        [
            tablet("b:1", b"", b"c"),
            tablet("a:1", b"c", b"m", tablet_id=2),
            tablet("a:1", b"m", b"", tablet_id=3),
            TabletLocation(2, 7, 1, b"", b"", "a:1"),
            TabletLocation(3, 8, 1, b"", b"", "b:1"),
        ]
    )
    await tablets.refresh_server("a:1")
    assert sorted(asked) == [(1, b"c"), (2, b"")]


class _Pages:
    """A master that lists two tablets at a time, from the tablet of the row on."""

    def __init__(self, *addresses: str) -> None:
        bounds = [b"", *(bytes([one]) for one in b"bcdefgh"[: len(addresses) - 1]), b""]
        self.now_at = [
            tablet(address, bounds[at], bounds[at + 1], tablet_id=at + 1)
            for at, address in enumerate(addresses)
        ]
        self.asked: list[bytes] = []

    async def find(self, table_id: int, row: bytes) -> list[TabletLocation]:
        self.asked.append(row)
        await asyncio.sleep(0.1)
        return [one for one in self.now_at if not one.end or row < one.end][:2]


async def test_a_caller_shares_only_a_search_that_is_about_its_row() -> None:
    pages = _Pages("a:1", "b:1", "c:1", "d:1", "e:1")
    tablets = TabletMap(pages.find)
    rows = [b"b", b"c", b"a", b"e", b"bb"]
    found = await asyncio.gather(*(tablets.located(1, row) for row in rows))
    assert [one.address for one in found] == ["b:1", "c:1", "a:1", "e:1", "b:1"]
    assert pages.asked == [b"b", b"a", b"e"]


async def test_for_a_silent_server_all_of_its_tablets_are_looked_up() -> None:
    """A master lists the tablets of a large table in pages."""
    pages = _Pages("a:1", "b:1", "a:1", "b:1", "b:1", "b:1", "a:1")
    tablets = TabletMap(pages.find)
    tablets.learn(pages.now_at)
    pages.now_at[-1] = replace(pages.now_at[-1], epoch=2, address="c:1")
    await tablets.refresh_server("a:1")
    assert [one.address for one in tablets.tablets(1)] == [
        *("a:1", "b:1", "a:1", "b:1", "b:1", "b:1", "c:1")
    ]
    assert pages.asked == [b"", b"c", b"g"]


async def test_a_search_that_fails_after_its_caller_was_cancelled_logs_nothing() -> None:
    """conftest.py refuses what the event loop would log."""

    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        await asyncio.sleep(1.0)
        raise Unavailable("no master answers")

    tablets = TabletMap(find)
    for leaves_after in (0.5, 1.0):
        asking = asyncio.create_task(tablets.refresh(1, b"row"))
        await asyncio.sleep(leaves_after)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.sleep(2.0)
    with pytest.raises(Unavailable):
        await tablets.refresh(1, b"row")


async def test_a_deleted_table_does_not_keep_others_from_being_found() -> None:
    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        if table_id == 2:
            raise SchemaError("there is no table with the id 2")
        return [tablet("b:1", epoch=3)]

    tablets = TabletMap(find)
    tablets.learn([tablet("a:1", epoch=2), TabletLocation(2, 7, 1, b"", b"", "a:1")])
    await tablets.refresh_server("a:1")
    assert [location.address for location in tablets.tablets(1)] == ["b:1"]
    assert tablets.tablets(2) == []


@given(st.lists(st.binary(max_size=3), min_size=1, max_size=8, unique=True), st.binary(max_size=4))
def test_every_row_of_a_table_without_gaps_is_found(splits: list[bytes], row: bytes) -> None:
    bounds = sorted({b"", *splits})
    ends = [*bounds[1:], b""]
    tablets = _map(
        *(
            tablet("a:1", start, end, tablet_id=index)
            for index, (start, end) in enumerate(zip(bounds, ends, strict=True))
        )
    )
    found = tablets.locate(1, row)
    assert found is not None
    assert found.start <= row
    assert not found.end or row < found.end
    below = tablets.locate_below(1, row)
    if row:
        assert below is not None
        assert below.start < row
        assert not below.end or row <= below.end


async def test_a_search_that_has_just_ended_holds_up_nobody_who_asks_about_other_rows() -> None:
    """Its task is done a turn of the event loop before others hear of that."""
    answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def find(_: int, row: bytes) -> list[TabletLocation]:
        if row == b"a":
            await answered
            return [tablet("a:1", b"", b"m")]
        return [tablet("b:1", b"m", b"", tablet_id=2)]

    tablets = TabletMap(find)

    async def asks_when_the_first_search_ends() -> None:
        await answered
        await tablets.refresh(1, b"z")

    first = asyncio.create_task(tablets.refresh(1, b"a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.create_task(asks_when_the_first_search_ends())
    await asyncio.sleep(0)
    answered.set_result(None)
    await asyncio.gather(first, second)
    assert [location.address for location in tablets.tablets(1)] == ["a:1", "b:1"]


class _Row(bytes):
    """A row that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: bytes) -> bool:
        _Row.compared += 1
        return bytes.__lt__(self, other)

    def __le__(self, other: bytes) -> bool:
        _Row.compared += 1
        return bytes.__le__(self, other)

    def __eq__(self, other: object) -> bool:
        _Row.compared += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


def test_learning_of_a_tablet_takes_no_longer_when_many_others_are_known() -> None:
    """Otherwise clients of a large table stand still while a master tells them where it is now."""
    rows = [_Row(b""), *(_Row(b"%04d" % number) for number in range(1, 2_000)), _Row(b"")]
    known = [
        tablet("a:1", start, end, tablet_id=number)
        for number, (start, end) in enumerate(pairwise(rows), start=1)
    ]
    tablets = _map(*known)
    _Row.compared = 0
    tablets.learn(replace(one, epoch=2, address="b:1") for one in known)
    assert {location.address for location in tablets.tablets(1)} == {"b:1"}
    assert _Row.compared < 100 * len(known)
