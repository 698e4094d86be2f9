"""A tablet whose log is in a bucket loses nothing with its server, and shows nothing unproved."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator.bucket.checkpoint import POSITION_KEY, Position
from percolator.errors import NotReady, StoreFault, StoreUnusable, TabletMoved
from percolator.services.tabletserver.bucket_store import LogSettings, NotAppended
from percolator.services.tabletserver.storage import Ancestry
from percolator.tablet.state import TabletIdentity
from tests.doubles.bucket_in_memory import BucketFaults
from tests.unit.tabletserver.bucket_scene import FEW, Scene, content, put, quiet, scene

HOSTILE = BucketFaults(
    lost_request=0.05,
    lost_answer=0.05,
    late_request=0.05,
    late_answer=0.05,
    failed_before=0.05,
    failed_after_success=0.05,
    list_delay_seconds=3.0,
)


@pytest.fixture
@asynccontextmanager
async def many() -> AsyncIterator[Scene]:
    """Checkpoints are far away."""
    async with scene() as found:
        yield found


@pytest.fixture
@asynccontextmanager
async def few() -> AsyncIterator[Scene]:
    """A checkpoint is due after ten entries."""
    async with scene(settings=FEW) as found:
        yield found


# ------------------------------------------------------------------- owning a tablet


async def test_another_machine_finds_everything_that_was_acknowledged(many: Scene) -> None:
    former = await many.machine().serve()
    await put(former, a="1", b="2")
    await put(former, a="3")
    later = await many.machine().serve(epoch=2)
    assert content(later) == {"a": "3", "b": "2"}


async def test_a_former_owner_writes_nothing_and_answers_nothing(many: Scene) -> None:
    machine = many.machine()
    ownership = await machine.own()
    former = await machine.open(ownership)
    await put(former, a="1")
    assert await ownership.is_held()
    later = await many.machine().serve(epoch=2)
    assert ownership.is_held_blocking()  # it has not heard of it yet
    batch = former.batch()
    batch.put(b"a", b"2")
    assert not await former.write(batch, ownership.is_held_blocking)
    assert not ownership.is_held_blocking()
    assert not await ownership.is_held()
    with pytest.raises(NotAppended):
        await put(former, a="3")
    assert content(former) == content(later) == {"a": "1"}


async def test_a_look_at_the_bucket_finds_the_later_owner(many: Scene) -> None:
    ownership = await many.machine().own()
    await many.machine().own(epoch=2)
    assert not await ownership.is_held()


async def test_an_epoch_that_is_too_late_is_told_the_highest_one(many: Scene) -> None:
    await many.machine().own(epoch=7)
    with pytest.raises(TabletMoved) as refused:
        await many.machine().own(epoch=6)
    assert refused.value.highest_epoch == 7


@pytest.mark.parametrize("ancestry", [Ancestry(must_exist=True), Ancestry(True, served_epoch=3)])
async def test_a_tablet_that_was_served_and_has_no_log_is_damaged(
    many: Scene, ancestry: Ancestry
) -> None:
    with pytest.raises(StoreUnusable) as refused:
        await many.machine().own(epoch=4, ancestry=ancestry)
    assert refused.value.fault is StoreFault.DAMAGED


async def test_nothing_of_a_batch_is_seen_before_it_is_in_the_log(many: Scene) -> None:
    storage = await many.machine().serve()
    await put(storage, a="1")
    many.objects.answers.clear()
    writing = asyncio.ensure_future(put(storage, a="2"))
    await asyncio.sleep(0.5)
    assert content(storage) == {"a": "1"}
    many.objects.answers.set()
    await writing
    assert content(storage) == {"a": "2"}


# ------------------------------------------------------------------- a bucket that is silent


async def test_a_silent_bucket_takes_no_ownership_away_and_proves_none(many: Scene) -> None:
    machine = many.machine()
    ownership = await machine.own()
    storage = await machine.open(ownership)
    many.objects.answers.clear()
    with pytest.raises(NotReady):
        await ownership.is_held()
    many.objects.answers.set()
    assert await ownership.is_held()
    await put(storage, a="1")


@pytest.mark.parametrize("arrives", [False, True])
async def test_after_an_unknown_outcome_nothing_is_done_until_the_tablet_is_opened_again(
    many: Scene, arrives: bool
) -> None:
    machine = many.machine()
    ownership = await machine.own()
    storage = await machine.open(ownership)
    await put(storage, a="1")
    lost = BucketFaults(lost_answer=1.0) if arrives else BucketFaults(lost_request=1.0)
    many.objects.faults = lost
    with pytest.raises(NotAppended):
        await put(storage, a="2")
    many.objects.faults = BucketFaults(call_seconds=0.0)
    with pytest.raises(NotReady):
        await ownership.is_held()
    with pytest.raises(NotAppended):
        await put(storage, a="3")
    await storage.close()
    again = await machine.open(ownership)
    assert content(again) == {"a": "2" if arrives else "1"}
    assert await ownership.is_held()
    await put(again, b="1")
    later = await many.machine().serve(epoch=2)
    assert content(later) == content(again)


async def test_a_tablet_that_was_lost_meanwhile_is_not_opened_again(many: Scene) -> None:
    machine = many.machine()
    ownership = await machine.own()
    storage = await machine.open(ownership)
    many.objects.faults = BucketFaults(lost_request=1.0)
    with pytest.raises(NotAppended):
        await put(storage, a="1")
    many.objects.faults = BucketFaults(call_seconds=0.0)
    await storage.close()
    await many.machine().own(epoch=2)
    with pytest.raises(StoreUnusable):
        await machine.open(ownership)
    assert not await ownership.is_held()


async def test_a_takeover_that_the_bucket_does_not_answer_is_refused_with_its_cause(
    many: Scene,
) -> None:
    many.objects.answers.clear()
    with pytest.raises(StoreUnusable, match="no answer") as refused:
        await many.machine().own()
    assert refused.value.fault is StoreFault.INPUT_OUTPUT


async def test_with_a_lease_a_tablet_is_read_without_the_bucket_and_its_successor_waits() -> None:
    async with scene(settings=LogSettings(lease_seconds=3.0)) as found:
        ownership = await found.machine().own()
        found.objects.answers.clear()
        assert await ownership.is_held()
        found.objects.answers.set()
        began = found.clock.monotonic_seconds()
        await put(await found.machine().serve(epoch=2), a="1")
        assert found.clock.monotonic_seconds() - began >= 3.0
        assert not await ownership.is_held()


# ------------------------------------------------------------------- checkpoints


async def test_after_a_checkpoint_few_entries_are_left_to_read(few: Scene) -> None:
    storage = await few.machine().serve()
    for number in range(60):
        await put(storage, **{f"k{number % 20}": str(number)})
        await quiet(storage)
    assert len(few.objects.keys("log")) < 20
    few.objects.reads.clear()
    later = await few.machine().serve(epoch=2)
    assert content(later) == content(storage)
    assert few.objects.reads["log"] < 30
    assert few.objects.reads["checkpoint"] == 1


async def test_a_table_is_uploaded_once_and_named_by_many_checkpoints(few: Scene) -> None:
    storage = await few.machine().serve()
    for number in range(120):
        await put(storage, **{f"k{number:03}": "value"})
        await quiet(storage)
    assert len(few.objects.keys("checkpoint")) >= 8
    assert len(few.objects.keys("table")) < 2 * len(few.objects.keys("checkpoint"))


async def test_writes_go_on_while_a_checkpoint_is_uploaded(few: Scene) -> None:
    storage = await few.machine().serve()
    few.objects.faults = BucketFaults(call_seconds=0.5)
    for number in range(40):
        await put(storage, **{f"k{number}": str(number)})
    few.objects.faults = BucketFaults(call_seconds=0.0)
    assert few.objects.keys("checkpoint")
    later = await few.machine().serve(epoch=2)
    assert content(later) == content(storage)


async def test_a_checkpoint_that_fails_is_tried_again_and_said(few: Scene) -> None:
    few.seconds = 2.0
    storage = await few.machine().serve()
    create = few.objects.create

    async def refuse_tables(key: str, data: bytes) -> str:
        if "/table/" in key:
            await asyncio.sleep(60.0)
        return await create(key, data)

    few.objects.create = refuse_tables  # type: ignore[method-assign]
    for number in range(15):
        await put(storage, **{f"k{number}": str(number)})
    await asyncio.sleep(30.0)
    assert few.logged("no checkpoint can be made: the log grows")
    few.objects.create = create  # type: ignore[method-assign]
    await quiet(storage)
    await put(storage, last="1")
    await quiet(storage)
    assert few.logged("a checkpoint was made again")
    assert len(few.objects.keys("log")) < 5
    assert content(await few.machine().serve(epoch=2)) == content(storage)


async def test_a_deposed_owner_publishes_no_checkpoint(few: Scene) -> None:
    storage = await few.machine().serve()
    for number in range(12):
        await put(storage, **{f"k{number}": str(number)})
    await quiet(storage)
    later = await few.machine().serve(epoch=2)
    await put(later, k0="later")
    await storage.close()
    assert content(await few.machine().serve(epoch=3)) == content(later)


async def test_a_tablet_that_is_closed_leaves_little_to_read(few: Scene) -> None:
    storage = await few.machine().serve()
    for number in range(8):
        await put(storage, **{f"k{number}": str(number)})
    await storage.close()
    few.objects.reads.clear()
    later = await few.machine().serve(epoch=2)
    assert content(later) == {f"k{number}": str(number) for number in range(8)}
    assert few.objects.reads["log"] <= 5


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
@pytest.mark.parametrize("kind", ["table", "checkpoint"])
async def test_a_damaged_object_is_named_and_nothing_is_served(
    few: Scene, kind: str, damage: str
) -> None:
    storage = await few.machine().serve()
    for number in range(8):
        await put(storage, **{f"k{number}": str(number)})
    await storage.close()
    (key,) = few.objects.keys(kind)
    data = few.objects.objects[key]
    match damage:
        case "truncated":
            few.objects.objects[key] = data[:-1]
        case "altered":
            few.objects.objects[key] = data[:-1] + bytes([data[-1] ^ 1])
        case _:
            del few.objects.objects[key]
    with pytest.raises(StoreUnusable, match=key) as refused:
        await few.machine().serve(epoch=2)
    assert refused.value.fault is StoreFault.DAMAGED


# ------------------------------------------------------------------- caches


async def test_a_server_that_is_started_again_downloads_nothing(few: Scene) -> None:
    machine = few.machine()
    storage = await machine.serve()
    for number in range(25):
        await put(storage, **{f"k{number}": str(number)})
        await quiet(storage)
    before = content(storage)
    machine.start()
    few.objects.reads.clear()
    again = await machine.serve(epoch=2)
    assert content(again) == before
    assert few.objects.reads["table"] == 0
    assert few.objects.reads["log"] <= 5


async def test_a_cache_catches_up_with_what_another_owner_has_written(many: Scene) -> None:
    machine = many.machine()
    await put(await machine.serve(), a="1", b="1")
    await put(await many.machine().serve(epoch=2), a="2")
    machine.start()
    again = await machine.serve(epoch=3)
    assert content(again) == {"a": "2", "b": "1"}
    assert machine.caches.found == 1


async def test_a_cache_older_than_the_checkpoint_is_thrown_away(few: Scene) -> None:
    machine = few.machine()
    await put(await machine.serve(), a="1", b="1")
    other = await few.machine().serve(epoch=2)
    for number in range(25):
        await put(other, a=str(number))
        await quiet(other)
    machine.start()
    assert content(await machine.serve(epoch=3)) == content(other)


@pytest.mark.parametrize("change", [{"writer": "another"}, {"checksum": 1}, {"number": 99}])
async def test_a_cache_that_the_log_does_not_prove_is_thrown_away(
    many: Scene, change: dict[str, Any]
) -> None:
    """For example after the bucket was restored from a copy: others have written the numbers."""
    machine = many.machine()
    storage = await machine.serve()
    await put(storage, a="1")
    record = machine.disks[1].durable[POSITION_KEY]
    position = Position.decode(record)
    assert position is not None
    machine.disks[1].durable[POSITION_KEY] = position._replace(**change).encode()
    machine.disks[1].durable[b"b"] = b"never written"
    machine.start()
    assert content(await machine.serve(epoch=2)) == {"a": "1"}


async def test_a_disk_that_is_full_loses_nothing_and_is_named(many: Scene) -> None:
    machine = many.machine()
    ownership = await machine.own()
    storage = await machine.open(ownership)
    await put(storage, a="1")
    machine.failure = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space") as failed:
        await put(storage, a="2")
    assert storage.fault(failed.value) is StoreFault.DISK_FULL
    await storage.close()
    with pytest.raises(StoreUnusable, match="No space left") as refused:
        await machine.open(ownership)
    assert refused.value.fault is StoreFault.DISK_FULL
    machine.failure = None
    again = await machine.open(ownership)
    assert content(again) == {"a": "2"}  # it was in the log, and its outcome was unknown
    assert machine.caches.found == 0


async def test_caches_of_tablets_in_use_are_kept(many: Scene) -> None:
    machine = many.machine()
    storage = await machine.serve(1)
    closed = await machine.serve(2)
    await put(closed, a="1")
    await closed.close()
    for _ in range(20):
        await machine.store.remove_superseded(TabletIdentity(1, 1, 1, b"", b""))
    assert 1 in machine.disks
    assert 2 not in machine.disks
    await put(storage, a="1")


async def test_a_server_that_is_killed_often_makes_checkpoints_all_the_same(few: Scene) -> None:
    """Otherwise, the log grows, and its next owner has no cache."""
    machine = few.machine()
    for epoch in range(1, 11):
        storage = await machine.serve(epoch=epoch)
        for row in ("a", "b"):
            await put(storage, **{row: str(epoch)})
            await quiet(storage)
        machine.start()
    log = (await machine.own(epoch=11)).log
    assert log.number - log.base.number < 20


async def test_the_cache_of_a_tablet_that_is_opened_again_is_kept(many: Scene) -> None:
    """Also if others were opened while it was closed."""
    machine = many.machine()
    ownership = await machine.own()
    await put(await machine.open(ownership), a="1")
    machine.failure = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        await put(failed := await machine.open(ownership), b="2")
    failed.fault(machine.failure)
    machine.failure = None
    await failed.close()
    await machine.store.remove_superseded(TabletIdentity(1, 2, 1, b"", b""))
    await machine.open(ownership)
    for _ in range(20):
        await machine.store.remove_superseded(TabletIdentity(1, 2, 1, b"", b""))
    assert 1 in machine.disks


async def test_a_close_that_is_given_up_closes_the_cache(few: Scene) -> None:
    storage = await few.machine().serve()
    for number in range(9):
        await put(storage, **{f"k{number}": "1"})
    await put(storage, last="1")
    few.objects.answers.clear()
    storage._count(0)  # a checkpoint is due
    closing = asyncio.create_task(storage.close())
    await asyncio.sleep(0)
    assert len(storage._tasks) == 1  # it is being uploaded
    closing.cancel()
    await asyncio.wait([closing])
    with pytest.raises(RuntimeError, match="closed"):
        storage.get(b"last")


# ------------------------------------------------------------------- splits


def child_of(parent: int, epoch: int) -> Ancestry:
    return Ancestry(origin_tablet_id=parent, origin_epoch=epoch)


@pytest.mark.parametrize("entries", [3, 40], ids=["without a checkpoint", "with a checkpoint"])
async def test_children_begin_with_everything_that_their_parent_has(
    few: Scene, entries: int
) -> None:
    parent = await few.machine().serve()
    for number in range(entries):
        await put(parent, **{f"k{number}": str(number)})
        await quiet(parent)
    tables = set(few.objects.keys("table"))
    for tablet_id in (2, 3):
        machine = few.machine()
        child = await machine.open(await machine.own(tablet_id, 1, child_of(1, 1)))
        assert content(child) == content(parent)
        await put(child, own=str(tablet_id))
        await quiet(child)
        again = await few.machine().serve(tablet_id, epoch=2)
        assert content(again) == content(parent) | {"own": str(tablet_id)}
    assert {int(key.split("/")[1]) for key in set(few.objects.keys("table")) - tables} <= {2, 3}
    with pytest.raises(NotAppended):
        await put(parent, late="1")


async def test_a_child_of_a_child_finds_what_its_grandparent_has_written(many: Scene) -> None:
    await put(await many.machine().serve(), a="1", b="1")
    machine = many.machine()
    child = await machine.own(2, 1, child_of(1, 1))
    many.objects.faults = BucketFaults(call_seconds=0.0)
    machine = many.machine()
    grandchild = await machine.open(await machine.own(3, 1, child_of(2, 1)))
    assert content(grandchild) == {"a": "1", "b": "1"}
    assert not await child.is_held()


async def test_a_child_soon_depends_on_its_parents_log_no_more(many: Scene) -> None:
    await put(await many.machine().serve(), a="1")
    machine = many.machine()
    child = await machine.open(await machine.own(2, 1, child_of(1, 1)))
    for number in range(3):
        await put(child, b=str(number))
        await quiet(child)
    for key in [key for key in many.objects.objects if key.startswith("tablets/1/log")]:
        del many.objects.objects[key]
    later = many.machine()
    # Its own log says where it begins, although the order still names its parent.
    again = await later.open(await later.own(2, 2, child_of(1, 1)))
    assert content(again) == {"a": "1", "b": "2"}


async def test_a_split_whose_parent_has_a_later_owner_is_refused(many: Scene) -> None:
    await many.machine().own(1, 5)
    with pytest.raises(StoreUnusable, match="tablet 1 at epoch 4"):
        await many.machine().own(2, 1, child_of(1, 4))


# ------------------------------------------------------------------- everything at once


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_acknowledged_is_lost_in_a_hostile_bucket(seed: int) -> None:
    """One key counts up. After each loss of ownership or unknown outcome, another value may be
    there, but never one below the last acknowledged."""
    async with scene(HOSTILE, seed, FEW) as found:
        found.seconds = 20.0
        machines = [found.machine(), found.machine()]
        chance = found.random
        acknowledged = tried = epoch = 0
        met: set[StoreFault] = set()
        for _ in range(12):
            epoch += 1
            machine = chance.choice(machines)
            if chance.random() < 1 / 2:
                machine.start()
            ownership = storage = None
            while storage is None:
                try:
                    ownership = ownership or await machine.own(epoch=epoch)
                    storage = await machine.open(ownership)
                except TabletMoved:
                    epoch += 1
                except StoreUnusable as error:
                    met.add(error.fault)
            there = int(content(storage).get("count", "0"))
            assert acknowledged <= there <= tried
            for _ in range(chance.randrange(30)):
                tried += 1
                try:
                    await put(storage, count=str(tried), **{f"k{tried % 7}": str(tried)})
                except NotAppended:
                    break
                acknowledged = tried
            if chance.random() < 1 / 2:
                await storage.close()
        assert met <= {StoreFault.INPUT_OUTPUT}
        assert acknowledged > 50
        assert set(found.objects.struck) >= {"lost_answer", "failed_after_success"}
