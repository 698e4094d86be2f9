"""A tablet's memory: ordered keys, live notifications, recent commits, rates."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.tablet import cells, opening
from percolator.tablet.cells import LockMirror, NotifyIndex, OrderedKeys, Rate, RecentWrites
from tests.simulation.virtual_time import VirtualClock
from tests.unit.tablet.tablets import (
    NOTIFY,
    Rig,
    delete,
    lock_record,
    mutation,
    prewrite,
    put,
    roll_back,
)

KEYS = st.binary(max_size=2)


@given(
    operations=st.lists(st.tuples(st.booleans(), KEYS), max_size=40),
    looks=st.lists(st.tuples(KEYS, st.none() | KEYS, st.booleans()), max_size=5),
)
def test_ordered_keys_always_look_like_a_sorted_set(
    operations: list[tuple[bool, bytes]], looks: list[tuple[bytes, bytes | None, bool]]
) -> None:
    ordered, model = OrderedKeys(), set[bytes]()
    for at, (adding, key) in enumerate(operations):
        if adding and key not in model:
            ordered.add(key)
            model.add(key)
        elif not adding and key in model:
            ordered.remove(key)
            model.remove(key)
        if looks and at % 3 == 0:
            start, stop, reverse = looks[at % len(looks)]
            inside = {one for one in model if start <= one and (stop is None or one < stop)}
            expected = sorted(inside, reverse=reverse)
            assert list(ordered.between(start, stop, reverse=reverse)) == expected
        assert len(ordered) == len(model)


def test_the_number_of_keys_that_wait_to_be_sorted_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise, the first scan after a million locks would stop the server for a second."""
    monkeypatch.setattr(cells, "UNSORTED_MAX", 4)
    ordered = OrderedKeys()
    for number in range(100):
        ordered.add(b"%03d" % number)
        assert len(ordered._unsorted) <= 4


# ---------------------------------------------------------------- locks


@given(
    operations=st.lists(st.tuples(KEYS, st.integers(0, 3)), max_size=40),
    below=st.integers(0, 4),
)
def test_whether_there_are_older_locks_is_always_known(
    operations: list[tuple[bytes, int]], below: int
) -> None:
    """0 removes the cell's lock; another number is the start of a lock that is put."""
    mirror, model = LockMirror(), dict[bytes, int]()
    for cell, start in operations:
        if start:
            mirror.put(cell, lock_record(start))
            model[cell] = start
        else:
            mirror.remove(cell)
            model.pop(cell, None)
        assert mirror.has_older(below) == any(one < below for one in model.values())
        assert len(mirror) == len(model)


# ---------------------------------------------------------------- notifications


def test_an_index_holds_a_limited_number_and_says_where_it_is_incomplete() -> None:
    index = NotifyIndex(2)
    missing = []
    for key in (b"a", b"b", b"b", b"d", b"c", b"e"):
        index.put(key)
        missing.append(index.missing_from)
    assert missing == [None, None, None, b"d", b"c", b"c"]
    assert not index.complete
    assert list(index.between(b"", None)) == [b"a", b"b"]
    assert not index.worth_filling
    index.remove(b"a")
    assert index.worth_filling


async def test_more_notifications_than_memory_holds_are_all_found() -> None:
    rig = await Rig(notifications_indexed_max=3).open()
    rows = [b"%d" % number for number in range(9)]
    await rig.apply(*(mutation(row, put(NOTIFY, b"", 5, b"f")) for row in rows))
    assert [cell.row for cell in await rig.cells(NOTIFY)] == rows
    assert rig.tablet.statistics().notifications == 3
    await rig.apply(*(mutation(row, delete(NOTIFY, 5, b"f")) for row in rows[:7]))
    assert [cell.row for cell in await rig.cells(NOTIFY)] == rows[7:]
    assert rig.tablet.statistics().notifications == 2  # filled again
    assert [cell.row for cell in await rig.cells(NOTIFY)] == rows[7:]


async def test_notifications_that_overflow_the_index_while_it_is_filled_are_found_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = await Rig(notifications_indexed_max=3).open()
    await rig.apply(*(mutation(row, put(NOTIFY, b"", 5, b"f")) for row in (b"p", b"q", b"r")))
    await rig.apply(*(mutation(row, put(NOTIFY, b"", 5, b"f")) for row in (b"s", b"t", b"u")))
    await rig.apply(*(mutation(row, delete(NOTIFY, 5, b"f")) for row in (b"p", b"q", b"r")))
    came: list[bytes] = []

    async def meanwhile(_: float) -> None:
        if not came:
            came.extend((b"a", b"b", b"c"))
            await rig.apply(*(mutation(row, put(NOTIFY, b"", 5, b"f")) for row in came))

    monkeypatch.setattr(opening, "_SLICE", 1)
    monkeypatch.setattr(opening, "asyncio", SimpleNamespace(sleep=meanwhile))
    expected = [b"a", b"b", b"c", b"s", b"t", b"u"]
    assert [cell.row for cell in await rig.cells(NOTIFY)] == expected
    await rig.apply(*(mutation(row, delete(NOTIFY, 5, b"f")) for row in (b"a", b"b", b"s")))
    for _ in range(2):
        assert [cell.row for cell in await rig.cells(NOTIFY)] == [b"c", b"t", b"u"]


async def test_counters_of_all_that_was_ever_written_never_shrink(rig: Rig) -> None:
    """`percolator wait` compares them: an equal count means that nothing came and went."""
    await rig.apply(mutation(b"a", put(NOTIFY, b"", 5, b"f")), prewrite(b"b", 10))
    await rig.apply(mutation(b"a", delete(NOTIFY, 5, b"f")), roll_back(b"b", 10))
    statistics = rig.tablet.statistics()
    assert (statistics.notifications, statistics.locks) == (0, 0)
    assert (statistics.notifications_written, statistics.locks_written) == (1, 1)


# ---------------------------------------------------------------- recent commits


@given(
    batches=st.lists(
        st.dictionaries(st.sampled_from([b"a", b"b", b"c", b"d"]), st.integers(1, 30), max_size=3),
        max_size=20,
    ),
    loaded=st.integers(0, 20),
)
def test_no_cell_was_ever_committed_above_its_bound(
    batches: list[dict[bytes, int]], loaded: int
) -> None:
    """Too low a bound lets a prewrite pass despite a newer commit: a lost update."""
    recent = RecentWrites(cells_max=1)
    recent.load(loaded, 0)
    newest = dict.fromkeys((b"a", b"b", b"c", b"d", b"never"), loaded)
    for committed in batches:
        recent.publish(committed, max(committed.values(), default=0), 0)
        for cell, at in committed.items():
            newest[cell] = max(newest[cell], at)
        for cell, at in newest.items():
            assert recent.bound(cell) >= at
        assert len(recent._young) + len(recent._old) <= 2 * (1 + 3)


def test_a_transaction_younger_than_all_that_is_remembered_needs_no_storage_read() -> None:
    recent = RecentWrites(cells_max=10)
    for start in range(1, 1000):
        recent.publish({b"%d" % start: start}, start, 0)
        assert recent.bound(b"other") < start


# ---------------------------------------------------------------- rates


async def test_a_rate_covers_the_last_ten_seconds() -> None:
    rate = Rate(VirtualClock(asyncio.get_running_loop()))
    assert rate.per_second() == 0
    rate.add(5)
    assert rate.per_second() == 5
    for _ in range(30):
        await asyncio.sleep(1)
        rate.add(100)
    assert 90 <= rate.per_second() <= 110
    await asyncio.sleep(20)
    assert rate.per_second() == 0
