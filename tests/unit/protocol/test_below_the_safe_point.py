"""Transactions that the collection of old versions has overtaken."""

from __future__ import annotations

import pytest

from percolator.errors import CellAddress, ConflictError, OutcomeUnknown, SnapshotTooOld
from percolator.routing.cells import CellMutation

from .cells_and_steps import PATIENT, A, B, C, address, left_behind, put, puts, settled, world
from .naive_cells import WRITE


async def test_a_commit_whose_record_may_be_collected_is_never_reported_as_aborted() -> None:
    """Its answer was lost, and when its outcome is asked for, the primary holds no trace of it."""
    here = world()
    client = here.client()
    client.network.loses_answer = lambda step: puts(step, WRITE)
    commit = client.commit(await client.start_timestamp(), {A: put(b"1")})
    with pytest.raises(OutcomeUnknown):
        await commit.run(client.deadline(1.0))
    client.network.loses_answer = lambda step: False
    await settled(client)
    here.store.cells[A].clear()
    here.store.safe_point = await client.start_timestamp()
    with pytest.raises(OutcomeUnknown, match="too old"):
        await commit.settle(client.deadline())
    assert not here.store.cells[A], "no marker is put either"


async def test_a_secondary_that_was_committed_and_collected_meanwhile_is_not_a_torn_commit() -> (
    None
):
    here = world()
    client = here.client()

    async def overtaken(step: CellMutation) -> None:
        if address(step) == B and puts(step, WRITE):
            here.store.cells[B].clear()
            here.store.safe_point = await client.start_timestamp()

    client.network.before_send = overtaken
    commit = client.commit(await client.start_timestamp(), {A: put(b"1"), B: put(b"2")})
    assert await commit.run(client.deadline())
    await settled(client)
    assert not here.store.cells[B]


@pytest.mark.parametrize("cell", [B, C])
async def test_a_reader_that_is_late_to_ask_about_a_lock_finds_what_was_committed(
    cell: CellAddress,
) -> None:
    """The lock was resolved after the reader met it, and its primary collected: no trace is left.
    A marker there would mean that the committed transaction was rolled back."""
    here = world()
    start = await left_behind(here, A, cell, committed=True)
    other, reader = here.client(), here.client(PATIENT)
    timestamp = await reader.start_timestamp()

    async def overtaken(step: CellMutation) -> None:
        if address(step) == A and not here.store.collected:
            assert await other.read(cell, timestamp) == b"pending"
            here.store.cells[A].clear()
            here.store.safe_point = here.store.collected = timestamp
            here.store.new_tables = {C.table_id}  # as if nothing was ever collected in it

    reader.network.before_send = overtaken
    assert await reader.read(cell, timestamp) == b"pending"
    assert here.store.collected
    assert not here.store.cells[A]
    assert reader.env.verdicts.get(start) is None


async def test_an_owners_late_rollback_of_a_secondary_is_tried_once() -> None:
    """Others have resolved its locks, so every further attempt would be refused, too."""
    here = world()
    client, other = here.client(), here.client()

    async def overtaken(step: CellMutation) -> None:
        if address(step) == B:
            here.store.cells[B].clear()
            here.store.collected = here.store.safe_point = await other.start_timestamp()

    commit = client.commit(await client.start_timestamp(), {A: put(b"1"), B: put(b"2")})
    await commit.prewrite(client.deadline())
    client.network.before_send = overtaken
    with pytest.raises(ConflictError):
        await commit._give_up(ConflictError("no"), client.deadline())
    await settled(client)
    assert [address(step) for step in client.network.steps].count(B) == 2  # with its prewrite
    assert not here.store.cells[B]


async def test_a_lock_in_a_table_that_is_younger_than_the_last_collection_is_settled() -> None:
    """Its transaction began before the collection, and its primary refuses older rollbacks."""
    here = world()
    late, reader = here.client(PATIENT), here.client(PATIENT)
    start = await late.start_timestamp()
    here.store.collected = here.store.safe_point = await reader.start_timestamp()
    here.store.new_tables = {C.table_id}
    with pytest.raises(SnapshotTooOld):
        await late.commit(start, {A: put(b"1"), C: put(b"2")}).run(late.deadline())
    assert here.store.lock_of(C) is not None
    assert await reader.read(C, await reader.start_timestamp()) is None
    assert here.store.lock_of(C) is None
    assert not here.store.cells.get(A)
    assert reader.env.verdicts.get(start) is None, "for all we know, it committed long ago"


async def test_a_lock_below_the_safe_point_is_rolled_forward_by_whoever_knows_its_commit() -> None:
    """The owner of such a lock may not do it any more: its message could come late."""
    here = world()
    start = await left_behind(here, A, B, committed=True)
    ((commit, _),) = here.store.commits(A)
    reader = here.client(PATIENT)
    here.store.safe_point = timestamp = await reader.start_timestamp()
    reader.env.verdicts.put(start, commit)
    assert await reader.read(B, timestamp) == b"pending"
    await settled(reader)
    assert here.store.lock_of(B) is None
    assert [at for at, _ in here.store.commits(B)] == [commit]
