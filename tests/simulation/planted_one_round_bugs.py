"""Bugs of commits in one round: one for each of their rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from percolator.errors import (
    CellAddress,
    NotExecuted,
    PercolatorError,
    Retry,
)
from percolator.protocol.commit import Commit, State
from percolator.protocol.contention import Baton, HotCells, Turn
from percolator.protocol.write_set import Write
from percolator.routing.cells import CommitAnswer, FollowedCommit, NotSent
from percolator.routing.lanes import PendingCommit
from percolator.tablet import change_scan, group_commit
from percolator.tablet import group_commit as server
from percolator.tablet.cells import HeldCells, Holder, ReadLocks
from percolator.tablet.change_scan import ChangePlan
from percolator.tablet.group_commit import HeldTransactions, MutationQueue
from percolator.tablet.judge import Exclusion, Lines
from percolator.tablet.requests import (
    ABSENT,
    CheckedCondition,
    WholeTransaction,
    not_executed,
    prewrite_conditions,
)
from percolator.tablet.state import TabletState
from percolator.tasks import Tasks
from percolator.v1.cells_pb2 import SPACE_ROLLBACK, SPACE_WRITE
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def reads_do_not_wait(patch: Patch) -> None:
    """A reader above the commit timestamp misses a commit that is on its way."""
    patch.setattr(HeldCells, "in_the_way", lambda self, cell, timestamp: None)
    patch.setattr(HeldCells, "in_the_way_in_rows", lambda self, start, end, timestamp: [])


def timestamp_fetched_before_the_cells_are_held(patch: Patch) -> None:
    """A reader above it has read the cells before they were held."""
    correct, tasks = HeldTransactions.arrive, Tasks()

    async def fetch_first(self: HeldTransactions, transactions: list[WholeTransaction]) -> None:
        try:
            first = await self._first_timestamp(transactions)
        except PercolatorError as error:
            self._end_all(transactions, not_executed(NotExecuted(error.message)))
            return
        for commit, transaction in server.commit_timestamps(transactions, first):
            transaction.commit = commit
        correct(self, transactions)

    def wrong(self: HeldTransactions, transactions: Iterable[WholeTransaction]) -> None:
        tasks.start(fetch_first(self, list(transactions)))

    def ready_at_once(self: HeldTransactions, held: Sequence[WholeTransaction]) -> None:
        self._ready.extend(held)
        self._stir()

    patch.setattr(HeldTransactions, "arrive", wrong)
    patch.setattr(HeldTransactions, "_take_timestamps", ready_at_once)


def scans_of_changes_do_not_wait(patch: Patch) -> None:
    """A commit below their end lands after they have passed, and is never read."""

    async def wrong(state: TabletState, plan: ChangePlan) -> None:
        """Does not wait."""

    patch.setattr(change_scan, "_no_commit_is_landing", wrong)


def marker_not_checked(patch: Patch) -> None:
    """A late copy commits what `resolve` has rolled back and reported."""
    _change_conditions(patch, 1, (SPACE_ROLLBACK, ABSENT, 1, 2, b"", b"", b""))


def own_commit_not_looked_for(patch: Patch) -> None:
    """A repeated message is told of a conflict, although its first copy has committed."""
    _change_conditions(patch, 0, (SPACE_WRITE, ABSENT, 1, 2, b"", b"", b""))


def _change_conditions(patch: Patch, index: int, condition: CheckedCondition) -> None:
    correct = prewrite_conditions

    def wrong(start: int) -> list[CheckedCondition]:
        conditions = correct(start)
        conditions[index] = condition
        return conditions

    patch.setattr(server, "prewrite_conditions", wrong)


def two_phases_after_a_message_without_an_answer(patch: Patch) -> None:
    """They give up what the message commits."""
    correct = Commit._heard

    def wrong(self: Commit, answer: CommitAnswer) -> None:
        correct(self, answer)
        if self.state is State.ONE_ROUND and getattr(answer, "retry", None) is Retry.UNKNOWN:
            self.is_out = self.is_unanswered = False
            answer.retry = Retry.SAFE  # type: ignore[union-attr]

    patch.setattr(Commit, "_heard", wrong)


def refusal_speaks_for_an_unanswered_message(patch: Patch) -> None:
    """The message before it may have committed what is given up then."""
    correct = Commit._heard

    def wrong(self: Commit, answer: CommitAnswer) -> None:
        correct(self, answer)
        is_refusal = isinstance(answer, PercolatorError) and answer.retry is not Retry.UNKNOWN
        if is_refusal:
            self.is_out = self.is_unanswered = False

    patch.setattr(Commit, "_heard", wrong)


def message_is_not_noted_when_it_leaves(patch: Patch) -> None:
    """The caller is cancelled, hears that it is rolled back, and the message commits it."""
    correct = Commit._sent

    def wrong(self: Commit) -> None:
        if self.state is not State.ONE_ROUND:
            correct(self)

    patch.setattr(Commit, "_sent", wrong)


def executed_counts_as_not_sent(patch: Patch) -> None:
    """A transaction that the message has committed, or still will, is reported as aborted."""
    fail = PendingCommit.fail

    def wrong(self: PendingCommit, index: int, error: PercolatorError) -> None:
        fail(self, index, NotSent(error.message) if error.retry is Retry.UNKNOWN else error)

    patch.setattr(PendingCommit, "fail", wrong)
    patch.setattr(PendingCommit, "expire", lambda self: self.answer(0, NotSent("no answer")))


def answered_before_the_batch_is_durable(patch: Patch) -> None:
    """A power cut undoes what was acknowledged."""
    fill = HeldTransactions.fill

    def wrong(
        self: HeldTransactions, batch: Any, taken: list[WholeTransaction], *room: int
    ) -> None:
        fill(self, batch, taken, *room)
        for transaction in taken:
            self._end(transaction, transaction.refusal)

    def conclude(self: HeldTransactions, taken: Sequence[WholeTransaction], result: object) -> None:
        self._held.let_go([one for one in taken if one.refusal is None])

    patch.setattr(HeldTransactions, "fill", wrong)
    patch.setattr(HeldTransactions, "conclude", conclude)


def cells_let_go_before_the_batch_is_shown(patch: Patch) -> None:
    """A reader above the commit finds neither a lock, nor a held cell, nor the commit."""
    fill = HeldTransactions.fill

    def wrong(
        self: HeldTransactions, batch: Any, taken: list[WholeTransaction], *room: int
    ) -> None:
        fill(self, batch, taken, *room)
        self._held.let_go(taken)

    let_go = HeldCells.let_go

    def once(self: HeldCells, holders: Iterable[Holder]) -> None:
        still = [one for one in holders if self.holders.get(one.cells[0]) is one]
        let_go(self, still)

    patch.setattr(HeldTransactions, "fill", wrong)
    patch.setattr(HeldCells, "let_go", once)


def mutations_of_held_cells_do_not_wait(patch: Patch) -> None:
    """They are judged against what is neither durable nor held: a marker goes in, and then the
    commit that it was to keep out."""
    correct = MutationQueue._judge_part

    def wrong(self: MutationQueue, *arguments: Any, **rest: Any) -> int:
        held = self._state.held
        holders, held.holders = held.holders, {}
        try:
            return correct(self, *arguments, **rest)
        finally:
            held.holders = holders

    patch.setattr(MutationQueue, "_judge_part", wrong)


def judged_while_a_batch_changes_the_cell(patch: Patch) -> None:
    """The marker or the lock that is on its way to the disk is not seen."""

    correct = HeldTransactions.arrive

    def wrong(self: HeldTransactions, transactions: Sequence[WholeTransaction]) -> None:
        touched, self._lines.touched = self._lines.touched, {}
        try:
            correct(self, transactions)
        finally:
            self._lines.touched = touched

    patch.setattr(HeldTransactions, "arrive", wrong)


def the_first_in_line_does_not_wait_for_the_cell(patch: Patch) -> None:
    """A transaction that is called too early is judged while its rival is neither durable nor
    held."""
    patch.setattr(Lines, "_is_free", lambda self, cell, place: True)


def what_gives_up_stays_in_its_lines(patch: Patch) -> None:
    """Nothing that comes to its cells later is ever judged."""
    patch.setattr(Lines, "give_up", lambda self, place: None)


def write_latch_does_not_wait_for_held_cells(patch: Patch) -> None:
    """A transaction that was judged before a fence was raised commits behind it."""

    async def wrong(self: HeldCells) -> None:
        """Does not wait."""

    patch.setattr(HeldCells, "none_left", wrong)


ONE_ROUND_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], str | None, bool], ...] = (
    (reads_do_not_wait, (), None, True),
    (timestamp_fetched_before_the_cells_are_held, (), None, True),
    (scans_of_changes_do_not_wait, (), "feeds", False),
    (marker_not_checked, (Kind.SLOW_LINKS,), "registers", False),
    (own_commit_not_looked_for, (), None, True),
    (two_phases_after_a_message_without_an_answer, (Kind.PAUSE, Kind.SLOW_LINKS), None, True),
    (refusal_speaks_for_an_unanswered_message, (Kind.CRASH,), None, False),
    (message_is_not_noted_when_it_leaves, (Kind.PAUSE, Kind.SLOW_LINKS), None, True),
    (executed_counts_as_not_sent, (Kind.PAUSE, Kind.SLOW_LINKS), None, True),
    (answered_before_the_batch_is_durable, (Kind.POWER, Kind.SLOW_DISK), None, False),
    (cells_let_go_before_the_batch_is_shown, (), None, True),
    (mutations_of_held_cells_do_not_wait, (), None, True),
    (judged_while_a_batch_changes_the_cell, (Kind.SLOW_DISK,), None, True),
    (the_first_in_line_does_not_wait_for_the_cell, (), None, True),
    (what_gives_up_stays_in_its_lines, (Kind.CRASH_ORACLE,), "loaders", False),
)
"""The bugs, with the disruptions that reveal them, the workload if it has to be that one, and
whether they are caught in seconds."""


# Bugs of handing over a hot cell: one for each rule (percolator/protocol/contention.py).


def baton_taken_by_one_that_came_later(patch: Patch) -> None:
    """Its snapshot lacks what was committed before its first read, but after the winner."""
    correct = HotCells.leave

    def wrong(self: HotCells, turn: Turn, baton: Baton | None = None) -> None:
        turn.followers = self._joined
        correct(self, turn, baton)

    patch.setattr(HotCells, "leave", wrong)


def timestamp_is_not_set_aside(patch: Patch) -> None:
    """Another transaction has it, too: each of them takes the other's commit for its own."""

    def wrong(
        held: Iterable[WholeTransaction], first: int
    ) -> Iterator[tuple[int, WholeTransaction]]:
        yield from enumerate(held, first)

    def one_each(self: HeldTransactions, held: Sequence[WholeTransaction]) -> asyncio.Future[int]:
        assert self._state.timestamps is not None
        return asyncio.ensure_future(self._state.timestamps(len(held)))

    patch.setattr(group_commit, "commit_timestamps", wrong)
    patch.setattr(HeldTransactions, "_first_timestamp", one_each)


def baton_of_every_commit(patch: Patch) -> None:
    """For commits in two phases, and for those that were found, no timestamp was set aside."""

    def wrong(cls: type[Baton], commit: int, writes: Mapping[CellAddress, Write]) -> Baton | None:
        return correct(FollowedCommit(commit), writes)

    correct = Baton.after
    patch.setattr(Baton, "after", classmethod(wrong))


BATON_BUGS = (
    (baton_taken_by_one_that_came_later, False),
    (timestamp_is_not_set_aside, True),
    (baton_of_every_commit, True),
)
"""Each with whether it is caught in seconds."""


# Bugs of read locks: one for each way to lose an exclusion.


def writers_pass_live_read_locks(patch: Patch) -> None:
    """Their owners commit later, and what they have read was changed before."""
    patch.setattr(Exclusion, "_read_lock", lambda self, cell: None)


def writers_pass_committed_read_locks(patch: Patch) -> None:
    """A writer that began before the commit has not seen what the reader added."""
    patch.setattr(Exclusion, "_newer_read", lambda self, cell, since, cursor: None)


def read_locks_pass_live_locks(patch: Patch) -> None:
    """The writer commits later, without what the reader adds."""
    patch.setattr(Exclusion, "_lock", lambda self, locked: None)


def read_locks_pass_newer_commits(patch: Patch) -> None:
    """The value that the transaction has read is gone when it commits."""
    patch.setattr(Exclusion, "_newer", lambda self, locked, since, cursor: None)


def writers_do_not_wait_for_read_locks_on_their_way(patch: Patch) -> None:
    """Both are judged before either is there."""
    patch.setattr(Lines, "_is_read_locked", lambda self, cell: False)


def read_locks_do_not_wait_for_writers_on_their_way(patch: Patch) -> None:
    """A read lock is taken while the commit of a writer is under way."""
    patch.setattr(group_commit, "cells_locked_by", lambda cells: ())


def one_round_looks_at_its_own_cells_only(patch: Patch) -> None:
    """The short cut of what commits in one round forgets the other side."""
    patch.setattr(ReadLocks, "may_exclude", lambda self, cell, start: False)


def new_owner_forgets_the_read_locks(patch: Patch) -> None:
    """It takes the tablet over, and lets writers pass those that it found."""

    def wrong(self: ReadLocks, *_: object) -> None:
        self.used = self.noted = True

    patch.setattr(ReadLocks, "load", wrong)


_TAKEOVERS = (Kind.TAKEOVER, Kind.CRASH)

READ_LOCK_BUGS: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], float, bool], ...] = (
    (writers_pass_live_read_locks, (), 0.0, True),
    (writers_pass_committed_read_locks, (), 0.0, True),
    (read_locks_pass_live_locks, (), 0.0, True),
    (read_locks_pass_newer_commits, (), 0.0, True),
    (writers_do_not_wait_for_read_locks_on_their_way, (), 0.8, False),
    (read_locks_do_not_wait_for_writers_on_their_way, (), 0.0, False),
    (one_round_looks_at_its_own_cells_only, (), 0.8, True),
    (new_owner_forgets_the_read_locks, _TAKEOVERS, 0.0, False),
)
"""The bugs, with the disruptions that reveal them, the share of transactions that try to commit
in one round, and whether they are caught in seconds."""
