"""The simulation is worth something only if it finds bugs: here are some, and it must find each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from percolator.protocol import commit, steps
from percolator.protocol.cleanup import Cleanup, MetLock
from percolator.protocol.commit_point import CommitPoint
from percolator.protocol.records import timestamp_bytes
from percolator.protocol.write_steps import WriteSteps
from percolator.v1.tabletserver_pb2 import Change, Mutation
from percolator.wire.questions import Refused, RowAnswer, RowQuestion, Step

from .protocol_run import run
from .protocol_world import SLOW, Network

SEEDS = [26, 13, 19, 12, *range(300)]
"""First those that found the bugs which are found by few: a seed takes the same course again."""

Patch = pytest.MonkeyPatch


def _changed(patch: Patch, name: str, change: Callable[[Mutation], None]) -> None:
    """Plants a bug into one of the steps."""
    correct: Callable[..., Mutation] = getattr(steps, name)

    def wrong(*arguments: Any) -> Mutation:
        mutation = correct(*arguments)
        change(mutation)
        return mutation

    patch.setattr(steps, name, wrong)


def _drop_last_change(mutation: Mutation) -> None:
    mutation.changes.pop()


def _drop_first_condition(mutation: Mutation) -> None:
    mutation.conditions.pop(0)


def _drop_last_condition(mutation: Mutation) -> None:
    mutation.conditions.pop()


def rollback_deletes_any_lock(patch: Patch) -> None:
    def change(mutation: Mutation) -> None:
        mutation.changes[0].kind = Change.KIND_DELETE
        mutation.changes[0].ClearField("value")

    _changed(patch, "roll_back", change)


def rollback_leaves_no_marker(patch: Patch) -> None:
    _changed(patch, "roll_back", _drop_last_change)
    _changed(patch, "roll_back_expired", _drop_last_change)


def rollback_of_the_committed(patch: Patch) -> None:
    _changed(patch, "roll_back", _drop_first_condition)


def markers_are_ignored(patch: Patch) -> None:
    _changed(patch, "prewrite", lambda mutation: mutation.conditions[1].ClearField("space"))
    _changed(patch, "commit_primary", lambda mutation: mutation.conditions[1].ClearField("space"))


def prewrite_ignores_newer_commits(patch: Patch) -> None:
    _changed(patch, "prewrite", _drop_last_condition)


def commit_ignores_pushes(patch: Patch) -> None:
    def change(mutation: Mutation) -> None:
        mutation.conditions[2].prefix = mutation.conditions[2].prefix[:8]

    _changed(patch, "commit_primary", change)


def heartbeat_undoes_pushes(patch: Patch) -> None:
    def heartbeat(self: WriteSteps, min_commit: int, ttl_seen: int, ttl: int) -> Step:
        lock = self.prewrite(self.primary, self.start + 1, ttl).mutation.changes[0].value
        table_id, row, column = self.primary
        return Step(table_id, steps.replace_lock(row, column, timestamp_bytes(self.start), lock))

    patch.setattr(WriteSteps, "heartbeat", heartbeat)


def commit_by_somebody_else_is_not_adopted(patch: Patch) -> None:
    correct = CommitPoint.reach

    async def wrong(self: CommitPoint, deadline: float) -> int:
        await correct(self, deadline)
        return self._commit

    patch.setattr(CommitPoint, "reach", wrong)


def commit_timestamp_taken_before_prewrite(patch: Patch) -> None:
    correct = commit.Commit._prewrite

    async def wrong(self: commit.Commit, deadline: float) -> int:
        await self._point._take_commit_timestamp(deadline)
        return await correct(self, deadline)

    patch.setattr(commit.Commit, "_prewrite", wrong)


def primary_by_chance(patch: Patch) -> None:
    correct = WriteSteps.__init__

    def wrong(self: WriteSteps, *arguments: Any) -> None:
        _CHOICES.append(0)
        start, writes, *rest = arguments
        cells = sorted(writes)
        turn = len(_CHOICES) % len(cells)
        correct(self, start, {cell: writes[cell] for cell in cells[turn : turn + 1]}, *rest)
        self.writes = writes
        self.cells = cells[turn:] + cells[:turn]

    patch.setattr(WriteSteps, "__init__", wrong)


_CHOICES: list[int] = []


def reads_ignore_locks(patch: Patch) -> None:
    correct = Network.read

    async def wrong(
        self: Network, questions: Sequence[RowQuestion], deadline: float
    ) -> list[RowAnswer]:
        answers = await correct(self, questions, deadline)
        for answer in answers:
            answer.locks.clear()
        return answers

    patch.setattr(Network, "read", wrong)


def secondaries_decided_without_the_primary(patch: Patch) -> None:
    async def wrong(self: Cleanup, met: Sequence[MetLock], **arguments: Any) -> set[int]:
        questions = [
            Step(
                lock.address.table_id,
                steps.roll_back(lock.address.row, lock.address.column, lock.lock.start_timestamp),
            )
            for lock in met
        ]
        await self._around.cells.mutate(questions, arguments["deadline"])
        return set()

    patch.setattr(Cleanup, "clear", wrong)


def pushed_without_looking_at_the_answer(patch: Patch) -> None:
    correct = Cleanup._push

    async def wrong(self: Cleanup, undecided: Any, read_at: int, deadline: float) -> set[int]:
        await correct(self, undecided, read_at, deadline)
        return {one.met.lock.start_timestamp for one in undecided}

    patch.setattr(Cleanup, "_push", wrong)


def weak_notifications_written_once(patch: Patch) -> None:
    correct = CommitPoint._notify
    written: set[CommitPoint] = set()

    async def wrong(self: CommitPoint, at: int, deadline: float) -> None:
        if self not in written:
            written.add(self)
            await correct(self, at, deadline)

    patch.setattr(CommitPoint, "_notify", wrong)


def resolver_commits_without_notifying(patch: Patch) -> None:
    correct: Callable[..., Mutation] = steps.commit_secondary

    def wrong(*arguments: Any) -> Mutation:
        return correct(*arguments[:-1], ())

    patch.setattr(steps, "commit_secondary", wrong)


def each_settling_by_itself_with_a_shared_commit_timestamp(patch: Patch) -> None:
    """Of two, the second's commit timestamp replaces the first's, under which it was committed."""
    correct, correct_take = CommitPoint.reach, CommitPoint._take_commit_timestamp
    taken: set[int] = set()

    async def take(self: CommitPoint, deadline: float) -> None:
        await correct_take(self, deadline)
        taken.add(self._commit)

    async def wrong(self: CommitPoint, deadline: float) -> int:
        at = await correct(self, deadline)
        return self._commit if at in taken else at

    def settle(self: commit.Commit, deadline: float) -> Coroutine[None, None, int]:
        return self._reach_outcome(deadline, prewritten=True)

    patch.setattr(CommitPoint, "_take_commit_timestamp", take)
    patch.setattr(CommitPoint, "reach", wrong)
    patch.setattr(commit.Commit, "settle", settle)


BUGS = [
    rollback_deletes_any_lock,
    rollback_leaves_no_marker,
    rollback_of_the_committed,
    markers_are_ignored,
    prewrite_ignores_newer_commits,
    commit_ignores_pushes,
    heartbeat_undoes_pushes,
    commit_by_somebody_else_is_not_adopted,
    commit_timestamp_taken_before_prewrite,
    primary_by_chance,
    reads_ignore_locks,
    secondaries_decided_without_the_primary,
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
    """The own lock of a repeated prewrite is not read: no heartbeat ever fits it."""

    def learn(self: CommitPoint, answer: Refused) -> None:
        ttl = self.ttl
        correct(self, answer)
        self.ttl = max(self.ttl, ttl)

    correct = CommitPoint.learn_lock
    monkeypatch.setattr(CommitPoint, "learn_lock", learn)
    assert any(run(seed, SLOW, second_committers=0).buried_alive for seed in SEEDS)
