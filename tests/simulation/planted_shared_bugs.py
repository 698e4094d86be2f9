"""Bugs of shared transactions.

That a part pushed above the commit is never committed, and that a tablet checks its ownership after
it has written a group, is shown by tests/unit/tablet/test_bad_mutations.py: the times at which it
matters are too rare here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import wraps
from itertools import cycle
from typing import Any, cast

import pytest

from percolator.aio import shared
from percolator.aio.shared import Receipt, SharedTransaction
from percolator.bigtable import messages
from percolator.bigtable.store import BigtableStore
from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    NotExecuted,
    NotReady,
    PercolatorError,
    Retry,
    SnapshotTooOld,
    Unavailable,
)
from percolator.formats.records import START_TIMESTAMP_BYTES, locked_column
from percolator.history.rows import RowHistory
from percolator.protocol import steps
from percolator.protocol.cleanup import Pushing
from percolator.protocol.commit import Sent
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import OpenStarts
from percolator.protocol.roll_forward import Rolling, tell_of_commits
from percolator.protocol.shared import driver
from percolator.protocol.shared.attempt import KEPT, Attempt
from percolator.protocol.shared.driver import SharedCommit
from percolator.protocol.shared.participant import Job, Participant, ParticipantKey, locks_of
from percolator.protocol.steps import OWN_COMMIT
from percolator.protocol.write_set import Write
from percolator.routing.cells import (
    APPLIED,
    Answer,
    CellMutation,
    FoundCell,
    Refused,
    RowRequest,
    RowResult,
)
from percolator.routing.router import Router
from percolator.rowstore import collection, mapping, mutations, reads
from percolator.rowstore.collection import Bounds, Plan
from percolator.rowstore.layout import (
    COLLECTED,
    DATA,
    LOCK_ONLY,
    LOCKS,
    ROLLBACKS,
    WRITES,
    Times,
    column_bounds,
    newest_note,
    row_key,
)
from percolator.rowstore.mapping import OtherSide, Step, other_sides
from percolator.rowstore.mutations import Group, grouped
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import Change, Check, Selection, SetCell, StoredCell, StoredRow
from percolator.rowstore.reads import Gathering, RowReads, RowScan, Wanted
from percolator.services.chassis.record_coordinator import RecordLeadership, RoleRecord, Stamp
from percolator.services.master.collection import ClusterSafePoints, Collection, OracleTime
from percolator.services.master.master import ROLE as MASTER_ROLE
from percolator.services.master.row_term import RowCollecting, RowDrops
from percolator.services.oracle.oracle import Oracle, OracleHandler
from percolator.services.tabletserver.tablets import Tablets
from percolator.tablet.cells import TIMESTAMP_MAX
from percolator.tablet.requests import CheckedMutation
from percolator.tablet.rolling_forward import RollingForward, _Fate, _Order
from percolator.tablet.tablet import Tablet
from percolator.timestamps import Timestamp
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.v1.tabletserver_pb2 import Mutation, TabletTarget
from tests.patching import in_place_of
from tests.simulation import planted_protocol_bugs as protocol_bugs
from tests.simulation import rows
from tests.simulation.bug import PerSeed
from tests.simulation.planted_observer_bugs import old_locks_rolled_back_without_their_primary
from tests.simulation.rows import CollectorTimes
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def attempts_at_a_task_share_a_part(patch: Patch) -> None:
    """Cells that a late attempt locks after the commit are committed with the rest."""
    correct = Attempt._participant
    shared = PerSeed(dict[tuple[bytes, str], Participant])

    @in_place_of(patch, Attempt, "_participant")
    async def wrong(self: Attempt, deadline: float) -> Participant:
        key = self._job.row, self._task
        if not self.participants and key in shared.now():
            participant = shared.now()[key]
            self._current = participant
            self.participants.append(participant)
            self._heads = {}
            return participant
        participant = await correct(self, deadline)
        shared.now().setdefault(key, participant)
        return participant


def named_before_everything_is_locked(patch: Patch) -> None:
    """The commit timestamp is taken while cells are still being locked."""
    correct = Attempt.prewrite

    async def locks(self: Attempt, writes: Mapping[CellAddress, Write], deadline: float) -> None:
        await asyncio.sleep(0.01)
        try:
            await correct(self, writes, deadline)
        except PercolatorError:
            self._has_failed = False

    @in_place_of(patch, Attempt, "prewrite")
    async def wrong(self: Attempt, writes: Mapping[CellAddress, Write], deadline: float) -> None:
        await self._participant(deadline)
        self._env.background.start(locks(self, writes, deadline))

    patch.setattr(Attempt, "_require_going_on", lambda self: None)


def a_failed_attempt_goes_on(patch: Patch) -> None:
    """A message of it that was not answered locks a cell after the commit, or never."""
    patch.setattr(Attempt, "_require_going_on", lambda self: None)


def all_parts_are_committed(patch: Patch) -> None:
    """Cells locked by attempts whose receipts never reached the driver are committed, too."""
    correct = SharedTransaction.commit

    @in_place_of(patch, SharedTransaction, "commit")
    async def wrong(
        self: SharedTransaction, receipts: Sequence[Receipt], *, timeout: float | None = None
    ) -> Timestamp | None:
        if self._shared_commit is None:
            engine, job = self._engine, self.ticket.job
            deadline = engine.now() + 1.0
            found = await locks_of(engine.env, job, deadline)
            keys = {ParticipantKey(one.start_timestamp, one.primary.column) for one in found}
            named = {part for receipt in receipts for part in receipt.parts}
            self._named = tuple(sorted(keys | named))
            self._shared_commit = SharedCommit(engine.env, engine.groups, job, self._named, {}, {})
        return await correct(self, receipts, timeout=timeout)


def parts_are_committed_one_by_one(patch: Patch) -> None:
    """Some are committed, and others can no longer be."""

    @in_place_of(patch, Router, "mutate_together")
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


def timestamp_from_before_the_last_prewrite(patch: Patch) -> None:
    """A reader above it has read a cell that was not locked yet."""

    @in_place_of(patch, SharedCommit, "_new_timestamp")
    async def wrong(self: SharedCommit, deadline: float) -> int:
        # Above what beats and the end of the attempt have raised the least commit timestamp to.
        return max(part.start for part in self._participants) + 50


def another_attempts_lock_is_taken_for_our_own(patch: Patch) -> None:
    """The write is lost when the other attempt is not chosen."""

    @in_place_of(patch, Attempt, "_is_ours")
    def wrong(self: Attempt, met: MetLock, write: Write) -> bool:
        return self._job.participant_of(met.lock.primary) is not None


def a_part_begins_after_the_end(patch: Patch) -> None:
    """Its locks block others until they expire: nothing is left to roll it back."""
    patch.setattr("percolator.protocol.shared.participant.look", _looks_elsewhere)


def _looks_elsewhere(job: Job) -> Mutation:
    return steps.require_open(job.row, b"elsewhere", job.began)


def pushed_once_is_passed_for_good(patch: Patch) -> None:
    """A part that was pushed above one snapshot is passed by later ones, and commits below them."""

    @in_place_of(patch, Pushing, "is_above")
    def wrong(self: Pushing, start: int, read_at: int) -> bool:
        return start in self._min_commits


def locks_are_read_below_their_commit(patch: Patch) -> None:
    """A snapshot shows the value in a lock whose transaction has committed above it."""
    correct = Rolling.read

    @in_place_of(patch, Rolling, "read")
    def wrong(self: Rolling, met: MetLock, read_at: int) -> FoundCell | None:
        return correct(self, met, TIMESTAMP_MAX)


def kept_cells_are_locked_whatever_was_committed(patch: Patch) -> None:
    """A cell that was committed since it was read is locked as if it still had the job's value."""
    correct = Attempt._prewrite

    @in_place_of(patch, Attempt, "_prewrite")
    def wrong(
        self: Attempt,
        participant: Participant,
        cell: CellAddress,
        write: Write,
        *arguments: Any,
    ) -> CellMutation:
        sent = correct(self, participant, cell, write, *arguments)
        if write is not KEPT:
            return sent
        step = sent.message()
        del step.conditions[steps.PREWRITE_NEWER_COMMIT]
        return sent._replace(mutation=step)


def tablets_believe_what_they_are_told(patch: Patch) -> None:
    """Then a mistake of a driver becomes a commit."""

    @in_place_of(patch, RollingForward, "_are_proven")
    async def wrong(self: RollingForward, order: _Order) -> bool:
        return True


def a_driver_takes_the_commit_of_another_one_for_its_own(patch: Patch) -> None:
    """Its parts are rolled back, and it is told a commit timestamp."""

    @in_place_of(patch, driver, "require_committed")
    async def wrong(*_: object) -> None:
        pass


def no_copy_of_a_refused_group_is_expected(patch: Patch) -> None:
    """A copy arrives when the server has the tablet; the transaction was reported as aborted."""

    def get(self: SharedCommit) -> Sent:
        sent: Sent = vars(self)["sent"]
        return Sent.NOTHING if sent is Sent.LATE_COPY else sent

    def put(self: SharedCommit, sent: Sent) -> None:
        vars(self)["sent"] = sent

    patch.setattr(SharedCommit, "sent", property(get, put), raising=False)
    give_up_while_no_tablet_is_served(patch)


def give_up_while_no_tablet_is_served(patch: Patch) -> None:
    """Otherwise the marker is there before a copy arrives."""
    correct = Tablets.serving

    @in_place_of(patch, SharedTransaction, "_deadline")
    def deadline(self: SharedTransaction, timeout: float | None) -> float:
        return self._engine.now() + 0.3

    @in_place_of(patch, Tablets, "serving")
    async def serving(self: Tablets, target: TabletTarget) -> Tablet:
        if asyncio.get_running_loop().time() % 2.0 < 0.9:
            raise NotReady("the tablet is about to be served")
        return await correct(self, target)

    patch.setattr(shared, "ROLLBACK_SECONDS", 0.1)


def tablets_roll_any_lock_forward(patch: Patch) -> None:
    """A tablet that was told of one transaction's commit takes all locks that it has for its."""
    tablets_believe_what_they_are_told(patch)
    correct = RollingForward._gather

    @in_place_of(patch, RollingForward, "_gather")
    def wrong(
        self: RollingForward,
        order: _Order,
        first: bytes,
        stop: bytes | None,
        found: list[CheckedMutation],
    ) -> tuple[bytes | None, int]:
        commit = next(iter(order.fates.values())).commit_ts
        headers = self._state.mirror.headers.values()
        all_starts = {header[:START_TIMESTAMP_BYTES] for header in headers}
        fates = {start: _Fate(int.from_bytes(start, "big"), commit) for start in all_starts}
        return correct(self, order._replace(fates=fates), first, stop, found)


def tablets_roll_forward_what_has_lost_its_lock(patch: Patch) -> None:
    """Another client was first, and the cell is locked by another transaction by now."""
    correct = RollingForward._write

    @in_place_of(patch, RollingForward, "_write")
    async def wrong(
        self: RollingForward, order: _Order, found: list[CheckedMutation], weight: int
    ) -> None:
        await asyncio.sleep(0.05)  # behind other batches
        late: list[CheckedMutation] = [
            (row, column, cell, not_below, [], changes)
            for row, column, cell, not_below, _, changes in found
        ]
        await correct(self, order, late, weight)


def tablets_are_told_of_what_was_not_chosen(patch: Patch) -> None:
    """The driver names all parts that it finds, and not those that it has committed."""
    tablets_believe_what_they_are_told(patch)
    correct = SharedTransaction._tell_tablets

    @in_place_of(patch, SharedTransaction, "_tell_tablets")
    async def wrong(self: SharedTransaction, commit: int) -> None:
        env, job = self._engine.env, self.ticket.job
        found = await locks_of(env, job, env.now() + 1.0)
        others = (ParticipantKey(one.start_timestamp, one.primary.column) for one in found)
        self._named = (*self._named, *others)
        await correct(self, commit)


def tablets_are_told_before_the_commit(patch: Patch) -> None:
    """They take the timestamp that the driver tries, which need not be the one that it gets."""
    tablets_believe_what_they_are_told(patch)
    correct = SharedCommit._new_timestamp

    @in_place_of(patch, SharedCommit, "_new_timestamp")
    async def wrong(self: SharedCommit, deadline: float) -> int:
        commit = await correct(self, deadline)
        commits = {part.start: commit for part in self._participants}
        for table_id in list(self._env.schemas._by_id):  # type: ignore[attr-defined]
            await tell_of_commits(self._env, table_id, commits, deadline)
        return commit


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

    @in_place_of(patch, mutations, "grouped")
    def wrong(steps: Sequence[Step], ranges_max: int, times: Times) -> Group:
        asked = [step if step.changes else step._replace(selections=()) for step in steps]
        return grouped(asked, ranges_max, times)


def _check(patch: Patch, changed: Callable[[Check], Check]) -> None:
    """Changes what is asked before parts are committed."""

    @in_place_of(patch, mutations, "grouped")
    def wrong(steps: Sequence[Step], ranges_max: int, times: Times) -> Group:
        group = grouped(steps, ranges_max, times)
        return group._replace(check=changed(group.check)) if group.check.found else group


ROW_SHARED_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (all_locks_of_the_row_count, (), True),
    (all_locks_but_one_are_enough, (), True),
    (a_part_begins_in_a_row_whatever_closed_it, (), True),
)
"""Each with the disruptions that reveal it, and whether it is caught in seconds."""


# Bugs in the way from the protocol to a row store: one for each line of the mapping.
#
# Those that break no promise of a history are planted in tests/unit/rowstore instead.

Kept = Callable[[Mutation, Selection], bool]


def prewrite_passes_locks(patch: Patch) -> None:
    """Two transactions hold the cell."""
    _keep(patch, lambda step, one: not _is_prewrite(step) or one.family != LOCKS)


def prewrite_passes_newer_puts(patch: Patch) -> None:
    """A lost update."""
    _keep(patch, lambda step, one: not _is_prewrite(step) or one.family != WRITES)


def prewrite_passes_newer_lock_only_commits(patch: Patch) -> None:
    """A cell that was locked against changes has changed."""
    _keep(patch, lambda step, one: not _is_prewrite(step) or one.family != LOCK_ONLY)


def prewrite_passes_rollback_markers(patch: Patch) -> None:
    """A late one begins a transaction anew that others have reported as rolled back."""
    _keep(patch, lambda step, one: not _is_prewrite(step) or one.family != ROLLBACKS)


def rollback_passes_the_own_commit(patch: Patch) -> None:
    """A committed transaction is rolled back on one of its cells."""
    _keep(patch, lambda step, one: _is_prewrite(step) or one.family not in (WRITES, LOCK_ONLY))


def commit_of_the_primary_passes_a_push(patch: Patch) -> None:
    """A reader has pushed the lock, and read past it."""
    correct = mapping.own_lock

    def wrong(column: bytes, prefix: bytes, times: Times) -> Selection:
        return correct(column, prefix[:START_TIMESTAMP_BYTES], times)

    patch.setattr(mapping, "own_lock", wrong)
    patch.setattr(mapping, "own_lock", wrong)


def commit_does_not_need_the_lock(patch: Patch) -> None:
    """The transaction was rolled back meanwhile."""
    correct = mapping.check_of

    @in_place_of(patch, mutations, "check_of")
    def wrong(some: Sequence[Step]) -> Check:
        check = correct(some)
        nowhere = Selection(LOCKS, b"\xff")
        return Check((nowhere,), found=False) if check.found else check


def replaced_lock_does_not_have_to_be_there(patch: Patch) -> None:
    """A heartbeat or a push that is late brings the lock of an ended transaction back, or takes the
    cell from another one."""
    correct = mapping.check_of

    @in_place_of(patch, mutations, "check_of")
    def wrong(some: Sequence[Step]) -> Check:
        check = correct(some)
        replaces = check.found and all(isinstance(one, SetCell) for one in some[0].changes)
        return Check((Selection(LOCKS, b"\xff"),), found=False) if replaces else check


def rollback_sets_no_marker(patch: Patch) -> None:
    """A late prewrite begins the transaction anew."""
    correct = mapping._changed

    @in_place_of(patch, mapping, "_changed")
    def wrong(column: bytes, start: int, change: Any, times: Times) -> tuple[Change, ...]:
        found = correct(column, start, change, times)
        is_marker = any(isinstance(one, SetCell) and one.family == ROLLBACKS for one in found)
        return found[1:] if is_marker else found


def any_lock_is_deleted_with_the_own(patch: Patch) -> None:
    """Another transaction has locked the cell since."""
    correct = messages.add_mutation

    def wrong(mutations: Any, change: Any) -> None:
        correct(mutations, change)
        if change.family == LOCKS and mutations[-1].HasField("delete_from_column"):
            mutations[-1].delete_from_column.time_range.Clear()

    patch.setattr("percolator.bigtable.store.add_mutation", wrong)


def refusals_in_another_order(patch: Patch) -> None:
    """The own commit is taken for that of another transaction."""
    correct = mutations.refusal

    @in_place_of(patch, mutations, "refusal")
    def wrong(step: Mutation, cells: Iterable[StoredCell], times: Times) -> Any:
        turned = Mutation()
        turned.CopyFrom(step)
        del turned.conditions[:]
        turned.conditions.extend(reversed(step.conditions))
        refused = correct(turned, cells, times)
        if isinstance(refused, Refused):
            refused.condition = len(step.conditions) - 1 - refused.condition
        return refused


def one_refusal_for_all_joined_steps(patch: Patch) -> None:
    """Possible steps are answered as made, although the call has changed nothing."""
    correct = mutations.RowMutations._judge

    @in_place_of(patch, mutations.RowMutations, "_judge")
    async def wrong(
        self: Any, group: Any, judged: dict[int, Step], answers: list[Any], patience: Patience
    ) -> None:
        before = list(answers)
        await correct(self, group, judged, answers, patience)
        if len(judged) > 1 and answers != before:
            for place in judged:
                if answers[place] is before[place]:
                    answers[place] = APPLIED


def no_answer_is_taken_for_not_executed(patch: Patch) -> None:
    """It was executed: the transaction is reported as aborted, and is committed."""
    protocol_bugs.no_copy_of_a_refused_commit_is_expected(patch)  # it would keep the outcome open
    correct = Patience.outlast

    @in_place_of(patch, Patience, "outlast")
    async def wrong(self: Patience, problem: PercolatorError, *, is_read: bool) -> None:
        if not is_read and problem.retry is Retry.UNKNOWN:
            raise NotExecuted(problem.message)
        await correct(self, problem, is_read=is_read)


def an_unexplained_refusal_was_not_executed(patch: Patch) -> None:
    """If a call arrives twice, the second copy is refused because of the changes of the first: the
    transaction is reported as aborted, and is committed."""
    protocol_bugs.no_copy_of_a_refused_commit_is_expected(patch)  # it would keep the outcome open
    correct = mutations.RowMutations._look

    @in_place_of(patch, mutations.RowMutations, "_look")
    async def wrong(
        self: Any, group: Any, selections: Sequence[Selection], patience: Patience
    ) -> list[StoredCell]:
        if not patience._was_refused:
            return await correct(self, group, selections, patience)
        key, seconds = row_key(group.row), patience.attempt_seconds
        try:
            rows = await self._store.read(group.table_id, [key], selections, seconds)
        except PercolatorError as error:
            raise NotExecuted(error.message) from error
        return rows[0].cells if rows else []


def reads_pass_locks(patch: Patch) -> None:
    """The owner may already hold a commit timestamp below the reader's."""
    correct = reads._selections

    @in_place_of(patch, reads, "_selections")
    def wrong(*arguments: Any) -> tuple[Selection, ...]:
        return tuple(one for one in correct(*arguments) if one.family != LOCKS)


def commits_are_read_before_locks(patch: Patch) -> None:
    """Two calls see two states: between them, a lock becomes a commit."""
    correct = RowReads.read

    @in_place_of(patch, reads.RowReads, "read")
    async def wrong(
        self: RowReads, requests: Sequence[RowRequest], deadline: float, **how: Any
    ) -> list[RowResult]:
        early = await correct(self, requests, deadline, **how)
        late = await correct(self, requests, deadline, **how)
        for first, second in zip(early, late, strict=True):
            first.locks = second.locks
        return early


def writers_pass_read_locks(patch: Patch) -> None:
    """A value read under a lock is changed before the reader commits."""
    _other_sides(patch, lambda step: locked_column(step.column) is not None)


def read_locks_pass_writers(patch: Patch) -> None:
    """A reader locks what has changed since it was read."""
    _other_sides(patch, lambda step: locked_column(step.column) is None)


def a_hidden_version_taken_for_none(patch: Patch) -> None:
    """An earlier reader shares the call of a later one, and sees what that has to see."""
    patch.setattr(reads, "hides_earlier", lambda cells, timestamp, times: False)


def shared_reads_as_of_whoever_leads(patch: Patch) -> None:
    """Readers that join later, with a later timestamp, miss versions and locks."""
    correct = Gathering.follow

    @in_place_of(patch, Gathering, "follow")
    async def wrong(self: Gathering, key: bytes, timestamp: int) -> Any:
        return await correct(self, key, self.latest)


def calls_joined_after_they_were_sent(patch: Patch) -> None:
    """The cells they find may be older than the timestamp of the reader that joins."""
    correct = RowReads._together
    calls = PerSeed(dict[tuple[object, ...], asyncio.Task[Any]])

    @in_place_of(patch, RowReads, "_together")
    async def wrong(
        self: RowReads, table_id: int, key: bytes, wanted: Wanted, deadline: float
    ) -> Any:
        about = (id(self), table_id, key, wanted.columns)
        sent = calls.now()
        call = sent.get(about)
        if call is None:
            reads = correct(self, table_id, key, wanted, deadline)
            call = sent[about] = asyncio.ensure_future(reads)
            call.add_done_callback(lambda _: sent.pop(about))
        return await asyncio.shield(call)


def a_scan_that_broke_off_taken_for_complete(patch: Patch) -> None:
    """Rows behind it are missing in a snapshot, and locks are overlooked by collection."""
    correct = BigtableStore.scan

    @in_place_of(patch, BigtableStore, "scan")
    async def wrong(
        self: BigtableStore, *arguments: Any, **named: Any
    ) -> AsyncGenerator[StoredRow, None]:
        try:
            async with aclosing(correct(self, *arguments, **named)) as rows:
                async for row in rows:
                    yield row
        except (Unavailable, DeadlineExceeded):
            return


def a_page_that_broke_off_begins_again_too_far(patch: Patch) -> None:
    """The next row is missing in a snapshot."""
    correct = RowScan._attempt

    @in_place_of(patch, RowScan, "_attempt")
    async def wrong(self: RowScan, seconds: float) -> Any:
        part = await correct(self, seconds)
        is_full = len(part.rows) >= min(self._limits.page_rows_max, self._rows_left or 1 << 30)
        if part.boundary is None or is_full or self._request.reverse:
            return part
        last = part.boundary.rstrip(b"\0")
        behind = last[:-1] + bytes((min(last[-1] + 1, 0xFF),)) + b"\0"
        return part._replace(boundary=behind)


def _is_prewrite(step: Mutation) -> bool:
    return len(step.conditions) >= 4


def _keep(patch: Patch, kept: Kept) -> None:
    """Leaves out some of what must not be found."""
    correct = mapping._obstacles

    @in_place_of(patch, mapping, "_obstacles")
    def wrong(step: Mutation, times: Times) -> Iterator[Selection]:
        return (one for one in correct(step, times) if kept(step, one))

    common = mapping.prewrite_obstacles

    @in_place_of(patch, mapping, "prewrite_obstacles")
    def wrong_too(column: bytes, start: int, times: Times) -> tuple[Selection, ...]:
        step = steps.prewrite(b"", column, start, b"", None)
        return tuple(one for one in common(column, start, times) if kept(step, one))


def _other_sides(patch: Patch, judged: Callable[[Mutation], bool]) -> None:
    """Asks about the other side only for some steps."""

    def wrong(step: Mutation) -> Iterator[OtherSide]:
        return other_sides(step) if judged(step) else iter(())

    patch.setattr(mapping, "other_sides", wrong)
    patch.setattr(mutations, "other_sides", wrong)
    common = mapping.prewrite_obstacles

    @in_place_of(patch, mapping, "prewrite_obstacles")
    def wrong_too(column: bytes, start: int, times: Times) -> tuple[Selection, ...]:
        found = common(column, start, times)
        if judged(steps.prewrite(b"", column, start, b"", None)):
            return found
        own = column_bounds(column)
        return tuple(one for one in found if one.family == COLLECTED or one[1:3] == own)


_STOPS = (Kind.PAUSE, Kind.SLOW_LINKS)

ROW_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], str | None, bool], ...] = (
    (prewrite_passes_locks, (), None, True),
    (prewrite_passes_newer_puts, (), "bank", True),
    (prewrite_passes_newer_lock_only_commits, (), "lock order", False),
    (prewrite_passes_rollback_markers, _STOPS, None, True),
    (rollback_passes_the_own_commit, _STOPS, None, True),
    (commit_of_the_primary_passes_a_push, _STOPS, None, False),
    (commit_does_not_need_the_lock, _STOPS, None, True),
    (replaced_lock_does_not_have_to_be_there, _STOPS, None, True),
    (rollback_sets_no_marker, _STOPS, None, True),
    (any_lock_is_deleted_with_the_own, (), "bank", True),
    (refusals_in_another_order, _STOPS, None, True),
    (one_refusal_for_all_joined_steps, (), None, False),
    (no_answer_is_taken_for_not_executed, _STOPS, None, True),
    (reads_pass_locks, (), None, True),
    (commits_are_read_before_locks, (), None, True),
    (a_hidden_version_taken_for_none, (), None, False),
    (shared_reads_as_of_whoever_leads, (), None, False),
    (calls_joined_after_they_were_sent, (), None, False),
    (writers_pass_read_locks, (), "hubs", True),
    (read_locks_pass_writers, (), "hubs", True),
    (a_scan_that_broke_off_taken_for_complete, _STOPS, None, True),
    (a_page_that_broke_off_begins_again_too_far, _STOPS, None, True),
)
"""Each with the kinds of disruptions and the workload that reveal it, and whether it is caught
within seconds."""


# Bugs in the collection of rows: one for each rule of `rowstore/collecting.py` and its notes.
#
# Those that break no promise of a history are found by tests/unit/rowstore, which uses them too.


def prewrite_passes_the_note(patch: Patch) -> None:
    """The commit with which it conflicts was collected: a lost update."""
    correct = mapping.oldest_admitted

    def wrong(step: Mutation) -> int:
        return 0 if step.not_below else correct(step)

    common = mapping.prewrite_obstacles

    def wrong_too(column: bytes, start: int, times: Times) -> tuple[Selection, ...]:
        found = common(column, start, times)
        return tuple(one for one in found if one.family != COLLECTED)

    _admit(patch, wrong)
    patch.setattr(mapping, "prewrite_obstacles", wrong_too)


def rollback_passes_the_note(patch: Patch) -> None:
    """The commit that it would have met was collected: a committed transaction is marked."""

    def wrong(step: Mutation) -> int:
        return step.not_below

    _admit(patch, wrong)


def note_judged_before_the_own_commit(patch: Patch) -> None:
    """A transaction whose commit is there is taken for one that never committed."""
    correct = mutations.refusal

    @in_place_of(patch, mutations, "refusal")
    def wrong(step: Mutation, cells: Sequence[StoredCell], times: Times) -> object:
        answer: object = correct(step, cells, times)
        oldest = mapping.oldest_admitted(step)
        if 0 < oldest < newest_note(cells, times):
            is_own = isinstance(answer, Refused) and answer.condition == OWN_COMMIT
            return SnapshotTooOld("judged first") if is_own else answer
        return answer


def read_passes_the_note(patch: Patch) -> None:
    """A snapshot misses what was collected."""
    patch.setattr(reads, "_require_kept", lambda *_: None)


def deletes_without_a_note(patch: Patch) -> None:
    """Reads below collected versions are not refused."""
    correct = Plan.changes

    @in_place_of(patch, Plan, "changes")
    def wrong(self: Plan, bounds: Bounds, times: Times) -> Iterator[list[Change]]:
        for part in correct(self, bounds, times):
            yield [one for one in part if one.family != COLLECTED]


def deletion_goes_first(patch: Patch) -> None:
    """Deleted values reappear."""
    correct = Plan.changes

    @in_place_of(patch, Plan, "changes")
    def wrong(self: Plan, bounds: Bounds, times: Times) -> Iterator[list[Change]]:
        if any(one.family == WRITES for one in self.versions):
            self.versions.clear()
        return correct(self, bounds, times)


def dead_letters_are_forgotten(patch: Patch) -> None:
    """The observer that tries again does not find the deletion for which it ran."""
    patch.setattr(collection, "_tells_of_a_dead_letter", lambda cell: False)


def acknowledgements_stay(patch: Patch) -> None:
    """Each deleted cell leaves one, for ever."""
    patch.setattr(collection, "_observed", lambda column: None)


def values_stay(patch: Patch) -> None:
    """Long values are never deleted."""
    correct = Plan.changes

    @in_place_of(patch, Plan, "changes")
    def wrong(self: Plan, bounds: Bounds, times: Times) -> Iterator[list[Change]]:
        self.versions = [one for one in self.versions if one.family != DATA]
        return correct(self, bounds, times)


def collects_before_old_locks_are_resolved(patch: Patch) -> None:
    """The rest of a committed transaction is rolled back: its primary no longer shows a commit."""

    @in_place_of(patch, RowHistory, "_resolve")
    async def nothing(*_: object) -> None:
        return


def with_eager_collectors(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """The bug, where a run of a few seconds sees much collection. No client tells what it
    needs: then only being refused keeps it from what is gone."""

    @wraps(plant)
    def both(patch: Patch) -> None:
        plant(patch)
        patch.setattr(OpenStarts, "oldest", lambda self: 0)
        times = CollectorTimes(round_seconds=0.2, retention_seconds=0.3)
        patch.setattr(rows, "_COLLECTION", times)

    return both


def _admit(patch: Patch, oldest_admitted: Any) -> None:
    patch.setattr(mapping, "oldest_admitted", oldest_admitted)
    patch.setattr(mutations, "oldest_admitted", oldest_admitted)


ROW_COLLECTION_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], str | None], ...] = (
    (prewrite_passes_the_note, _STOPS, None),
    (deletes_without_a_note, _STOPS, None),
    (read_passes_the_note, (Kind.PAUSE,), None),
    (collects_before_old_locks_are_resolved, (Kind.CLIENT_STEP,), None),
    (old_locks_rolled_back_without_their_primary, (Kind.CLIENT_STEP,), None),
    (deletion_goes_first, (), None),
)
"""Each with the kinds of disruptions and the workload that reveal it."""


# Bugs of masters and oracles that keep everything in a row store.
#
# They concern who leads (services/chassis/record_coordinator.py), the catalogue's epoch, and tables
# that are dropped (services/master/row_term.py). The latter need clients that die with half of
# their cells committed, all at about the time at which the table of their primaries goes
# (tests/simulation/workloads/drops.py).


_ALL_LOCKS = 1 << 63
_BETWEEN_TWO_LOOKS_SECONDS = 0.05
"""As long as the oracle's look at the store takes when that is slow."""


def oracle_on_rows_answers_without_a_look(patch: Patch) -> None:
    """It was paused, and its successor has handed out later timestamps."""

    @in_place_of(patch, Oracle, "check_may_answer")
    async def wrong(self: Oracle) -> None:
        """Does not look."""


def master_on_rows_writes_after_it_was_replaced(patch: Patch) -> None:
    """Changes of the catalogue by its successor are lost."""
    correct = RoleRecord.change

    async def wrong(
        self: RoleRecord, seen: Stamp | None, new: Stamp, changes: Mapping[bytes, bytes | None]
    ) -> bool:
        made = await correct(self, seen, new, changes)
        if made or self.role != MASTER_ROLE or not changes:
            return made
        return await correct(self, (await self.look()).stamp, new, changes)

    noted = RecordLeadership._note

    @in_place_of(patch, RecordLeadership, "_note")
    def blind(self: RecordLeadership, found: Stamp | None) -> None:
        if self._record.role != MASTER_ROLE:
            noted(self, found)

    patch.setattr(RoleRecord, "change", wrong)


def epoch_not_raised_at_a_registration(patch: Patch) -> None:
    """Clients that know an older schema do not notify the observer."""

    @in_place_of(patch, OracleTime, "raise_epoch")
    async def wrong(self: OracleTime, deadline: float) -> None:
        """Tells nobody."""


def epoch_from_before_the_timestamps(patch: Patch) -> None:
    """An observer was registered in between, and the commit at that timestamp misses it. Every
    second answer is slow: if all were, the registration's own would be, too."""
    pauses = PerSeed(lambda: cycle((0.0, _BETWEEN_TWO_LOOKS_SECONDS)))

    @in_place_of(patch, OracleHandler, "get_timestamps")
    async def wrong(self: OracleHandler, request: GetTimestampsRequest) -> GetTimestampsResponse:
        oracle = self._candidacy.serving()
        epoch = oracle.catalogue_epoch
        await asyncio.sleep(next(pauses.now()))
        first = await oracle.get_timestamps(request.count)
        return GetTimestampsResponse(first=first, count=request.count, catalogue_epoch=epoch)


def epoch_not_raised_at_a_drop(patch: Patch) -> None:
    """Clients that know the table go on committing there until it is deleted, and then nothing
    tells that they have committed."""
    epoch_not_raised_at_a_registration(patch)


def dropped_table_deleted_at_once(patch: Patch) -> None:
    """Its cells are the only evidence of what has become of the locks in other tables."""
    correct = RowDrops.begin

    @in_place_of(patch, RowDrops, "begin")
    async def wrong(self: RowDrops) -> None:
        await correct(self)
        await self.finish(_ALL_LOCKS)


def locks_resolved_below_any_timestamp_are_enough(patch: Patch) -> None:
    """Locks that came after it, and before the epoch was raised, are still there."""
    correct = RowDrops.finish

    @in_place_of(patch, RowDrops, "finish")
    async def wrong(self: RowDrops, resolved_below: int) -> None:
        await correct(self, _ALL_LOCKS)


def table_deleted_before_the_locks_are_resolved(patch: Patch) -> None:
    """The locks whose primaries are in the dropped table are in the others."""
    correct = RowCollecting.collect

    @in_place_of(patch, RowCollecting, "collect")
    async def wrong(self: RowCollecting, ordered: ClusterSafePoints) -> None:
        await self._drops.begin()
        await self._drops.finish(ordered.transactions)
        await correct(self, ordered)


def with_eager_masters(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """The bug, where masters collect often, and from the start: otherwise a run of a
    few seconds, whose masters are disrupted, sees few tables deleted. What sessions need is judged
    too early then, so that snapshots are refused; nothing else depends on it."""

    @wraps(plant)
    def both(patch: Patch) -> None:
        plant(patch)
        patch.setattr(Collection, "_require_all_reported", lambda self, ttl_seconds_max: None)
        patch.setattr(rows, "_COLLECTION_SECONDS", 0.1)
        patch.setitem(cast("Any", RowHistory.__init__).__kwdefaults__, "share", 0.9)

    return both


ROW_CLUSTER_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], str, bool], ...] = (
    (oracle_on_rows_answers_without_a_look, _STOPS, "mixed", False),
    (master_on_rows_writes_after_it_was_replaced, _STOPS, "loads", True),
    (epoch_not_raised_at_a_registration, _STOPS, "chains", True),
)
"""Each with the kinds of disruptions and the workload that reveal it, and whether it is caught
within seconds."""

OF_DROPS: tuple[tuple[Callable[[Patch], None], bool], ...] = (
    (epoch_not_raised_at_a_drop, True),
    (dropped_table_deleted_at_once, True),
    (locks_resolved_below_any_timestamp_are_enough, True),
    (table_deleted_before_the_locks_are_resolved, True),
)
"""Each with whether it is caught within seconds."""
