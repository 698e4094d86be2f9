"""Bugs in the steps of the protocol, and in who takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from percolator.aio.awaiting import LateWrites
from percolator.errors import PercolatorError
from percolator.protocol import commit, steps
from percolator.protocol.met_lock import MetLock
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.write_steps import WriteSteps
from percolator.routing.cells import (
    APPLIED,
    Answer,
    CellMutation,
    CommitAnswer,
    Refused,
    RowRequest,
    RowResult,
)
from percolator.routing.common_step import CommonStep
from percolator.routing.pending_row import PendingRow
from percolator.routing.router import Router
from percolator.tablet.keys import TIMESTAMP_MAX
from percolator.v1.tabletserver_pb2 import Change, Mutation

Patch = pytest.MonkeyPatch

_LATE_SECONDS = 0.01


def heartbeat_raises_the_lock_whatever_it_is(patch: Patch) -> None:
    """It lowers what a reader has pushed, and the reader has passed."""
    correct = WriteSteps.heartbeat

    def wrong(
        self: WriteSteps, seen: int, ttl_seen: int, min_commit: int, ttl: int
    ) -> CellMutation:
        table_id, row, column = self.primary
        step = correct(self, seen, ttl_seen, seen + 1, ttl)
        lock = step.message().changes[0].value
        return CellMutation(
            table_id, steps.raise_lock(row, column, self.start, TIMESTAMP_MAX, lock)
        )

    patch.setattr(WriteSteps, "heartbeat", wrong)


def commit_leaves_out_writes_whose_table_is_not_known_yet(patch: Patch) -> None:
    """The first writes of a client, of which nobody has awaited any, are lost."""

    async def wrong(self: LateWrites, deadline: float) -> None:
        self._waiting.clear()

    patch.setattr(LateWrites, "settle", wrong)


def no_copy_of_a_refused_commit_is_expected(patch: Patch) -> None:
    """A copy arrives when the server has the tablet; the transaction was reported as aborted."""
    correct = commit.Commit._heard

    def wrong(self: commit.Commit, answer: Answer | CommitAnswer) -> None:
        correct(self, answer)
        if self.state is commit.State.COMMITTING and not self.is_unanswered:
            self.is_out = False

    patch.setattr(commit.Commit, "_heard", wrong)


def no_rollback_marker(patch: Patch) -> None:
    """A late prewrite resurrects a transaction that others have rolled back."""

    def drop_marker(mutation: Mutation) -> None:
        mutation.changes.pop()

    change_step(patch, "roll_back", drop_marker)
    change_step(patch, "roll_back_expired", drop_marker)


def secondaries_decided_without_the_primary(patch: Patch) -> None:
    """A cell that is judged alone is rolled back while its transaction commits."""

    async def wrong(self: Cleanup, met: Sequence[MetLock], **arguments: Any) -> set[int]:
        requests = [
            CellMutation(
                lock.address.table_id,
                steps.roll_back(lock.address.row, lock.address.column, lock.lock.start_timestamp),
            )
            for lock in met
        ]
        await self._env.cells.mutate(requests, arguments["deadline"])
        return set()

    patch.setattr(Cleanup, "resolve", wrong)


def rollback_deletes_a_foreign_lock(patch: Patch) -> None:
    """Another transaction has locked the cell since, and loses its write."""

    def delete_any(mutation: Mutation) -> None:
        mutation.changes[0].kind = Change.KIND_DELETE
        mutation.changes[0].ClearField("value")

    change_step(patch, "roll_back", delete_any)
    change_step(patch, "roll_back_expired", delete_any)


def commit_ignores_min_commit_ts(patch: Patch) -> None:
    """A reader above the commit timestamp has pushed it, and has read past the lock."""

    def own_start_only(mutation: Mutation) -> None:
        mutation.conditions[2].prefix = mutation.conditions[2].prefix[:8]

    change_step(patch, "commit_primary", own_start_only)


def commit_timestamp_before_the_prewrites(patch: Patch) -> None:
    """A reader above it has read a cell that was not locked yet."""
    correct = commit.Commit.prewrite

    async def wrong(self: commit.Commit, deadline: float) -> int:
        await self.take_commit_timestamp(deadline)
        return await correct(self, deadline)

    patch.setattr(commit.Commit, "prewrite", wrong)


def prewrite_ignores_newer_commits(patch: Patch) -> None:
    """A lost update."""

    def forget(mutation: Mutation) -> None:
        mutation.conditions.pop()

    change_step(patch, "prewrite", forget)


def primary_by_chance(patch: Patch) -> None:
    """Two committers of one transaction decide in two places."""
    correct = WriteSteps.__init__
    turns = [0]

    def wrong(self: WriteSteps, start: int, writes: Any, *rest: Any, **named: Any) -> None:
        turns[0] += 1
        cells = sorted(writes)
        turn = turns[0] % len(cells)
        one = {cell: writes[cell] for cell in cells[turn : turn + 1]}
        correct(self, start, one, *rest, **named)
        self.writes = writes
        self.cells = cells[turn:] + cells[:turn]

    patch.setattr(WriteSteps, "__init__", wrong)


def without_lists(patch: Patch) -> None:
    """Sends steps as mutations: in lists, only their kind is sent."""
    correct = PendingRow.__init__

    def written_out(
        self: PendingRow, pending: Any, index: int, table_id: int, version: int, message: Any
    ) -> None:
        if isinstance(message, CommonStep):
            message = message.mutation()
        correct(self, pending, index, table_id, version, message)

    patch.setattr(PendingRow, "__init__", written_out)


def new_commit_timestamp_after_a_time_out(patch: Patch) -> None:
    """The first attempt may have been applied; the other cells get the second's timestamp."""

    async def wrong(self: commit.Commit, deadline: float) -> int:
        lock = self.begin_two_phases()
        while True:
            await self.take_commit_timestamp(deadline)
            schema = await self._env.schema(self._write.primary.table_id, deadline)
            step = self._write.commit_primary(schema, lock.min_commit, lock.commit)
            self.is_unanswered = True
            (answer,) = await self._env.cells.mutate((step,), deadline)
            if answer is APPLIED:
                return lock.commit
            if isinstance(answer, Refused):
                if answer.condition == steps.OWN_COMMIT:
                    return lock.commit
                if not lock.is_ours(answer):
                    return await self._no_lock(answer, deadline)
                lock.learn(answer)

    patch.setattr(commit.Commit, "commit_primary", wrong)


def read_ignores_locks(patch: Patch) -> None:
    """The owner of the lock may already hold a commit timestamp below the reader's."""
    correct = Router.read

    async def wrong(
        self: Router, requests: Sequence[RowRequest], deadline: float, **how: Any
    ) -> list[RowResult]:
        answers = await correct(self, requests, deadline, **how)
        for answer in answers:
            answer.locks.clear()
        return answers

    patch.setattr(Router, "read", wrong)


def abort_not_primary_first(patch: Patch) -> None:
    """Others go first: they are gone when another transaction finds the primary locked, and commits
    it."""

    async def wrong(self: commit.Commit, problem: PercolatorError, deadline: float) -> int:
        for cell in reversed(self._write.cells):
            # Each as late as a network may make it.
            await asyncio.sleep(_LATE_SECONDS)
            await self._env.cells.mutate((self._write.roll_back(cell),), deadline)
        raise problem

    patch.setattr(commit.Commit, "_give_up", wrong)


def change_step(patch: Patch, name: str, change: Callable[[Mutation], None]) -> None:
    """Plants a bug into one of the steps of the protocol."""
    without_lists(patch)
    correct: Callable[..., Mutation] = getattr(steps, name)

    def wrong(*arguments: Any) -> Mutation:
        mutation = correct(*arguments)
        change(mutation)
        return mutation

    patch.setattr(steps, name, wrong)
