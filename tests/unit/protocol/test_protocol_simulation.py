"""Snapshot isolation and atomicity under every fault of a network, over random schedules."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from percolator.formats.records import timestamp_bytes
from percolator.protocol import steps
from percolator.protocol.cleanup import Pushing
from percolator.protocol.commit import Commit
from percolator.protocol.write_set import PrimaryLock, WriteSteps
from percolator.routing.cells import CellMutation, Refused, RowRequest, RowResult
from percolator.v1.tabletserver_pb2 import Mutation
from tests.simulation import planted_protocol_bugs as protocol_bugs
from tests.simulation.planted_protocol_bugs import change_step
from tests.unit.protocol.protocol_world import IMPATIENT, NO_FAULTS, SLOW, Faults, Network, run

SEEDS_PER_TEST = 15


@pytest.mark.parametrize("one_round_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("first_seed", range(0, 60, SEEDS_PER_TEST))
def test_transactions_are_atomic_and_isolated_whatever_the_network_does(
    first_seed: int, one_round_share: float
) -> None:
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        assert run(seed, one_round_share=one_round_share).violations == [], f"seed {seed}"


def test_without_faults_most_transactions_commit() -> None:
    runs = [run(seed, NO_FAULTS) for seed in range(10)]
    assert [violation for one in runs for violation in one.violations] == []
    assert sum(one.committed for one in runs) > sum(one.aborted for one in runs)


def test_owners_that_are_always_declared_dead_only_abort() -> None:
    """Liveness is a hint: believing a wrong one costs work, never correctness."""
    for seed in range(1_000, 1_010):
        assert run(seed, Faults(wrongly_dead=1.0)).violations == [], f"seed {seed}"


@pytest.mark.parametrize("one_round_share", [0.0, 0.7])
@pytest.mark.parametrize("first_seed", range(0, 45, SEEDS_PER_TEST))
def test_all_who_ask_for_an_outcome_get_the_same_true_answer(
    first_seed: int, one_round_share: float
) -> None:
    """A commit is settled in the background and by two callers at the same time."""
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        ended = run(seed, IMPATIENT, second_committers=0, one_round_share=one_round_share)
        assert ended.violations == [], f"seed {seed}"


def test_no_live_owner_is_presumed_dead_while_its_heartbeats_arrive() -> None:
    """This holds however slow its commit is, and however often its prewrites are repeated."""
    for seed in range(2_000, 2_020):
        ended = run(seed, SLOW, second_committers=0)
        assert (ended.violations, ended.buried_alive) == ([], 0), f"seed {seed}"


def test_one_seed_always_takes_the_same_course() -> None:
    assert run(7) == run(7)


# A simulation is only worth something if it finds bugs: it must find each of these.

SEEDS = [26, 13, 19, 12, *range(300)]
"""The seeds that find the rarest bugs come first: a seed always takes the same course."""

Patch = pytest.MonkeyPatch


def _drop_first_condition(mutation: Mutation) -> None:
    mutation.conditions.pop(0)


def rollback_of_the_committed(patch: Patch) -> None:
    change_step(patch, "roll_back", _drop_first_condition)


def markers_are_ignored(patch: Patch) -> None:
    change_step(patch, "prewrite", lambda mutation: mutation.conditions[1].ClearField("space"))
    change_step(
        patch, "commit_primary", lambda mutation: mutation.conditions[1].ClearField("space")
    )


def heartbeat_undoes_pushes(patch: Patch) -> None:
    def heartbeat(
        self: WriteSteps, seen: int, ttl_seen: int, min_commit: int, ttl: int
    ) -> CellMutation:
        lock = self.prewrite_step(self.primary, self.start + 1, ttl).message().changes[0].value
        table_id, row, column = self.primary
        return CellMutation(
            table_id, steps.replace_lock(row, column, timestamp_bytes(self.start), lock)
        )

    patch.setattr(WriteSteps, "heartbeat_step", heartbeat)


def commit_by_somebody_else_is_not_adopted(patch: Patch) -> None:
    correct = Commit.commit_primary

    async def wrong(self: Commit, deadline: float) -> int:
        await correct(self, deadline)
        return self.begin_two_phases().commit_ts

    patch.setattr(Commit, "commit_primary", wrong)


def reads_ignore_locks(patch: Patch) -> None:
    correct = Network.read

    async def wrong(
        self: Network, requests: Sequence[RowRequest], deadline: float, **how: Any
    ) -> list[RowResult]:
        answers = await correct(self, requests, deadline, **how)
        for answer in answers:
            answer.locks.clear()
        return answers

    patch.setattr(Network, "read", wrong)


def pushed_without_looking_at_the_answer(patch: Patch) -> None:
    correct = Pushing.push

    async def wrong(self: Pushing, primaries: Any, read_at: int, **how: Any) -> set[int]:
        await correct(self, primaries, read_at, **how)
        if how["waited_seconds"] < self._env.limits.push_after_seconds:
            return set()
        return {lock.start_timestamp for lock in primaries}

    patch.setattr(Pushing, "push", wrong)


def weak_notifications_written_once(patch: Patch) -> None:
    correct = Commit._notify
    written: set[Commit] = set()

    async def wrong(self: Commit, at: int, deadline: float) -> None:
        if self not in written:
            written.add(self)
            await correct(self, at, deadline)

    patch.setattr(Commit, "_notify", wrong)


def resolver_commits_without_notifying(patch: Patch) -> None:
    correct: Callable[..., Mutation] = steps.commit_secondary

    def wrong(*arguments: Any) -> Mutation:
        return correct(*arguments[:-1], ())

    patch.setattr(steps, "commit_secondary", wrong)


def each_settling_by_itself_with_a_shared_commit_timestamp(patch: Patch) -> None:
    """The commit timestamp of a second committer replaces that of the first, which committed."""
    correct, correct_take = Commit.commit_primary, Commit.take_commit_timestamp
    taken: set[int] = set()

    async def take(self: Commit, deadline: float) -> None:
        await correct_take(self, deadline)
        taken.add(self.begin_two_phases().commit_ts)

    async def wrong(self: Commit, deadline: float) -> int:
        at = await correct(self, deadline)
        return self.begin_two_phases().commit_ts if at in taken else at

    def settle(self: Commit, deadline: float) -> Coroutine[None, None, int]:
        return self._reach_outcome(deadline, is_settling=True)

    patch.setattr(Commit, "take_commit_timestamp", take)
    patch.setattr(Commit, "commit_primary", wrong)
    patch.setattr(Commit, "settle", settle)


BUGS = [
    protocol_bugs.rollback_deletes_a_foreign_lock,
    protocol_bugs.no_rollback_marker,
    rollback_of_the_committed,
    markers_are_ignored,
    protocol_bugs.prewrite_ignores_newer_commits,
    protocol_bugs.commit_ignores_min_commit_ts,
    heartbeat_undoes_pushes,
    protocol_bugs.heartbeat_raises_the_lock_whatever_it_is,
    commit_by_somebody_else_is_not_adopted,
    protocol_bugs.commit_timestamp_before_the_prewrites,
    protocol_bugs.primary_by_chance,
    reads_ignore_locks,
    protocol_bugs.secondaries_decided_without_the_primary,
    pushed_without_looking_at_the_answer,
    weak_notifications_written_once,
    each_settling_by_itself_with_a_shared_commit_timestamp,
    resolver_commits_without_notifying,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_simulation_finds(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    assert any(run(seed).violations for seed in SEEDS)


def test_the_simulation_finds_a_time_to_live_that_is_not_the_stored_one(monkeypatch: Patch) -> None:
    """The lock that a repeated prewrite finds is not read, and no heartbeat raises what it has not
    seen: so none ever matches it."""

    def learn(self: PrimaryLock, answer: Refused) -> None:
        ttl = self.ttl
        correct(self, answer)
        self.ttl = max(self.ttl, ttl)

    correct = PrimaryLock.learn
    monkeypatch.setattr(PrimaryLock, "learn", learn)
    monkeypatch.setattr(PrimaryLock, "_next_min_commit", lambda lock, oracle: lock.min_commit)
    assert any(run(seed, SLOW, second_committers=0).buried_alive for seed in SEEDS)
