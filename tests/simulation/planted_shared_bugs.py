"""Bugs of shared transactions.

That a part pushed above the commit is never committed, and that a tablet checks its ownership after
it has written a group, is shown by tests/unit/tablet/test_together.py: the times at which it
matters are too rare here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from percolator.aio import shared
from percolator.aio.shared import Receipt, SharedTransaction
from percolator.errors import CellAddress, NotReady, PercolatorError, Retry
from percolator.formats.records import START_TIMESTAMP_BYTES
from percolator.protocol import steps
from percolator.protocol.conflicts import MetLock
from percolator.protocol.resolving.pushing import Pushing
from percolator.protocol.resolving.rolling import Rolling
from percolator.protocol.resolving.rolling_in_bulk import tell_of_commits
from percolator.protocol.shared import rolling_back, whole
from percolator.protocol.shared.attempt import Attempt
from percolator.protocol.shared.keeping import locks_of
from percolator.protocol.shared.kept_cells import KEPT
from percolator.protocol.shared.names import Job, PartKey
from percolator.protocol.shared.part import Part
from percolator.protocol.shared.whole import Whole
from percolator.protocol.write_set import Write
from percolator.routing.cells import Answer, CellMutation, FoundCell
from percolator.routing.router import Router
from percolator.rowstore import mutations
from percolator.rowstore.layout import LOCKS, Times
from percolator.rowstore.mapping import Step
from percolator.rowstore.mutations import Group, grouped
from percolator.rowstore.port import Check, Selection
from percolator.services.tabletserver.tablets import Tablets
from percolator.tablet.cells import TIMESTAMP_MAX
from percolator.tablet.requests import CheckedMutation
from percolator.tablet.rolling_forward import RollingForward, _Fate, _Order
from percolator.tablet.tablet import Tablet
from percolator.timestamps import Timestamp
from percolator.v1.tabletserver_pb2 import Mutation, TabletTarget
from tests.simulation.bug import PerSeed
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def attempts_at_a_task_share_a_part(patch: Patch) -> None:
    """Cells that a late attempt locks after the commit are committed with the rest."""
    correct = Attempt._current
    shared = PerSeed(dict[tuple[bytes, str], Part])

    async def wrong(self: Attempt, deadline: float) -> Part:
        key = self._job.row, self._task
        if not self._parts and key in shared.now():
            part = shared.now()[key]
            self._part = part
            self._parts.append(part)
            self._heads = {}
            return part
        part = await correct(self, deadline)
        shared.now().setdefault(key, part)
        return part

    patch.setattr(Attempt, "_current", wrong)


def named_before_everything_is_locked(patch: Patch) -> None:
    """The commit timestamp is taken while cells are still being locked."""
    correct = Attempt.prewrite

    async def locks(self: Attempt, writes: Mapping[CellAddress, Write], deadline: float) -> None:
        await asyncio.sleep(0.01)
        try:
            await correct(self, writes, deadline)
        except PercolatorError:
            self._has_failed = False

    async def wrong(self: Attempt, writes: Mapping[CellAddress, Write], deadline: float) -> None:
        await self._current(deadline)
        self._env.background.start(locks(self, writes, deadline))

    patch.setattr(Attempt, "prewrite", wrong)
    patch.setattr(Attempt, "_require_going_on", lambda self: None)


def a_failed_attempt_goes_on(patch: Patch) -> None:
    """A message of it that was not answered locks a cell after the commit, or never."""
    patch.setattr(Attempt, "_require_going_on", lambda self: None)


def all_parts_are_committed(patch: Patch) -> None:
    """Cells locked by attempts whose receipts never reached the driver are committed, too."""
    correct = SharedTransaction.commit

    async def wrong(
        self: SharedTransaction, receipts: Sequence[Receipt], *, timeout: float | None = None
    ) -> Timestamp | None:
        if self._whole is None:
            engine, job = self._engine, self.ticket.job
            deadline = engine.now() + 1.0
            found = await locks_of(engine.env, job, deadline)
            keys = {PartKey(one.start_timestamp, one.primary.column) for one in found}
            named = {part for receipt in receipts for part in receipt.parts}
            self._named = tuple(sorted(keys | named))
            self._whole = Whole(engine.env, engine.groups, job, self._named, {})
        return await correct(self, receipts, timeout=timeout)

    patch.setattr(SharedTransaction, "commit", wrong)


def parts_are_committed_one_by_one(patch: Patch) -> None:
    """Some are committed, and others can no longer be."""

    async def wrong(
        self: Router, table_id: int, mutations: Sequence[Mutation], deadline: float
    ) -> list[Answer]:
        answers: list[Answer] = []
        for mutation in mutations:
            answers += await self.mutate([CellMutation(table_id, mutation)], deadline)
        for answer in answers:
            if isinstance(answer, PercolatorError) and answer.retry is Retry.UNKNOWN:
                raise answer
        return answers

    patch.setattr(Router, "mutate_together", wrong)


def timestamp_from_before_the_last_prewrite(patch: Patch) -> None:
    """A reader above it has read a cell that was not locked yet."""

    async def wrong(self: Whole, deadline: float) -> int:
        # Above what beats and the end of the attempt have raised the least commit timestamp to.
        return max(part.start for part in self._parts) + 50

    patch.setattr(Whole, "_new_timestamp", wrong)


def another_attempts_lock_is_taken_for_our_own(patch: Patch) -> None:
    """The write is lost when the other attempt is not chosen."""

    def wrong(self: Attempt, met: MetLock, write: Write) -> bool:
        return self._job.part_of(met.lock.primary) is not None

    patch.setattr(Attempt, "_is_ours", wrong)


def a_part_begins_after_the_end(patch: Patch) -> None:
    """Its locks block others until they expire: nothing is left to roll it back."""
    patch.setattr("percolator.protocol.shared.part.look", _looks_elsewhere)


def _looks_elsewhere(job: Job) -> Mutation:
    return steps.require_open(job.row, b"elsewhere", job.began)


def pushed_once_is_passed_for_good(patch: Patch) -> None:
    """A part that was pushed above one snapshot is passed by later ones, and commits below them."""

    def wrong(self: Pushing, start: int, read_at: int) -> bool:
        return start in self._least

    patch.setattr(Pushing, "is_above", wrong)


def locks_are_read_below_their_commit(patch: Patch) -> None:
    """A snapshot shows the value in a lock whose transaction has committed above it."""
    correct = Rolling.read

    def wrong(self: Rolling, met: MetLock, read_at: int) -> FoundCell | None:
        return correct(self, met, TIMESTAMP_MAX)

    patch.setattr(Rolling, "read", wrong)


def kept_cells_are_locked_whatever_was_committed(patch: Patch) -> None:
    """A cell that was committed since it was read is locked as if it still had the job's value."""
    correct = Attempt._prewrite

    def wrong(
        self: Attempt, part: Part, cell: CellAddress, write: Write, read_at: int
    ) -> CellMutation:
        sent = correct(self, part, cell, write, read_at)
        if write is not KEPT:
            return sent
        step = sent.message()
        del step.conditions[steps.PREWRITE_NEWER_COMMIT]
        return sent._replace(mutation=step)

    patch.setattr(Attempt, "_prewrite", wrong)


def tablets_believe_what_they_are_told(patch: Patch) -> None:
    """Then a mistake of a driver becomes a commit."""

    async def wrong(self: RollingForward, order: _Order) -> bool:
        return True

    patch.setattr(RollingForward, "_are_proven", wrong)


def a_driver_takes_the_commit_of_another_one_for_its_own(patch: Patch) -> None:
    """Its parts are rolled back, and it is told a commit timestamp."""

    async def wrong(*_: object) -> None:
        pass

    patch.setattr(whole, "require_committed", wrong)
    patch.setattr(rolling_back, "require_committed", wrong)


def no_copy_of_a_refused_group_is_expected(patch: Patch) -> None:
    """A copy arrives when the server has the tablet; the transaction was reported as aborted."""
    never = property(lambda self: False, lambda self, is_out: None)
    patch.setattr(Whole, "is_out", never, raising=False)
    give_up_while_no_tablet_is_served(patch)


def give_up_while_no_tablet_is_served(patch: Patch) -> None:
    """Otherwise the marker is there before a copy arrives."""
    correct = Tablets.serving

    def deadline(self: SharedTransaction, timeout: float | None) -> float:
        return self._engine.now() + 0.3

    async def serving(self: Tablets, target: TabletTarget) -> Tablet:
        if asyncio.get_running_loop().time() % 2.0 < 0.9:
            raise NotReady("the tablet is about to be served")
        return await correct(self, target)

    patch.setattr(Tablets, "serving", serving)
    patch.setattr(SharedTransaction, "_deadline", deadline)
    patch.setattr(shared, "ROLLBACK_SECONDS", 0.1)


def tablets_roll_any_lock_forward(patch: Patch) -> None:
    """A tablet that was told of one transaction's commit takes all locks that it has for its."""
    tablets_believe_what_they_are_told(patch)
    correct = RollingForward._gather

    def wrong(
        self: RollingForward,
        order: _Order,
        first: bytes,
        stop: bytes | None,
        found: list[CheckedMutation],
    ) -> tuple[bytes | None, int]:
        commit = next(iter(order.fates.values())).commit
        headers = self._state.mirror.headers.values()
        all_starts = {header[:START_TIMESTAMP_BYTES] for header in headers}
        fates = {start: _Fate(int.from_bytes(start, "big"), commit) for start in all_starts}
        return correct(self, order._replace(fates=fates), first, stop, found)

    patch.setattr(RollingForward, "_gather", wrong)


def tablets_roll_forward_what_has_lost_its_lock(patch: Patch) -> None:
    """Another client was first, and the cell is locked by another transaction by now."""
    correct = RollingForward._write

    async def wrong(
        self: RollingForward, order: _Order, found: list[CheckedMutation], weight: int
    ) -> None:
        await asyncio.sleep(0.05)  # behind other batches
        late: list[CheckedMutation] = [
            (row, column, cell, not_below, [], changes)
            for row, column, cell, not_below, _, changes in found
        ]
        await correct(self, order, late, weight)

    patch.setattr(RollingForward, "_write", wrong)


def tablets_are_told_of_what_was_not_chosen(patch: Patch) -> None:
    """The driver names all parts that it finds, and not those that it has committed."""
    tablets_believe_what_they_are_told(patch)
    correct = SharedTransaction._tell_tablets

    async def wrong(self: SharedTransaction, commit: int) -> None:
        env, job = self._engine.env, self.ticket.job
        found = await locks_of(env, job, env.now() + 1.0)
        others = (PartKey(one.start_timestamp, one.primary.column) for one in found)
        self._named = (*self._named, *others)
        await correct(self, commit)

    patch.setattr(SharedTransaction, "_tell_tablets", wrong)


def tablets_are_told_before_the_commit(patch: Patch) -> None:
    """They take the timestamp that the driver tries, which need not be the one that it gets."""
    tablets_believe_what_they_are_told(patch)
    correct = Whole._new_timestamp

    async def wrong(self: Whole, deadline: float) -> int:
        commit = await correct(self, deadline)
        commits = {part.start: commit for part in self._parts}
        for table_id in list(self._env.schemas._by_id):  # type: ignore[attr-defined]
            await tell_of_commits(self._env, table_id, commits, deadline)
        return commit

    patch.setattr(Whole, "_new_timestamp", wrong)


SHARED_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (attempts_at_a_task_share_a_part, (), True),
    (named_before_everything_is_locked, (), True),
    (a_failed_attempt_goes_on, (Kind.PAUSE, Kind.SLOW_LINKS), True),
    (all_parts_are_committed, (), True),
    (parts_are_committed_one_by_one, (), True),
    (timestamp_from_before_the_last_prewrite, (), True),
    (another_attempts_lock_is_taken_for_our_own, (), True),
    (a_part_begins_after_the_end, (), True),
    (pushed_once_is_passed_for_good, (), True),
    (locks_are_read_below_their_commit, (), True),
    (kept_cells_are_locked_whatever_was_committed, (), True),
    (tablets_roll_any_lock_forward, (), True),
    (tablets_roll_forward_what_has_lost_its_lock, (), True),
    (tablets_are_told_of_what_was_not_chosen, (), True),
    (tablets_are_told_before_the_commit, (), True),
)
"""Each with the disruptions that reveal it, and whether it is caught in seconds."""


# Bugs of shared transactions in a row store.
#
# That a part pushed above the commit is never committed, that nothing is committed after the marker
# that closes it, and what becomes of proofs, is shown by tests/unit/rowstore/test_groups.py: the
# situations in which it matters are too rare here.


def all_locks_of_the_row_count(patch: Patch) -> None:
    """That of an attempt that was not chosen stands for one that was rolled back."""

    def wrong(check: Check) -> Check:
        selections = [Selection(LOCKS) if one.family == LOCKS else one for one in check.selections]
        return check._replace(selections=tuple(selections))

    _check(patch, wrong)


def all_locks_but_one_are_enough(patch: Patch) -> None:
    """One part was rolled back, and the others are committed."""
    _check(patch, lambda check: check._replace(more_than=check.more_than - 1))


def a_part_begins_in_a_row_whatever_closed_it(patch: Patch) -> None:
    """Its locks block others until they expire: nothing is left to roll it back."""

    def wrong(steps: Sequence[Step], ranges_max: int, times: Times) -> Group:
        asked = [step if step.changes else step._replace(selections=()) for step in steps]
        return grouped(asked, ranges_max, times)

    patch.setattr(mutations, "grouped", wrong)


def _check(patch: Patch, changed: Callable[[Check], Check]) -> None:
    """Changes what is asked before parts are committed."""

    def wrong(steps: Sequence[Step], ranges_max: int, times: Times) -> Group:
        group = grouped(steps, ranges_max, times)
        return group._replace(check=changed(group.check)) if group.check.found else group

    patch.setattr(mutations, "grouped", wrong)


ROW_SHARED_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (all_locks_of_the_row_count, (), True),
    (all_locks_but_one_are_enough, (), True),
    (a_part_begins_in_a_row_whatever_closed_it, (), True),
)
"""Each with the disruptions that reveal it, and whether it is caught in seconds."""
