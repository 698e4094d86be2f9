"""Committing a transaction: the paper's Figure 6, with an answer for every lost message.

If one tablet has all cells, one message does everything (one_round.py). Otherwise, two phases:

    prewrite   lock every cell that the transaction writes, all at once
    timestamp  ask the oracle for the commit timestamp: only now (commit_point.py)
    commit     replace the primary's lock with its commit record: from here on, it is committed
    (later)    the other cells, in the background (aftermath.py)

Rules, each with the failure that it prevents:
- The primary is the lowest cell of the write set, so a second committer of the same transaction (a
  gateway that took over) chooses the same one. With two primaries, the transaction could be both
  committed and rolled back.
- A repeated step has the same content: whatever the network does with it, it means one thing.
- Aborting puts the rollback marker on the primary first, and touches nothing else until the marker
  is durable. If the marker is refused because the commit record is there, the transaction is
  committed.
- A transaction is reported as aborted only when it can no longer be committed. Until the marker is
  durable, another committer of the same transaction, if there may be one, can find its locks and
  commit it after the user was told to do the work again.
- Once the commit was sent and no answer came, only the primary knows the outcome. Guessing "failed"
  makes the user do the work twice.
- Callers that ask for an unknown outcome join the one attempt in progress. Two at a time might each
  take a commit timestamp after a push, and commit the other cells at the wrong one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from copy import copy

from percolator.errors import (
    ConflictError,
    DeadlineExceeded,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    Unavailable,
)
from percolator.protocol import aftermath, conflicts
from percolator.protocol.commit_message import fits_one_message
from percolator.protocol.environment import Environment
from percolator.protocol.heartbeats import Heartbeats
from percolator.protocol.one_round import OneRound
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.same_writes import AnotherWriteSet
from percolator.protocol.statistics import Statistics
from percolator.protocol.two_phases import TwoPhases
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.protocol.write_steps import WriteSteps
from percolator.routing.cells import CommitAnswer, waiting_seconds

_Settled = int | ConflictError | OutcomeUnknown
"""The outcome of a commit: its timestamp, or why there is none."""


class Commit:
    """Takes one transaction from its write set to its outcome."""

    __slots__ = (
        "_alone",
        "_cleanup",
        "_env",
        "_given_up",
        "_heartbeats",
        "_is_committed",
        "_one_round",
        "_only_two_phases",
        "_settling",
        "_started_seconds",
        "_statistics",
        "_two_phases",
        "_write",
    )

    def __init__(
        self,
        env: Environment,
        cleanup: Cleanup,
        heartbeats: Heartbeats,
        write: WriteSteps,
        *,
        started_seconds: float,
        statistics: Statistics,
        alone: bool = False,
        only_two_phases: bool = False,
        is_followed: bool = False,
    ) -> None:
        """`started_seconds`: when the start timestamp was received, on the monotonic clock.

        `alone`: no other process can commit this transaction, as a second gateway might when its
        caller asks again. `only_two_phases`: do not try to commit in one round. `is_followed`:
        another transaction would begin directly above its commit.
        """
        self._env = env
        self._cleanup = cleanup
        self._heartbeats = heartbeats
        self._write = write
        self._started_seconds = started_seconds
        self._statistics = statistics
        self._alone = alone
        self._one_round = OneRound(env, cleanup, write, statistics, is_followed)
        self._two_phases: TwoPhases | None = None
        self._only_two_phases = only_two_phases or not fits_one_message(
            write.writes, write.weak_notifications, env.limits
        )
        self._settling: asyncio.Task[_Settled] | None = None
        """The task that finds out what became of the commit."""
        self._is_committed = False
        self._given_up = False
        """The transaction is being rolled back, and we must no longer commit it."""

    def run(self, deadline: float, first: CommitAnswer | None = None) -> Coroutine[None, None, int]:
        """Returns the commit timestamp. `first`: the answer to the first message, if that was sent
        before (first_message.py).

        Raises `ConflictError`, `OutcomeUnknown`, or the error that prevented the commit; of these,
        only `OutcomeUnknown` leaves open whether the transaction is committed.
        """
        answer = None
        if first is not None:
            self._one_round.sent()
            answer = self._one_round.heard(first)
        return self._reach_outcome(deadline, answer, settling=False)

    def left(self) -> None:
        """Notes that the caller no longer waits for the answer to the first message."""
        self._one_round.sent()

    async def settle(self, deadline: float) -> int:
        """After `OutcomeUnknown`: continues where `run` stopped, and returns the commit timestamp.

        A commit in progress is completed, by the very same commit step; a rollback in progress is
        completed too. Raises `ConflictError` if the transaction turns out to be rolled back, and
        `OutcomeUnknown` if there is still no answer. If the caller is cancelled, this continues in
        the background.
        """
        while True:
            joined = self._settling
            settling = joined or self._start_settling(deadline)
            left = deadline - self._env.now()
            await asyncio.wait((settling,), timeout=max(left, 0.0))
            if not settling.done():
                raise self._unknown(DeadlineExceeded("no answer in time"))
            if settling.cancelled():
                raise self._unknown(Unavailable("the client was closed"))
            outcome = settling.result()
            if isinstance(outcome, int):
                return outcome
            if joined is None or not isinstance(outcome, OutcomeUnknown):
                raise copy(outcome)  # others may be waiting for the same error
            # The attempt that we joined had an earlier deadline than ours: try again.

    @property
    def may_be_committed(self) -> bool:
        """True once the commit was sent, unless it is known that it was not applied."""
        return self._is_committed or self._is_sent or self._is_out

    @property
    def is_whole(self) -> bool:
        """Committed in one round: no cell has a lock left."""
        return self._one_round.is_whole

    def _begin_two_phases(self) -> TwoPhases:
        """The two phases, which begin with the first call."""
        if self._two_phases is None:
            self._two_phases = TwoPhases.of(
                self._env, self._cleanup, self._write, self._started_seconds, self._statistics
            )
        return self._two_phases

    @property
    def _is_sent(self) -> bool:
        """The commit of the primary was sent, and it is not known whether it was applied."""
        return self._two_phases is not None and self._two_phases.point.sent

    @property
    def _is_out(self) -> bool:
        """A message that commits was sent, and a copy of it may still be executed."""
        phases = self._two_phases
        return self._one_round.is_out or (phases is not None and phases.point.is_out)

    def _ended(self) -> None:
        """The outcome is final: late copies can no longer change it."""
        self._one_round.ended()
        if self._two_phases is not None:
            self._two_phases.point.is_out = False

    async def _reach_outcome(
        self, deadline: float, answer: CommitAnswer | None = None, *, settling: bool
    ) -> int:
        """`answer`: to the message that commits in one round, if it was just sent."""
        env, write, one_round = self._env, self._write, self._one_round
        prewritten = settling and not one_round.is_unanswered
        commit = 0
        try:
            try:
                if not prewritten and not self._only_two_phases:
                    if answer is None:
                        schema = await env.schema(write.primary[0], deadline)
                        answer = one_round.heard(await one_round.send(schema, deadline))
                    commit = await one_round.run(answer, deadline)
                if not commit:
                    point, prewriting = self._begin_two_phases()
                    self._heartbeats.add(point)
                    if not prewritten:
                        until = deadline
                        if one_round.is_out:  # if this fails, a marker is necessary
                            until = env.now() + waiting_seconds(deadline - env.now())
                        commit = await prewriting.run(until)
                    commit = commit or await point.reach(deadline)
            except AnotherWriteSet:
                raise  # what is stored is not ours: rolling it back might hit the other write set
            except PercolatorError as problem:
                if self._is_sent or (one_round.is_unanswered and problem.retry is Retry.UNKNOWN):
                    raise self._unknown(problem) from problem
                commit = await self._give_up(problem, deadline)
        except asyncio.CancelledError:
            if not settling:
                self.go_on_alone()
            raise
        finally:
            if self._two_phases is not None:
                self._heartbeats.discard(self._two_phases.point)
        # From here on, a caller who is cancelled must not be told that it was rolled back.
        self._is_committed = True
        self._ended()
        env.verdicts.put(write.start, commit)
        if len(write.cells) > 1 and not one_round.is_whole:
            too_much = env.background_is_full
            rest = env.background.start(aftermath.commit_secondaries(env, write, commit))
            if too_much:
                # However this ends, the transaction is committed and is reported as such.
                await asyncio.wait((rest,))
        return commit

    # ------------------------------------------------------------------ giving up

    async def _give_up(self, problem: PercolatorError, deadline: float) -> int:
        """Rolls back and raises `problem`, unless the transaction turns out to be committed.

        If the marker gets no answer, the transaction is still as good as rolled back when no
        commit was sent and no other process will send one, or when the primary was never locked.
        Otherwise, and if a copy of a message that commits may still arrive, `OutcomeUnknown` is
        raised.
        """
        self._given_up = True
        one_round, phases = self._one_round, self._two_phases
        touched = () if phases is None else phases.prewriting.touched
        problem = copy(problem)  # other callers may have received the same error object
        if problem.retry is Retry.UNKNOWN:
            problem.retry = Retry.SAFE  # nothing is committed, whatever was prewritten
        if one_round.is_lost or (phases is not None and phases.prewriting.is_lost):
            self._ended()
            # This is as final as a marker. The marker is still written if locks may be left on
            # other cells: clients that meet them will look for it on the primary.
            if touched:
                self._roll_back_in_background()
            raise problem
        if self._env.verdicts.get(self._write.start) != ROLLED_BACK:
            try:
                commit = await aftermath.mark_primary(self._env, self._write, deadline)
            except PercolatorError as unmarked:
                self._roll_back_in_background()
                is_safe = self._alone or self._write.primary not in touched
                if is_safe and not self._is_out:
                    raise problem from None
                raise self._unknown(unmarked) from problem
            if commit:
                return commit
        self._ended()
        if touched:
            others = aftermath.roll_back_others(self._env, self._write, touched)
            self._env.background.start(others)
        raise problem

    def _roll_back_in_background(self) -> None:
        work = aftermath.roll_back_all(
            self._env, self._write, self._begin_two_phases().prewriting.touched
        )
        self._env.background.start(work)

    # ------------------------------------------------------------------ unknown outcomes

    def go_on_alone(self) -> None:
        """Cleans up after a cancelled caller, so that others need not wait for our locks."""
        if self._is_sent or self._one_round.is_unanswered:
            self._start_settling(aftermath.background_deadline(self._env))
            return
        # Unanswered prewrites may still arrive.
        self._begin_two_phases().prewriting.touched = self._write.cells
        if self._is_out:
            # A late copy may commit it before the marker is there: only the marker tells.
            self._given_up = True
            self._start_settling(aftermath.background_deadline(self._env))
        else:
            self._roll_back_in_background()

    def _start_settling(self, deadline: float) -> asyncio.Task[_Settled]:
        self._settling = self._env.background.start(self._settle(deadline))
        return self._settling

    async def _settle(self, deadline: float) -> _Settled:
        try:
            if self._given_up:
                commit = await self._give_up(conflicts.given_up(self._write), deadline)
                self._ended()
                self._env.verdicts.put(self._write.start, commit)
                return commit
            return await self._reach_outcome(deadline, settling=True)
        except (ConflictError, OutcomeUnknown) as outcome:
            # Returned, not raised: it is an outcome like any other, and perhaps no caller is left
            # to retrieve an exception.
            return outcome
        except AnotherWriteSet:
            raise  # it says nothing of how this transaction ended
        except PercolatorError:
            return conflicts.given_up(self._write)  # whatever the reason was, it is rolled back
        finally:
            self._settling = None

    def _unknown(self, problem: PercolatorError) -> OutcomeUnknown:
        return OutcomeUnknown(
            "could not find out whether the transaction that began at "
            f"{self._write.start} has committed: {problem}",
            start_timestamp=self._write.start,
            primary=self._write.primary,
        )
