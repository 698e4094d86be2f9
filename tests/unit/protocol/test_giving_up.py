"""Commits that fail before their commit point: when may they be reported as aborted?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from percolator.errors import (
    ConflictError,
    NotReady,
    OutcomeUnknown,
    PercolatorError,
    PermissionDenied,
)
from percolator.formats.records import KIND_LOCK_ONLY
from percolator.protocol.commit import Commit
from percolator.routing.cells import APPLIED, CellMutation

from .cells_and_steps import PATIENT, A, B, put, puts, settled, world
from .naive_cells import ROLLBACK, WRITE
from .protocol_world import NO_FAULTS, Client, World

WRITES = {A: put(b"1"), B: put(b"2")}


async def _in_conflict(here: World, client: Client, *, alone: bool = False) -> Commit:
    """A commit that can lock its primary but not its other cell; its marker gets no answer."""
    start = await client.start_timestamp()
    await here.client().write({B: put(b"newer")})
    client.network.loses_answer = lambda step: puts(step, ROLLBACK)
    return client.commit(start, WRITES, alone=alone)


async def test_without_an_answer_to_the_marker_the_outcome_is_unknown() -> None:
    here = world()
    client = here.client(PATIENT)
    commit = await _in_conflict(here, client)
    with pytest.raises(OutcomeUnknown) as caught:
        await commit.run(client.deadline(1.0))
    assert caught.value.primary == A
    assert isinstance(caught.value.__cause__, ConflictError)


async def test_a_transaction_being_given_up_is_settled_by_its_marker_and_never_committed() -> None:
    here = world()
    client = here.client(PATIENT)
    commit = await _in_conflict(here, client)
    with pytest.raises(OutcomeUnknown):
        await commit.run(client.deadline(1.0))
    client.network.loses_answer = lambda step: False
    with pytest.raises(ConflictError, match="given up"):
        await commit.settle(client.deadline())
    await settled(client)
    assert here.store.lock_of(A) is here.store.lock_of(B) is None
    assert here.store.commits(A) == []
    assert not any(puts(step, WRITE) for step in client.network.steps)


async def test_a_transaction_being_given_up_may_turn_out_to_be_committed_by_another_client() -> (
    None
):
    here = World(0, replace(NO_FAULTS))
    slow, quick, younger = here.client(PATIENT), here.client(PATIENT), here.client(PATIENT)

    async def loses_marks(step: CellMutation) -> None:
        here.faults.lost = float(puts(step, ROLLBACK))

    async def loses_nothing(step: CellMutation) -> None:
        here.faults.lost = 0.0

    slow.network.before_send = loses_marks
    quick.network.before_send = younger.network.before_send = loses_nothing
    start = await slow.start_timestamp()
    in_the_way = younger.commit(await younger.start_timestamp(), {B: put(b"younger")})
    await in_the_way.prewrite(younger.deadline())
    giving_up = slow.commit(start, WRITES)
    with pytest.raises(OutcomeUnknown):
        await giving_up.run(slow.deadline(0.5))
    with pytest.raises(ConflictError):
        await in_the_way._give_up(ConflictError("gone"), younger.deadline())
    at = await quick.commit(start, WRITES).run(quick.deadline())
    slow.network.before_send = loses_nothing
    assert await giving_up.settle(slow.deadline()) == at
    await settled(slow)
    await settled(quick)
    assert [at for at, _ in here.store.commits(B)] == [at]


async def test_a_lone_committer_reports_the_conflict_without_its_marker() -> None:
    here = world()
    client = here.client(PATIENT)
    commit = await _in_conflict(here, client, alone=True)
    with pytest.raises(ConflictError, match="was committed by transaction"):
        await commit.run(client.deadline(1.0))


@pytest.mark.parametrize(
    "refusal",
    [NotReady("the tablet is not served here"), PermissionDenied("the token was withdrawn")],
    ids=lambda refusal: type(refusal).__name__,
)
async def test_a_commit_that_was_refused_may_arrive_late_so_only_its_marker_tells(
    refusal: PercolatorError,
) -> None:
    """A server refuses one copy; another copy finds the tablet there, or was sent before the token
    was withdrawn."""
    here = world()
    client = here.client(PATIENT)
    commits: list[CellMutation] = []

    def refused(step: CellMutation) -> PercolatorError | None:
        if puts(step, WRITE):
            commits.append(step)
        is_final = puts(step, WRITE) or puts(step, ROLLBACK)
        return refusal if is_final else None

    client.network.refuses = refused
    commit = client.commit(await client.start_timestamp(), WRITES, alone=True)
    with pytest.raises(OutcomeUnknown):
        await commit.run(client.deadline(1.0))
    assert commit.may_be_committed
    client.network.refuses = lambda step: None
    assert here.store.apply(commits[0]) is APPLIED
    assert await commit.settle(client.deadline()) == here.store.commits(A)[0][0]


async def test_a_transaction_without_a_lock_on_its_primary_fails_with_its_conflict() -> None:
    here = world()
    client, younger = here.client(PATIENT), here.client(PATIENT)
    start = await client.start_timestamp()
    blocking = younger.commit(await younger.start_timestamp(), {A: put(b"younger")})
    await blocking.prewrite(younger.deadline())
    client.network.loses_answer = lambda step: puts(step, ROLLBACK)
    with pytest.raises(ConflictError, match="is locked"):
        await client.commit(start, WRITES).run(client.deadline(1.0))


async def test_giving_up_a_lock_only_transaction_leaves_nothing() -> None:
    here = world()
    client = here.client()
    commit = client.commit(await client.start_timestamp(), {A: (KIND_LOCK_ONLY, b"")})
    await commit.prewrite(client.deadline())
    with pytest.raises(ConflictError):
        await commit._give_up(ConflictError("no"), client.deadline())
    assert here.store.lock_of(A) is None
