"""Bugs that a simulation has to find, each planted from outside into the product's own code.

Nothing of the product knows of them. Each is one of the mistakes that systems of this kind have
really been shipped with. Those that show only in one order of system calls among very many are
planted where every order is tried: `test_planted_takeover_bugs.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest

from percolator.errors import PercolatorError
from percolator.protocol import commit, steps
from percolator.protocol.cleanup import Cleanup, MetLock
from percolator.protocol.commit_point import CommitPoint
from percolator.protocol.write_steps import WriteSteps
from percolator.tablet.memory_storage import MemoryCursor
from percolator.tablet.point_reads import PointReads
from percolator.tablet.state import TabletState
from percolator.tablet.tablet import Tablet
from percolator.v1.tabletserver_pb2 import (
    Change,
    Mutation,
    ReadBatch,
    ReadBatchResult,
)
from percolator.wire.questions import APPLIED, Refused, RowAnswer, RowQuestion, Step
from percolator.wire.router import Router
from services.chassis.epoch_directory import EpochDirectory
from services.oracle.ledger import Ledger
from tests.simulation import planted_collection_bugs as collection_bugs
from tests.simulation import planted_durability_bugs as durability_bugs
from tests.simulation import planted_load_bugs as load_bugs
from tests.simulation import planted_observer_bugs as observer_bugs
from tests.simulation.run import Verdict, simulate
from tests.simulation.scenario import Kind, Scenario, harsh, scenario_of

Patch = pytest.MonkeyPatch

_BETWEEN_TWO_LOOKS_SECONDS = 0.002
_LATE_SECONDS = 0.01
_LONG_TRANSACTIONS = 500


def no_rollback_marker(patch: Patch) -> None:
    """A late prewrite resurrects a transaction that others have rolled back."""

    def drop_marker(mutation: Mutation) -> None:
        mutation.changes.pop()

    _change(patch, "roll_back", drop_marker)
    _change(patch, "roll_back_expired", drop_marker)


def new_commit_timestamp_after_a_time_out(patch: Patch) -> None:
    """The first attempt may have been applied; the other cells follow with the second's."""

    async def wrong(self: CommitPoint, deadline: float) -> int:
        while True:
            await self._take_commit_timestamp(deadline)
            schema = await self._around.schema(self._write.primary.table_id, deadline)
            step = self._write.commit_primary(schema, self.min_commit, self._commit)
            self.sent = True
            (answer,) = await self._around.cells.mutate((step,), deadline)
            if answer is APPLIED:
                return self._commit
            if isinstance(answer, Refused):
                if answer.condition == steps.OWN_COMMIT:
                    return self._commit
                if not self._is_own_lock(answer):
                    return await self._no_lock(answer, deadline)
                self.learn_lock(answer)

    patch.setattr(CommitPoint, "reach", wrong)


def read_ignores_locks(patch: Patch) -> None:
    """Whoever locked the cell may already hold a commit timestamp below the reader's."""
    correct = Router.read

    async def wrong(
        self: Router, questions: Sequence[RowQuestion], deadline: float
    ) -> list[RowAnswer]:
        answers = await correct(self, questions, deadline)
        for answer in answers:
            answer.locks.clear()
        return answers

    patch.setattr(Router, "read", wrong)


def oracle_without_persistence(patch: Patch) -> None:
    """After a restart it hands out what it handed out before."""

    async def forget(self: Ledger, milliseconds: int) -> None:
        self._mark = self._mark.__class__(milliseconds, self._mark.cluster_id)

    patch.setattr(Ledger, "write", forget)


def secondaries_decided_without_the_primary(patch: Patch) -> None:
    """A cell judged by itself is rolled back while its transaction commits."""

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


def mirror_after_the_snapshot(patch: Patch) -> None:
    """A reader takes its view of the writes first and looks for locks second."""

    async def wrong(self: Tablet, batch: ReadBatch) -> ReadBatchResult:
        state = self._state
        state.require_target(batch.target)
        early = copy(state)
        early.storage = _EarlyView(state.storage)  # type: ignore[assignment]
        await asyncio.sleep(_BETWEEN_TWO_LOOKS_SECONDS)
        result = await PointReads(early, batch.reads, self._columns).answer()
        state.require_ownership()
        return result

    patch.setattr(Tablet, "read", wrong)


class _EarlyView:
    """A storage whose cursors show what was there when this was made."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self._made = storage.cursor()

    def cursor(self) -> MemoryCursor:
        return MemoryCursor(self._made._view)

    def get(self, key: bytes) -> bytes | None:
        found: bytes | None = self._storage.get(key)
        return found


def rollback_deletes_a_foreign_lock(patch: Patch) -> None:
    """Another transaction has locked the cell since, and loses its write."""

    def delete_any(mutation: Mutation) -> None:
        mutation.changes[0].kind = Change.KIND_DELETE
        mutation.changes[0].ClearField("value")

    _change(patch, "roll_back", delete_any)
    _change(patch, "roll_back_expired", delete_any)


def commit_ignores_min_commit_ts(patch: Patch) -> None:
    """A reader above the commit timestamp has pushed it, and has read around it."""

    def own_start_only(mutation: Mutation) -> None:
        mutation.conditions[2].prefix = mutation.conditions[2].prefix[:8]

    _change(patch, "commit_primary", own_start_only)


def abort_not_primary_first(patch: Patch) -> None:
    """Others first: they are gone when somebody else finds the primary locked, and commits it."""

    async def wrong(self: commit.Commit, problem: PercolatorError, deadline: float) -> int:
        for cell in reversed(self._write.cells):
            # Each as late as a network may make it.
            await asyncio.sleep(_LATE_SECONDS)
            await self._around.cells.mutate((self._write.roll_back(cell),), deadline)
        raise problem

    patch.setattr(commit.Commit, "_give_up", wrong)


def read_without_the_after_check(patch: Patch) -> None:
    """A deposed owner answers from what it knew."""
    patch.setattr(TabletState, "require_ownership", lambda self: None)


def write_without_the_after_check(patch: Patch) -> None:
    """A deposed owner acknowledges what nobody will ever read: the lost epoch check."""
    patch.setattr(EpochDirectory, "stands", lambda self: True)


def commit_timestamp_before_the_prewrites(patch: Patch) -> None:
    """A reader above it has read a cell that was not locked yet."""
    correct = commit.Commit._prewrite

    async def wrong(self: commit.Commit, deadline: float) -> int:
        await self._point._take_commit_timestamp(deadline)
        return await correct(self, deadline)

    patch.setattr(commit.Commit, "_prewrite", wrong)


def prewrite_ignores_newer_commits(patch: Patch) -> None:
    """A lost update."""

    def forget(mutation: Mutation) -> None:
        mutation.conditions.pop()

    _change(patch, "prewrite", forget)


def primary_by_chance(patch: Patch) -> None:
    """Two committers of one transaction decide at two places."""
    correct = WriteSteps.__init__
    turns = [0]

    def wrong(self: WriteSteps, start: int, writes: Any, *rest: Any) -> None:
        turns[0] += 1
        cells = sorted(writes)
        turn = turns[0] % len(cells)
        correct(self, start, {cell: writes[cell] for cell in cells[turn : turn + 1]}, *rest)
        self.writes = writes
        self.cells = cells[turn:] + cells[:turn]

    patch.setattr(WriteSteps, "__init__", wrong)


def _change(patch: Patch, name: str, change: Callable[[Mutation], None]) -> None:
    """Plants a bug into one of the steps of the protocol."""
    correct: Callable[..., Mutation] = getattr(steps, name)

    def wrong(*arguments: Any) -> Mutation:
        mutation = correct(*arguments)
        change(mutation)
        return mutation

    patch.setattr(steps, name, wrong)


@dataclass(frozen=True)
class Bug:
    """A bug, and where it has to be looked for."""

    plant: Callable[[Patch], None]
    kinds: tuple[Kind, ...] = ()
    """Strikes that bring it to light, many of them; none: whatever a seed means."""
    workload: str | None = None
    doubled_share: float = 0.04
    """Of transactions with two committers."""
    seconds_max: float = 1.0
    """How long a strike lasts."""
    seeds_max: int = 100
    with_master: bool = False
    after_seconds: float = 0.0
    """Strikes wait so long, and there is work for as long: first, history has to be collected."""
    is_quickly_caught: bool = False
    """In seconds: then it is tested whenever anything is."""

    @property
    def name(self) -> str:
        return self.plant.__name__.replace("_", " ")

    def scenario(self, seed: int) -> Scenario:
        if self.kinds:
            found = harsh(seed, self.kinds, workload=self.workload, seconds_max=self.seconds_max)
        else:
            found = scenario_of(seed, workload=self.workload, with_master=False)
        if self.after_seconds:
            late = (
                replace(strike, at_seconds=strike.at_seconds + self.after_seconds)
                for strike in found.strikes
            )
            found = replace(found, strikes=tuple(late), transactions=_LONG_TRANSACTIONS)
        return replace(found, doubled_share=self.doubled_share, with_master=self.with_master)


BUGS = (
    Bug(no_rollback_marker, (Kind.PAUSE, Kind.SLOW_LINKS), seconds_max=3.0),
    Bug(new_commit_timestamp_after_a_time_out),
    Bug(read_ignores_locks, is_quickly_caught=True),
    Bug(oracle_without_persistence, (Kind.CRASH_ORACLE, Kind.CLOCK_BACK), is_quickly_caught=True),
    Bug(secondaries_decided_without_the_primary),
    Bug(mirror_after_the_snapshot),
    Bug(rollback_deletes_a_foreign_lock, is_quickly_caught=True),
    Bug(commit_ignores_min_commit_ts),
    Bug(abort_not_primary_first, workload="lock order", doubled_share=0.5, seeds_max=300),
    # Who is refused while a commit is being written: mostly one of two committers, who gives up.
    Bug(
        durability_bugs.refusal_answered_before_its_batch_is_durable,
        (Kind.POWER, Kind.SLOW_DISK),
        workload="bank",
        doubled_share=0.6,
        seconds_max=3.0,
        seeds_max=200,
    ),
    *(
        Bug(plant, kinds, seeds_max=500, is_quickly_caught=quickly)
        for plant, kinds, quickly in durability_bugs.ALL
    ),
    Bug(read_without_the_after_check, (Kind.TAKEOVER,)),
    Bug(write_without_the_after_check, (Kind.TAKEOVER,), is_quickly_caught=True),
    Bug(commit_timestamp_before_the_prewrites),
    Bug(prewrite_ignores_newer_commits),
    Bug(primary_by_chance),
    Bug(
        observer_bugs.notification_newer_than_the_snapshot_deleted,
        workload="chains",
    ),
    Bug(observer_bugs.notification_at_the_start_timestamp, workload="chains"),
    Bug(
        observer_bugs.acknowledgement_not_in_the_transaction,
        workload="chains",
    ),
    Bug(observer_bugs.weak_notification_not_written_again, (Kind.SLOW_LINKS,), workload="chains"),
    Bug(
        observer_bugs.roll_forward_without_the_notification,
        (Kind.CLIENT_STEP,),
        workload="chains",
    ),
    Bug(
        observer_bugs.registration_returns_before_tablets_know,
        workload="chains",
        with_master=True,
        is_quickly_caught=True,
    ),
    Bug(
        observer_bugs.commits_of_any_schema_are_taken,
        workload="chains",
        with_master=True,
    ),
    Bug(
        observer_bugs.unknown_run_taken_for_committed,
        (Kind.PAUSE, Kind.ONE_WAY),
        workload="chains",
        seconds_max=12.0,
        seeds_max=500,
    ),
    Bug(
        observer_bugs.notification_deleted_before_the_run,
        (Kind.CRASH, Kind.PAUSE),
        workload="chains",
    ),
    *(
        Bug(plant, kinds, workload=workload, with_master=True, seconds_max=5.0, seeds_max=400)
        for plant, kinds, workload in collection_bugs.ALL
    ),
    Bug(
        collection_bugs.new_owner_forgets_the_safe_point,
        (Kind.PAUSE, Kind.TAKEOVER),
        workload="sequential",
        with_master=True,
        after_seconds=3.5,
        seconds_max=3.0,
        seeds_max=400,
    ),
    *(
        Bug(plant, kinds, workload="loads", is_quickly_caught=quickly)
        for plant, kinds, quickly in load_bugs.ALL
    ),
)


def seeds_until_caught(bug: Bug, first: int = 0) -> tuple[int, Verdict | None]:
    """How many seeds it took, and what was seen; None when it was not caught."""
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        for seeds in range(1, bug.seeds_max + 1):
            verdict = simulate(bug.scenario(first + seeds - 1))
            if verdict.failed:
                return seeds, verdict
    return bug.seeds_max, None
