"""A bulk load in the change feed: all of its rows, at its commit timestamp, once it is visible."""

from __future__ import annotations

import pytest

from percolator.errors import SnapshotTooOld
from percolator.tablet.cells import F
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.change_feeds import changes, look
from tests.unit.tablet.tablets import COLUMN, Rig, written
from tests.unit.tablet.test_bulk_load import CLEAR, FINISH, LIFT, RAISE, fence, finish, load


async def fed(disk: DurableMemory | None = None) -> Rig:
    return await Rig(disk=disk, change_feed=True).open()


def under_schema_4(rows: list[bytes]) -> pb.LoadRequest:
    request = load(rows)
    request.target.schema_version = 4
    return request


async def test_its_rows_are_changes_at_its_commit_timestamp() -> None:
    disk = DurableMemory()
    rig = await fed(disk)
    await rig.tablet.fence(fence(RAISE))
    await rig.tablet.load(load([b"c"], value=b"short"))
    await rig.tablet.load(load([b"d"], value=b"long" * 999))
    await finish(rig)
    answer = await changes(rig, 0, 60)
    assert [(change.commit, change.row) for change in answer.changes] == [(51, b"c"), (51, b"d")]
    assert [change.value for change in answer.changes] == [b"short", b"long" * 999]
    # The values are stored only once.
    assert all(len(disk.durable[key]) == 9 for key in disk.durable if key[:1] == b"F" and key[1:])


async def test_reserved_columns_of_a_load_are_not_in_the_feed() -> None:
    rig = await fed()
    await rig.tablet.fence(fence(RAISE))
    await rig.tablet.load(load([b"c", b"d"], columns=[COLUMN, b"\0hidden"]))
    await finish(rig)
    assert [change.row for change in (await changes(rig, 0, 60)).changes] == [b"c"]


async def test_until_it_is_visible_the_feed_ends_below_it() -> None:
    rig = await fed()
    await rig.apply(written(b"a", 48, 49, b"v"))
    await rig.tablet.fence(fence(RAISE))
    await rig.tablet.load(load([b"c"]))
    await rig.apply(written(b"z", 52, 53, b"v"))
    for reached in (50, 50):
        answer = await changes(rig, 0, 60)
        assert (answer.reached, [change.row for change in answer.changes]) == (reached, [b"a"])
        assert await look(rig, 0, 60) == (reached, 49)
        await rig.tablet.fence(fence(FINISH, commit_timestamp=51))
    # Now its commit timestamp is known, and what is below that is not held up.
    assert (await changes(rig, 0, 50)).reached == 50
    await rig.tablet.fence(fence(LIFT))
    answer = await changes(rig, 50, 60)
    assert [change.row for change in answer.changes] == [b"c", b"z"]


async def test_what_an_earlier_run_has_loaded_is_not_shown_and_goes_when_it_is_cleared() -> None:
    disk = DurableMemory()
    rig = await fed(disk)
    await rig.tablet.fence(fence(RAISE))
    await rig.tablet.load(load([b"c"]))
    await rig.tablet.fence(fence(RAISE, run=60))
    answer = await changes(rig, 0, 70)
    assert (answer.reached, answer.changes) == (60, [])
    await rig.tablet.fence(fence(CLEAR, run=60))
    assert not [key for key in disk.durable if key.startswith(F)]


async def test_rows_that_were_loaded_before_the_feed_was_on_are_not_promised() -> None:
    rig = await Rig().open()
    await rig.tablet.fence(fence(RAISE))
    await rig.tablet.load(load([b"c"]))
    await rig.tablet.set_schema_version(4, change_feed=True)
    await rig.tablet.load(under_schema_4([b"d"]))
    assert (await changes(rig, 0, 60)).reached == 50
    await finish(rig)
    with pytest.raises(SnapshotTooOld, match="complete only from 51"):
        await changes(rig, 0, 60)
    assert (await changes(rig, 51, 60)).changes == []


async def test_a_load_that_began_after_the_feed_is_complete_in_it() -> None:
    rig = await Rig().open()
    await rig.tablet.fence(fence(RAISE, run=30))
    await rig.tablet.fence(fence(LIFT, run=30))
    await rig.tablet.set_schema_version(4, change_feed=True)
    await rig.tablet.fence(fence(RAISE))
    await rig.tablet.load(under_schema_4([b"d"]))
    await finish(rig)
    assert [change.row for change in (await changes(rig, 0, 60)).changes] == [b"d"]


async def test_a_load_that_is_cleared_while_the_feed_is_off_does_not_come_back() -> None:
    rig = await fed()
    await rig.tablet.fence(fence(RAISE))
    await rig.tablet.load(load([b"c"]))
    await rig.tablet.set_schema_version(4, change_feed=False)
    await rig.tablet.fence(fence(CLEAR))
    await rig.tablet.fence(fence(LIFT))
    await rig.tablet.set_schema_version(5, change_feed=True)
    assert (await changes(rig, 0, 60)).changes == []
