"""Values that expire: whether they are visible depends on three numbers, and on nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from percolator.errors import InvalidArgument, NotReady, SchemaChanged
from percolator.tablet import collection
from percolator.tablet.collection import Sweep
from percolator.tablet.state import SafePoints
from percolator.timestamps import NEWEST, SEQUENCE_BITS, expires_at, is_expired
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.change_feeds import before, changes
from tests.unit.tablet.collecting import (
    DELETE,
    IN_DATA,
    LOCK_ONLY,
    collected,
    in_data,
    notified,
    record,
    stored,
)
from tests.unit.tablet.tablets import (
    COLUMN,
    DATA,
    NOTIFY,
    TARGET,
    WRITE,
    Rig,
    delete,
    mutation,
    put,
    write_record,
    written,
)

TTL = 100
TTLS = ((COLUMN, TTL),)


def ms(milliseconds: int, sequence: int = 0) -> int:
    return milliseconds << SEQUENCE_BITS | sequence


async def _rig(**fields: object) -> Rig:
    return await Rig(ttls=TTLS, **fields).open()  # type: ignore[arg-type]


@pytest.mark.parametrize("sequence", [0, 7, (1 << SEQUENCE_BITS) - 1])
def test_only_the_milliseconds_of_both_timestamps_count(sequence: int) -> None:
    commit = ms(1_000, sequence)
    assert not is_expired(commit, ms(1_099, (1 << SEQUENCE_BITS) - 1), TTL)
    assert is_expired(commit, ms(1_100), TTL)
    assert expires_at(commit, TTL) == ms(1_100)


async def _seen(rig: Rig, row: bytes, timestamp: int) -> list[bytes | None]:
    """What each way of reading says about the cell."""
    read = pb.RowRead(row=row, all_columns=True, timestamp=timestamp)
    whole = (await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))).found.values
    forwards = [value for page in await rig.scan(timestamp) for value in page.found.values]
    named = [
        value for page in await rig.scan(timestamp, columns=[COLUMN]) for value in page.found.values
    ]
    backwards = [
        value for page in await rig.scan(timestamp, reverse=True) for value in page.found.values
    ]
    ways = [list(whole), forwards, named, backwards]
    return [await rig.value(row, timestamp), *(one[0] if one else None for one in ways)]


async def test_a_value_is_visible_until_its_time_is_over_and_the_one_before_stays_hidden() -> None:
    rig = await _rig()
    await rig.apply(
        written(b"a", ms(1_000), ms(1_001), b"old"), written(b"a", ms(1_049), ms(1_050), b"new")
    )
    assert await _seen(rig, b"a", ms(1_040)) == [b"old"] * 5
    assert await _seen(rig, b"a", ms(1_149, 9)) == [b"new"] * 5
    assert await _seen(rig, b"a", ms(1_150)) == [None] * 5
    assert await _seen(rig, b"a", ms(9_999)) == [None] * 5
    assert await _seen(rig, b"a", ms(1_040)) == [b"old"] * 5, "although it is read later"


async def test_other_columns_do_not_expire() -> None:
    rig = await _rig()
    change = put(WRITE, write_record(ms(1), b"stays"), ms(2))
    await rig.apply(mutation(b"a", change, column=b"other"), written(b"a", ms(1), ms(2), b"goes"))
    pages = await rig.scan(ms(5_000))
    assert [value for page in pages for value in page.found.values] == [b"stays"]


async def test_an_expired_value_is_reported_as_a_deletion_at_its_commit() -> None:
    rig = await _rig()
    await rig.apply(written(b"a", ms(1), ms(2), b"v"))
    for fields in ({"columns": [COLUMN]}, {"all_columns": True}):
        read = pb.RowRead(row=b"a", timestamp=ms(500), report_deletes=True, **fields)
        found = (await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))).found
        assert (list(found.commit_timestamps), list(found.deletes)) == ([ms(2)], [0])
        assert list(found.values) == [b""]


async def test_locks_above_an_expired_value_do_not_bring_it_back() -> None:
    rig = await _rig()
    await rig.apply(written(b"a", ms(1), ms(2), b"v"), record(b"a", ms(90), ms(95), LOCK_ONLY))
    assert await _seen(rig, b"a", ms(101)) == [b"v"] * 5
    assert await _seen(rig, b"a", ms(102)) == [None] * 5


async def test_a_long_value_expires_as_well_and_leaves_nothing() -> None:
    rig = await _rig()
    await rig.apply(in_data(b"a", ms(1), ms(2), b"long"))
    assert await _seen(rig, b"a", ms(101)) == [b"long"] * 5
    assert await _seen(rig, b"a", ms(102)) == [None] * 5
    assert await collected(rig, ms(102)) == 2
    assert await stored(rig, DATA) == await stored(rig, WRITE) == []


async def test_what_is_newest_cannot_be_read_without_a_timestamp() -> None:
    rig = await _rig()
    await rig.apply(written(b"a", ms(1), ms(2), b"v"))
    for columns in ([COLUMN], [b"other", COLUMN]):
        answer = await rig.read(b"a", NEWEST, *columns)
        assert not answer.found.values
        assert answer.refused[0].error.invalid_argument.field == "reads[0].timestamp"
    assert not (await rig.read(b"a", NEWEST, b"other")).refused


async def test_a_change_shows_its_value_and_nothing_before_it_that_had_expired() -> None:
    rig = await _rig(change_feed=True)
    for commit in (1_000, 1_100, 1_201):
        await rig.apply(written(b"a", ms(commit) - 1, ms(commit), b"%d" % commit))
    answer = await changes(rig, 0, ms(5_000), before=True)
    assert [change.value for change in answer.changes] == [b"1000", b"1100", b"1201"]
    assert [one for page in answer.pages for one in before(page)] == [None, b"1000", None]


# ---------------------------------------------------------------------------- collection


async def test_an_expired_value_is_collected_like_a_deletion() -> None:
    rig = await _rig()
    await rig.apply(written(b"a", ms(1), ms(2), b"old"), written(b"a", ms(3), ms(4), b"new"))
    assert await collected(rig, ms(103)) == 1, "the superseded one"
    assert await rig.value(b"a", ms(103)) == b"new"
    assert await collected(rig, ms(104)) == 1, "although nothing was committed since"
    assert await stored(rig, WRITE) == []


async def test_values_that_expire_later_are_not_looked_at_before() -> None:
    rig = await _rig()
    await rig.apply(written(b"a", ms(1), ms(2)), written(b"b", ms(5), ms(6)))
    await collected(rig, ms(50))
    assert rig.tablet.collected.more_at == ms(102)
    assert await collected(rig, ms(103)) == 1
    assert rig.tablet.collected.more_at == ms(106)


async def test_a_value_that_is_hidden_by_a_younger_one_above_the_safe_point_goes_too() -> None:
    rig = await _rig()
    await rig.apply(written(b"a", ms(1), ms(2), b"old"), written(b"a", ms(200), ms(201), b"new"))
    assert await collected(rig, ms(150)) == 1
    assert await rig.value(b"a", ms(150)) is None
    assert await rig.value(b"a", ms(250)) == b"new"


async def test_an_expired_value_stays_until_its_observers_have_seen_it() -> None:
    rig = await _rig()
    await rig.apply(written(b"a", ms(1), ms(2)), notified(b"a", ms(2)))
    assert await collected(rig, ms(200)) == 0
    await rig.apply(mutation(b"a", delete(NOTIFY, ms(2), b"observer")))
    assert await collected(rig, ms(200)) == 1


async def test_a_deletion_in_such_a_column_is_collected_without_waiting() -> None:
    rig = await _rig()
    await rig.apply(written(b"a", ms(1), ms(2)), record(b"a", ms(3), ms(4), DELETE))
    assert await collected(rig, ms(5)) == 2


# ---------------------------------------------------------------------------- changes of it


async def test_a_changed_time_to_live_applies_to_what_is_there() -> None:
    rig = await _rig()
    await rig.apply(written(b"a", ms(1), ms(2), b"v"))
    assert await rig.value(b"a", ms(150)) is None
    await rig.tablet.set_schema_version(4, ttls=((COLUMN, 200),))
    target = pb.TabletTarget(tablet_id=1, epoch=2, schema_version=4)
    read = pb.RowRead(row=b"a", columns=[COLUMN], timestamp=ms(150))
    found = (await rig.tablet.read(pb.ReadBatch(target=target, reads=[read]))).found
    assert list(found.values) == [b"v"]
    await rig.tablet.set_schema_version(3, ttls=())
    read.timestamp = ms(202)
    found = (await rig.tablet.read(pb.ReadBatch(target=target, reads=[read]))).found
    assert not found.values, "an older schema came late"


async def test_a_shorter_time_to_live_is_collected_although_nothing_was_committed() -> None:
    rig = await _rig()
    await rig.apply(written(b"a", ms(1), ms(2), b"v"))
    assert await collected(rig, ms(90)) == 0
    await rig.tablet.set_schema_version(4, ttls=((COLUMN, 10),))
    assert await collected(rig, ms(91)) == 1


async def test_a_time_to_live_that_changes_during_collection_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader may have begun with the new one, and be about to fetch a value apart from it."""
    rig = await _rig()
    await rig.apply(in_data(b"a", ms(1), ms(2), b"long"))
    await rig.tablet.raise_safe_points(SafePoints(ms(150), ms(150)))
    reached, go_on = asyncio.Event(), asyncio.Event()
    write = Sweep.write

    async def late(self: Sweep) -> None:
        reached.set()
        await go_on.wait()
        await write(self)

    monkeypatch.setattr(Sweep, "write", late)
    collecting = asyncio.ensure_future(rig.tablet.collect(ms(150)))
    await reached.wait()
    await rig.tablet.set_schema_version(4, ttls=())
    go_on.set()
    with pytest.raises(NotReady, match="were changed during its collection"):
        await collecting
    monkeypatch.undo()
    assert (await rig.tablet.collect(ms(150))).cells == 0
    await rig.tablet.set_schema_version(5, ttls=TTLS)
    assert (await rig.tablet.collect(ms(150))).cells == 2, "they were still there"


async def test_a_time_to_live_that_changes_while_what_was_collected_is_compacted_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else would have the tablet look again: nothing is committed any more."""
    rig = await Rig().open()
    await rig.apply(written(b"a", ms(1), ms(2), b"old"), written(b"a", ms(3), ms(4), b"new"))

    async def compacted(_: object) -> None:
        await rig.tablet.set_schema_version(4, ttls=TTLS)

    with monkeypatch.context() as patch:
        patch.setattr(collection, "compact_heavy", compacted)
        assert await collected(rig, ms(90)) == 1
    assert await collected(rig, ms(150)) == 1, "the expired one"


async def test_a_longer_time_to_live_waits_for_the_deletion_that_is_being_written() -> None:
    """Readers would go by it at once, and find the record of a value that is gone with it."""
    rig = await _rig()
    await rig.apply(in_data(b"a", ms(1), ms(2), b"long"))
    await rig.tablet.raise_safe_points(SafePoints(ms(150), ms(150)))
    writes = rig.disk.writes  # type: ignore[attr-defined]
    collecting = asyncio.ensure_future(rig.tablet.collect(ms(150)))
    await asyncio.sleep(1.5)
    assert rig.disk.writes == writes + 2  # type: ignore[attr-defined]
    # The safe point was first; the deletion is on its way.
    altering = asyncio.ensure_future(rig.tablet.set_schema_version(4, ttls=()))
    await asyncio.sleep(0.1)
    assert not altering.done()
    assert rig.tablet.schema_version == 3
    assert await rig.value(b"a", ms(200)) is None
    target = pb.TabletTarget(tablet_id=1, epoch=2, schema_version=4)
    read = pb.ReadBatch(
        target=target, reads=[pb.RowRead(row=b"a", columns=[COLUMN], timestamp=ms(200))]
    )
    with pytest.raises(SchemaChanged, match="at version 3"):
        await rig.tablet.read(read)
    await altering
    assert (await collecting).cells == 2
    assert not (await rig.tablet.read(read)).found.values


Reading = Callable[[Rig], Coroutine[Any, Any, object]]


def _scan(**fields: Any) -> Reading:
    return lambda rig: rig.scan(ms(155), **fields)


async def _whole_row(rig: Rig) -> object:
    read = pb.RowRead(row=b"row", all_columns=True, timestamp=ms(155))
    return await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))


def _changes(rig: Rig) -> Coroutine[Any, Any, object]:
    return changes(rig, ms(155), ms(200), before=True)


@pytest.mark.parametrize("reading", [_scan(), _scan(reverse=True), _whole_row, _changes])
async def test_a_reader_whose_values_are_collected_under_a_shorter_time_to_live_asks_again(
    reading: Reading,
) -> None:
    """It began under the longer one, and values apart from their records are read as they are."""
    rig = await Rig(slice_entries=4, change_feed=True).open()
    columns = [b"c%02d" % number for number in range(20)]
    for start, end in ((ms(1), ms(2)), (ms(160), ms(161))):
        pointer = put(WRITE, write_record(start, b"", IN_DATA), end)
        value = put(DATA, b"long", start)
        await rig.apply(*(mutation(b"row", pointer, value, column=column) for column in columns))
    begun = reading(rig)
    begun.send(None)  # it has read some, and lets others go on
    await rig.tablet.set_schema_version(4, ttls=tuple((column, TTL) for column in columns))
    assert await collected(rig, ms(150)) == 2 * len(columns)
    with pytest.raises(SchemaChanged, match="at version 4"):
        await asyncio.ensure_future(begun)


async def test_a_bad_column_of_a_read_is_still_named() -> None:
    rig = await _rig(columns_max=1)
    with pytest.raises(InvalidArgument, match=r"reads\[0\].columns"):
        await rig.read(b"a", NEWEST, COLUMN, b"other")
