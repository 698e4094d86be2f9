"""The rules of group commit, each with the failure that it prevents."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import (
    Overloaded,
    SchemaChanged,
)
from tests.unit.tablet.tablets import (
    ABSENT,
    APPLIED,
    LOCK,
    NOT_EXECUTED,
    REFUSED,
    ROLLBACK,
    WRITE,
    Rig,
    SlowDisk,
    batch,
    commit,
    condition,
    mutation,
    no_own_write,
    outcomes,
    own,
    prewrite,
    put,
    roll_back,
    started,
    write_record,
    written,
)

# ---------------------------------------------------------------- when answers leave


async def test_a_refusal_leaves_with_its_batch_and_not_before() -> None:
    """A refusal may reveal a commit in the same batch. If it left early and the power failed, a
    client would have acted on a commit that never happened."""
    rig = await Rig().open()
    await rig.apply(written(b"taken", 5, 6))
    applied = started(rig, written(b"a", 10, 20))
    refused = started(rig, mutation(b"taken", conditions=[condition(WRITE, ABSENT)]))
    await asyncio.sleep(0.5)  # the write takes a second
    assert not applied.done()
    assert not refused.done()
    assert await outcomes(refused) == [REFUSED]
    assert applied.done()


async def test_nothing_is_judged_against_what_is_not_durable() -> None:
    """A late prewrite arrives while the rollback of its transaction is being written. If it were
    judged then, it would pass, and a transaction reported as rolled back would commit."""
    rig = await Rig().open()
    rollback = started(rig, roll_back(b"a", 10))
    await asyncio.sleep(0.5)
    late = started(rig, prewrite(b"a", 10))
    assert await outcomes(rollback) == [APPLIED]
    [result] = await late
    assert result.outcome == REFUSED
    assert result.cell.space == ROLLBACK
    assert result.cell.timestamp == 10


async def test_readers_neither_see_nor_wait_for_what_is_not_durable() -> None:
    """What a power cut can undo must not have been read, and an fsync must not stop reads."""
    rig = await Rig().open()
    await rig.apply(written(b"a", 5, 6, b"old"))
    started_at = asyncio.get_running_loop().time()
    writing = started(rig, written(b"a", 10, 20, b"new"), prewrite(b"b", 11))
    await asyncio.sleep(0.5)
    assert await rig.value(b"a", 30) == b"old"
    assert not (await rig.read(b"b", 30)).locks
    assert asyncio.get_running_loop().time() - started_at < 0.6
    await writing
    assert await rig.value(b"a", 30) == b"new"
    assert len((await rig.read(b"b", 30)).locks) == 1


async def test_a_lock_stays_in_the_way_until_its_commit_is_durable() -> None:
    """If memory dropped the lock earlier, a reader would find neither the lock nor the commit."""
    rig = await Rig().open()
    await rig.apply(prewrite(b"a", 10, b"value"))
    committing = started(rig, commit(b"a", 10, 20, b"value"))
    await asyncio.sleep(0.5)
    assert len((await rig.read(b"a", 30)).locks) == 1
    await committing
    assert await rig.value(b"a", 30) == b"value"


async def test_one_synced_write_serves_all_requests_that_came_meanwhile() -> None:
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    before = disk.writes
    first = started(rig, written(b"first", 10, 20))
    await asyncio.sleep(0.5)
    others = [started(rig, written(b"%d" % number, 10, 20)) for number in range(50)]
    await asyncio.gather(first, *others)
    assert disk.writes == before + 2


# ---------------------------------------------------------------- one cell twice


async def test_the_second_mutation_of_a_cell_is_judged_after_the_first_is_durable() -> None:
    """Judged in the same batch, both prewrites would find the cell free."""
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    before = disk.writes
    first, second, third = await rig.mutate(
        prewrite(b"a", 10), prewrite(b"a", 11), prewrite(b"b", 12)
    )
    assert [first.outcome, second.outcome, third.outcome] == [APPLIED, REFUSED, APPLIED]
    assert second.cell.space == LOCK
    assert second.cell.value.startswith(own(10))
    assert disk.writes == before + 1  # the second batch was a refusal


async def test_mutations_of_one_cell_keep_their_order_across_requests_and_batches() -> None:
    rig = await Rig(commit_mutations_max=2).open()
    tasks = []
    for number in range(10, 20):
        marker = mutation(
            b"a",
            put(WRITE, write_record(number), number + 1),
            conditions=[condition(WRITE, ABSENT, from_timestamp=number + 1)],
        )
        tasks.append(started(rig, marker, written(b"%d" % number, 1, 2)))
    for task in tasks:
        assert await outcomes(task) == [APPLIED, APPLIED]


async def test_a_condition_after_a_change_in_the_same_request_sees_the_change() -> None:
    rig = await Rig().open()
    applied, question = await rig.mutate(
        written(b"a", 10, 20), mutation(b"a", conditions=[no_own_write(10)])
    )
    assert applied.outcome == APPLIED
    assert question.outcome == REFUSED
    assert question.cell.timestamp == 20


# ---------------------------------------------------------------- waiting


async def test_what_waited_beyond_its_deadline_is_dropped_and_says_so() -> None:
    """If it were executed after its caller gave up, it would leave locks without an owner."""
    rig = await Rig().open()
    first = started(rig, written(b"a", 10, 20))
    await asyncio.sleep(0.1)
    late = asyncio.ensure_future(rig.mutate(written(b"b", 10, 20), within_seconds=0.5))
    await first
    [result] = await late
    assert result.outcome == NOT_EXECUTED
    assert result.error.retry == 1  # RETRY_SAFETY_SAFE
    assert await rig.value(b"b", 30) is None


async def test_what_was_given_up_while_waiting_is_not_executed() -> None:
    rig = await Rig().open()
    first = started(rig, written(b"a", 10, 20))
    await asyncio.sleep(0.1)
    given_up = started(rig, written(b"b", 10, 20))
    await asyncio.sleep(0.1)
    given_up.cancel()
    await first
    await rig.apply(written(b"c", 10, 20))
    assert await rig.value(b"b", 30) is None


async def test_a_full_queue_refuses_and_says_when_to_retry() -> None:
    rig = await Rig(queue_bytes_max=3000).open()
    first = started(rig, written(b"a", 10, 20))
    await asyncio.sleep(0.1)
    fits = started(rig, written(b"b", 10, 20, b"v" * 500))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await rig.mutate(written(b"c", 10, 20, b"v" * 3000))
    assert caught.value.retry_after_seconds > 0
    assert await outcomes(first) == await outcomes(fits) == [APPLIED]
    await rig.apply(written(b"c", 10, 20, b"v" * 3000))  # an empty queue takes anything


async def test_a_long_request_is_cut_into_batches_and_answered_as_one() -> None:
    disk = SlowDisk()
    rig = await Rig(disk=disk, commit_mutations_max=10, slice_rows=3).open()
    before = disk.writes
    await rig.apply(*(written(b"%d" % number, 10, 20) for number in range(35)))
    assert disk.writes == before + 4


async def test_large_values_end_a_batch() -> None:
    disk = SlowDisk()
    rig = await Rig(disk=disk, commit_bytes_max=1000, slice_rows=1).open()
    before = disk.writes
    await rig.apply(*(written(b"%d" % number, 10, 20, b"v" * 600) for number in range(4)))
    assert disk.writes == before + 2


# ---------------------------------------------------------------- schema versions


async def test_the_schema_version_counts_when_a_mutation_is_judged() -> None:
    """If the schema were checked on arrival, a commit could wait while it changes, and then commit
    an observed cell without a notification."""
    rig = await Rig().open()
    first = started(rig, written(b"a", 10, 20))
    await asyncio.sleep(0.1)
    waiting = started(rig, written(b"b", 10, 20))
    await asyncio.sleep(0.1)
    changed = asyncio.ensure_future(rig.tablet.set_schema_version(4))
    await asyncio.sleep(0.1)
    assert not changed.done()  # what was judged under version 3 is not durable yet
    await changed
    assert first.done()
    [result] = await waiting
    assert result.outcome == NOT_EXECUTED
    assert result.error.schema_changed.schema_version == 4
    with pytest.raises(SchemaChanged):
        await rig.mutate(written(b"c", 10, 20))
    answer = await rig.tablet.mutate(batch([written(b"c", 10, 20)], 4), deadline_seconds=1e9)
    assert (answer.mutations, len(answer.unapplied)) == (1, 0)


async def test_the_schema_version_never_goes_back() -> None:
    rig = await Rig().open()
    await rig.tablet.set_schema_version(5)
    await rig.tablet.set_schema_version(4)
    assert rig.tablet.schema_version == 5
