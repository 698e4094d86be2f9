"""Committing a transaction: the paper's Figure 6, with an answer for every lost message.

If one tablet has all cells, one message does everything. The tablet does what prewrite and commit
do, for all cells at the same time: it checks what a prewrite checks, keeps everything else away
from the cells, fetches the commit timestamp, and writes. No lock is ever stored. Otherwise, two
phases:

    prewrite   lock every cell that the transaction writes, all at once
    timestamp  ask the oracle for the commit timestamp: only now
    primary    replace the primary's lock with its commit record: from here on, it is committed
    (later)    the other cells, in the background: other clients resolve the locks that they meet

Rules, each with the failure that it prevents:
- The primary is the lowest cell of the write set, so a second committer of the same transaction (a
  gateway that took over) chooses the same one. With two primaries, the transaction could be both
  committed and rolled back.
- A repeated step has the same content: whatever the network does with it, it means one thing.
- While the message of a commit in one round is unanswered, the only way on is the same message
  again, or the roll-back of the primary. In two phases, the transaction could be given up, and
  reported as such, while the message is still in the network and commits it.
- Even after an answer, a copy of a message that commits may arrive late: networks repeat. A copy of
  the one message is stopped by locks, a commit or a marker. But until one of these is durable, it
  may still commit. So a transaction counts as aborted only when its marker is durable, or when
  another commit above its start stops it forever.
- A lock of the transaction itself was set by another committer, in two phases. Then only two phases
  remain for us, too.
- The commit timestamp is fetched when every cell is locked. If it were fetched earlier, a reader
  above it may have read a cell that was not locked yet.
- An unanswered commit of the primary is repeated with the *same* timestamp, since the first attempt
  may have been applied; with another timestamp, readers between the two would see half of the
  transaction. The one exception is a lock that a reader has pushed: the first attempt can never be
  applied then.
- The absence of both lock and record proves nothing: only a marker on the primary proves that the
  transaction is rolled back.
- Aborting puts the rollback marker on the primary first, and touches nothing else until the marker
  is durable. If the marker is refused because the commit record is there, the transaction is
  committed. Likewise, the primary's commit record is durable before any other cell is committed.
- A transaction is reported as aborted only when it can no longer be committed. Until the marker is
  durable, another committer of the same transaction, if there may be one, can find its locks and
  commit it after the user was told to do the work again. So there is no marker only if no message
  that commits was sent, and there is no other committer, or the primary was never locked.
- Once the commit was sent and no answer came, only the primary knows the outcome. Guessing "failed"
  makes the user do the work twice.
- Callers that ask for an unknown outcome join the one attempt in progress. Two at a time might each
  take a commit timestamp after a push, and commit the other cells at the wrong one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from copy import copy
from enum import Enum
from functools import partial
from typing import TypeVar

from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    InvalidArgument,
    InvariantViolation,
    OutcomeLost,
    OutcomeUnknown,
    Overloaded,
    PercolatorError,
    PermissionDenied,
    Retry,
    SchemaChanged,
    SchemaError,
    SnapshotTooOld,
    TimestampRegression,
    Unauthenticated,
    Unavailable,
    UsageError,
)
from percolator.formats.records import KIND_LOCK_ONLY
from percolator.protocol import conflicts, steps
from percolator.protocol.announcing import Announcement, notify_weak_observers
from percolator.protocol.cleanup import Cleanup, Primaries
from percolator.protocol.conflicts import (
    AnotherWriteSet,
    MetLock,
    is_own_lock,
    require_same,
)
from percolator.protocol.environment import ROLLED_BACK, Environment, LockWait, Statistics
from percolator.protocol.indexes import require_current_indexes
from percolator.protocol.write_set import (
    MARGIN_SECONDS_MAX,
    Heartbeats,
    PrimaryLock,
    WriteSteps,
    locked_cell,
    other_indexes,
    require_same_schemas,
    seconds_until,
)
from percolator.routing.cells import (
    APPLIED,
    Answer,
    CellMutation,
    NotInOneRound,
    NotSent,
    Refused,
    waiting_seconds,
)
from percolator.wire.backoff import Backoff, asked_pause_seconds

STEPS_AT_ONCE_MAX = 4_096
"""A large transaction is sent in portions, so that its messages do not all exist at one time."""

CELLS_TOGETHER_MAX = 64
"""The most cells of a transaction that is completed together with others."""

_NO_COPY_IS_READ = (NotSent, UsageError, PermissionDenied, Unauthenticated)
"""Errors after which no copy is read: the message was not sent at all, or its sender was refused
before anything of it was read."""
_NO_COPY_IS_EXECUTED = (SnapshotTooOld, SchemaError, InvalidArgument)
"""Errors after which no copy is executed, now or later: safe points only rise, tables do not come
back, and each copy says the same. This is as final as a marker, except for what an unanswered
message may have done."""

_LAST_SECONDS_MAX = 1.0
_LAST_SHARE = 0.2
"""The time that a wait for a lock leaves for the answer to the last attempt, and for the marker.
A message that commits in one round may arrive late: without the marker, the outcome is unknown."""

T = TypeVar("T")

_Secondary = tuple[WriteSteps, CellAddress, int]
"""A cell that does not decide its transaction, and the commit timestamp."""

_Settled = int | ConflictError | OutcomeUnknown
"""The outcome of a commit: its timestamp, or why there is none."""


class State(Enum):
    """How far a commit has come. It is entered before anything of it is sent."""

    UNSENT = "nothing of the transaction has left the client"
    ONE_ROUND = "a message commits everything, or is about to be repeated"
    LOCKING = "its cells are being locked"
    COMMITTING = "all cells are locked, and the commit of the primary decides"
    GIVING_UP = "we must no longer commit it: its marker is to be put on the primary"
    COMMITTED = "it is committed"
    ROLLED_BACK = "it can never be committed"


class Sent(Enum):
    """Effect that messages that commit, as far as they were sent, may still have."""

    NOTHING = "none was sent, or none can be executed any more"
    LATE_COPY = "none was executed, but a copy may be, until a lock, commit or marker stops it"
    UNANSWERED = "one may have been executed without our knowing"

    def after_answer(self) -> Sent:
        """Like this before a message was sent that was answered, and not executed."""
        return Sent.UNANSWERED if self is Sent.UNANSWERED else Sent.LATE_COPY


class Commit:
    """Takes one transaction from its write set to its outcome."""

    __slots__ = (
        "_alone",
        "_announcement",
        "_cleanup",
        "_env",
        "_heartbeats",
        "_is_followed",
        "_lock",
        "_met_newer_commit",
        "_only_two_phases",
        "_sent_before",
        "_settling",
        "_started_seconds",
        "_statistics",
        "_touched",
        "_write",
        "in_one_round",
        "sent",
        "state",
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
        self._only_two_phases = only_two_phases
        self._is_followed = is_followed
        self.state = State.UNSENT
        self.sent = self._sent_before = Sent.NOTHING
        """Now, and before the last message was sent."""
        self.in_one_round = False
        """No lock was set, so none is left to resolve."""
        self._met_newer_commit = False
        """Another transaction has committed above our start, where that stops us forever."""
        self._lock: PrimaryLock | None = None
        """Its lock on the primary, if it takes two phases. Most commit in one round."""
        self._announcement: Announcement | None = None
        self._touched: Sequence[CellAddress] = ()
        """The cells that may carry our locks."""
        self._settling: asyncio.Task[_Settled] | None = None
        """The task that finds out what became of the commit."""

    def run(self, deadline: float) -> Coroutine[None, None, int]:
        """Returns the commit timestamp.

        Raises `ConflictError`, `OutcomeUnknown`, or the error that prevented the commit; of these,
        only `OutcomeUnknown` leaves open whether the transaction is committed.
        """
        return self._reach_outcome(deadline, is_settling=False)

    async def _reach_outcome(self, deadline: float, *, is_settling: bool) -> int:
        """Continues from the state that was reached before."""
        env, write = self._env, self._write
        commit_ts: int | None = None
        try:
            if self.state is State.GIVING_UP:
                commit_ts = await self._give_up(conflicts.given_up(write), deadline)
            else:
                try:
                    if (
                        self.state is not State.COMMITTING
                        and not self._only_two_phases
                        and write.fits_one_message(env.limits)
                    ):
                        commit_ts = await self._commit_in_one_round(deadline)
                    if commit_ts is None:
                        commit_ts = await self._commit_in_two_phases(deadline)
                except AnotherWriteSet:
                    raise  # what is stored is not ours: a marker might hit the other write set
                except PercolatorError as problem:
                    decides = self.state is State.COMMITTING
                    if self.sent is Sent.UNANSWERED and (decides or problem.retry is Retry.UNKNOWN):
                        raise self._unknown(problem) from problem
                    commit_ts = await self._give_up(problem, deadline)
        except asyncio.CancelledError:
            if not is_settling:
                self._leave_to_the_background()
            raise
        finally:
            if self._lock is not None:
                self._heartbeats.discard(self._lock)
        if write.added and self.state is not State.COMMITTING:
            # Another committer has decided, which may not have known an index, and so not have
            # locked what we added for that. What we have locked is left to those who meet it.
            write.cells = [cell for cell in write.cells if cell not in write.added]
        # From here on, a caller who is cancelled must not be told that it was rolled back.
        self._end(State.COMMITTED)
        if self.in_one_round:
            return commit_ts  # nobody meets a lock of it
        env.verdicts.put(write.start, commit_ts)
        if len(write.cells) > 1:
            if env.background_is_full:
                # By itself, since others may take longer. However this ends, the transaction is
                # committed and is reported as such.
                rest = commit_secondaries(env, [(write, commit_ts)])
                await asyncio.wait((env.background.start(rest),))
            else:
                start_secondaries(env, write, commit_ts)
        return commit_ts

    @property
    def may_be_committed(self) -> bool:
        """True once the commit was sent, unless it is known that it was not applied."""
        return self.state is State.COMMITTED or self.sent is not Sent.NOTHING

    # ------------------------------------------------------------------ messages that commit

    def _sending(self) -> None:
        """Notes that a message that commits leaves: it may be executed even if the caller is
        cancelled."""
        self._sent_before, self.sent = self.sent, Sent.UNANSWERED

    def _heard(self, answer: Refused | PercolatorError) -> None:
        """Notes what a refusal of the one message says about it, and about copies of it."""
        before = self._sent_before
        if isinstance(answer, _NO_COPY_IS_READ):
            self.sent = before
        elif isinstance(answer, _NO_COPY_IS_EXECUTED):
            self.sent = before if before is Sent.UNANSWERED else Sent.NOTHING
        elif isinstance(answer, Refused) or answer.retry is not Retry.UNKNOWN:
            self.sent = before.after_answer()

    def _heard_of_primary(self, error: PercolatorError) -> None:
        """Notes what the answer to the commit of the primary says about it.

        A call may send the step several times. What refuses its last copy says nothing of the
        others: a late copy is expected, whatever the error is.
        """
        if error.retry is not Retry.UNKNOWN:
            self.sent = self._sent_before.after_answer()

    def _end(self, state: State) -> None:
        """The outcome is final: late copies can no longer change it."""
        self.state = state
        self.sent = Sent.NOTHING

    # ------------------------------------------------------------------ one round

    async def _commit_in_one_round(self, deadline: float) -> int | None:
        """Sends the one message, and again where that makes sense. Returns the commit timestamp, or
        None if it takes two phases.

        Raises conflicts, and what prevents the commit for good although a message is unanswered.
        """
        env, write = self._env, self._write
        table_id = write.primary.table_id
        waiting: LockWaiting | None = None
        while True:
            schema = env.schemas.get(table_id) or await env.schemas.refresh(table_id, deadline)
            require_same_schemas(write, env.schemas.get)
            message = write.one_round_commit(schema, is_followed=self._is_followed)
            self.state = State.ONE_ROUND
            self._sending()
            answer = await env.cells.commit(message, deadline)
            if isinstance(answer, int):
                self._statistics.round_trips += 1
                self.in_one_round = True
                return answer
            self._heard(answer)
            if not isinstance(answer, _NO_COPY_IS_READ):
                self._statistics.round_trips += 1
            problem: PercolatorError | None = None
            met: list[MetLock] = []
            if isinstance(answer, Refused):
                found = answer.offender
                cell = CellAddress(table_id, found.row, found.column)
                if answer.condition == steps.OWN_COMMIT:
                    require_same(write, cell, answer)
                    return found.timestamp
                if not is_own_lock(write, cell, answer):
                    self._met_newer_commit = answer.condition == steps.PREWRITE_NEWER_COMMIT
                    conflict = conflicts.obstacle(env, write, cell, answer, met)
                    if conflict is not None:
                        raise conflict
                elif self.sent is not Sent.UNANSWERED:
                    return None  # another committer is at it, in two phases
            elif answer.retry is Retry.UNKNOWN:
                problem = answer
            elif isinstance(answer, SchemaChanged):
                await env.schemas.refresh(table_id, deadline)
            elif isinstance(answer, Overloaded):
                await self._wait_as_asked(answer, deadline)
            elif self.sent is not Sent.UNANSWERED:
                return None
            elif isinstance(answer, NotInOneRound):
                # The tablet was split while an answer was missing. Two phases are ruled out: only
                # the marker decides.
                raise conflicts.given_up(write)
            elif answer.retry is Retry.USELESS:
                # Resending is useless too; the attempt to write the marker will show the outcome.
                raise answer
            waiting = waiting or LockWaiting(env, write.start, self._statistics)
            await waiting.settle(met, self._cleanup, deadline)
            await waiting.pause(problem, deadline)

    async def _wait_as_asked(self, overloaded: Overloaded, deadline: float) -> None:
        """Waits as long as the server asks for. In two phases it would have more to do."""
        seconds = asked_pause_seconds(self._env.random, overloaded.retry_after_seconds)
        left = deadline - self._env.now()
        if seconds >= left and self.sent is not Sent.UNANSWERED:
            raise overloaded  # now, while there is time for the marker
        await self._env.clock.sleep(max(min(seconds, left), 0.0))

    # ------------------------------------------------------------------ two phases

    async def _commit_in_two_phases(self, deadline: float) -> int:
        """Returns the commit timestamp: ours, or that of an earlier commit of the transaction."""
        self._heartbeats.add(self.begin_two_phases())
        if self.state is not State.COMMITTING:
            until = deadline
            if self.sent is not Sent.NOTHING:  # if this fails, a marker is necessary
                now = self._env.now()
                until = now + waiting_seconds(deadline - now)
            commit_ts = await self.prewrite(until)
            if commit_ts is not None:
                return commit_ts
        return await self.commit_primary(deadline)

    def begin_two_phases(self) -> PrimaryLock:
        """Makes what only two phases need: the lock on the primary."""
        if self._lock is None:
            env, write = self._env, self._write
            write.session = env.owners.session_id or b""
            self._lock = PrimaryLock(env, write, self._started_seconds)
            if env.announcing is not None:
                self._announcement = Announcement(env, env.announcing, write)
        return self._lock

    async def prewrite(self, deadline: float) -> int | None:
        """Locks every cell. Returns the commit timestamp if it is committed already, else None.

        A cell is locked once its prewrite was applied, or is refused because of the transaction's
        own lock. Unanswered prewrites are repeated. A lock of an older transaction is waited out.
        """
        lock = self.begin_two_phases()
        self.state = State.LOCKING
        pending: Sequence[CellAddress] = self._write.cells
        waiting: LockWaiting | None = None
        while True:
            lock.choose_ttl()
            unlocked: _Unlocked | None = None  # rarely needed, so created only then
            for cells in portions(pending):
                lock.is_awaited = not lock.is_locked and self._write.primary in cells
                answers = await self._send_prewrites(lock, cells, deadline)
                if answers.count(APPLIED) == len(cells):
                    self._note_touched(cells)
                else:
                    unlocked = unlocked or _Unlocked()
                    committed = self._sort_out(lock, cells, answers, unlocked)
                    if committed is not None:
                        return committed
                if lock.is_awaited:
                    # Before the other portions, which may take longer than its time to live.
                    has_failed = unlocked is not None and unlocked.has(self._write.primary)
                    lock.answered(is_locked=not has_failed)
                if self._announcement is not None:
                    self._announcement.require()
            pending = unlocked.cells() if unlocked is not None else ()
            if unlocked is None or not pending:
                self.state = State.COMMITTING
                return None
            waiting = waiting or LockWaiting(self._env, self._write.start, self._statistics)
            await waiting.settle(unlocked.met, self._cleanup, deadline)
            await waiting.pause(unlocked.problem, deadline)

    async def _send_prewrites(
        self, lock: PrimaryLock, cells: Sequence[CellAddress], deadline: float
    ) -> list[Answer]:
        self._statistics.round_trips += 1
        env, write = self._env, self._write
        versions: dict[int, int] = {}
        for table_id in {cell.table_id for cell in cells}:
            try:
                versions[table_id] = (await env.schema(table_id, deadline)).version
            except SchemaError:
                await require_current_indexes(env, write.indexes, write.start, deadline)
                raise
        require_same_schemas(write, env.schemas.get)
        prewrites = [
            write.prewrite_step(cell, lock.min_commit, lock.ttl, versions[cell.table_id])
            for cell in cells
        ]
        sent = env.cells.mutate(prewrites, deadline)
        if self._announcement is None:
            answers = await sent
        else:
            answers = await self._announcement.with_prewrites(cells, sent, deadline)
        if answers.count(APPLIED) < len(cells):
            await env.refresh_schemas(prewrites, answers, deadline)
        return answers

    def _sort_out(
        self,
        lock: PrimaryLock,
        cells: Sequence[CellAddress],
        answers: Sequence[Answer],
        unlocked: _Unlocked,
    ) -> int | None:
        """Returns the commit timestamp if it is committed already, else None. Raises conflicts."""
        write = self._write
        problem: PercolatorError | None = None
        touched: list[CellAddress] = []
        try:
            for cell, answer in zip(cells, answers, strict=True):
                if answer is APPLIED:
                    touched.append(cell)
                elif isinstance(answer, Refused):
                    if answer.condition == steps.OWN_COMMIT:
                        require_same(write, cell, answer)
                        return answer.offender.timestamp
                    if is_own_lock(write, cell, answer):
                        # Set by an attempt whose answer was lost, or by another committer.
                        touched.append(cell)
                        if cell == write.primary:
                            lock.learn(answer)
                        continue
                    if answer.condition == steps.PREWRITE_NEWER_COMMIT and cell == write.primary:
                        self._met_newer_commit = True
                    conflict = conflicts.obstacle(self._env, write, cell, answer, unlocked.met)
                    if conflict is None:
                        unlocked.blocked.append(cell)
                    problem = conflict or problem
                elif answer.retry is Retry.UNKNOWN:
                    touched.append(cell)
                    unlocked.unanswered.append(cell)
                    unlocked.problem = answer
                elif isinstance(answer, SchemaChanged):
                    unlocked.blocked.append(cell)
                elif isinstance(answer, SchemaError) and write.is_entry(cell):
                    problem = other_indexes(write.start)  # the index was dropped
                else:
                    problem = answer
        finally:
            self._note_touched(touched)
        if problem is not None:
            raise problem
        return None

    def _note_touched(self, cells: Sequence[CellAddress]) -> None:
        self._touched = [*self._touched, *cells] if self._touched else cells

    async def _renew_announcement(self, announcement: Announcement, deadline: float) -> None:
        try:
            await announcement.renew(deadline)
        except SchemaError:
            write = self._write
            await require_current_indexes(self._env, write.indexes, write.start, deadline)
            raise

    async def commit_primary(self, deadline: float) -> int:
        """Replaces the primary's lock with its commit record, which decides the transaction.

        Returns the commit timestamp: ours, or that of an earlier commit of the same transaction.
        Raises when it will never be committed, or, if unanswered, when that is not known.
        """
        env, write, lock = self._env, self._write, self.begin_two_phases()
        table_id = write.primary.table_id
        backoff: Backoff | None = None
        while True:
            while lock.min_commit > lock.commit_ts:
                # Either this is the first round, or the lock was seen with this number in it. Then
                # nothing sent before was applied, and since the number only grows, nothing ever
                # will be.
                self.sent = Sent.NOTHING
                await self.take_commit_timestamp(deadline)
                if self._announcement is not None:
                    await self._renew_announcement(self._announcement, deadline)
            # A heartbeat may learn of a push while we wait below. The commit must be sent for the
            # lock that its timestamp was compared with, and for no other.
            min_commit, commit_ts = lock.min_commit, lock.commit_ts
            if write.weak_notifications:
                await self._notify(commit_ts, deadline)
            schema = await env.schema(table_id, deadline)
            if self.sent is not Sent.UNANSWERED:  # else only the same step can tell the outcome
                require_same_schemas(write, env.schemas.get)
            step = write.commit_primary_step(schema, min_commit, commit_ts)
            self._sending()
            self._statistics.round_trips += 1
            (answer,) = await env.cells.mutate((step,), deadline)
            if answer is APPLIED:
                return commit_ts
            if isinstance(answer, Refused):
                if answer.condition == steps.OWN_COMMIT:
                    return answer.offender.timestamp
                if not lock.is_ours(answer):
                    return await self._no_lock(answer, deadline)
                lock.learn(answer)
                if env.now() >= deadline:
                    raise _out_of_time()
                continue
            self._heard_of_primary(answer)
            if isinstance(answer, SchemaChanged):
                # The step is rebuilt, with the notifications that the newer schema asks for.
                await env.schemas.refresh(table_id, deadline)
            elif answer.retry is Retry.USELESS:
                raise answer
            self._statistics.retries += 1
            backoff = backoff or env.backoff()
            if not await backoff.pause(deadline):
                raise answer

    async def take_commit_timestamp(self, deadline: float) -> None:
        """Fetches the commit timestamp. Never call this before the last prewrite was answered."""
        lock = self.begin_two_phases()
        left = deadline - self._env.now()
        if left <= 0:
            raise _out_of_time()
        self._statistics.round_trips += 1
        before, in_use = max(self._write.start, lock.commit_ts), lock.min_commit - 1
        lock.commit_ts = await self._env.timestamps.get(timeout_seconds=left)
        # Compared with what was in use before we asked. In the meantime, a heartbeat may have
        # learned of a push by a reader that began after this timestamp was issued; that is no
        # regression, and `commit_primary` takes a later timestamp.
        # A heartbeat may have raised it, perhaps one of another committer: not too far.
        wait = seconds_until(in_use + 1, lock.commit_ts)
        if lock.commit_ts <= before or wait > 2 * MARGIN_SECONDS_MAX:
            in_use = max(in_use, before)
            raise TimestampRegression(f"the oracle gave {lock.commit_ts} after {in_use} was in use")
        if wait:
            await self._env.clock.sleep(min(wait, left))

    async def _notify(self, commit_ts: int, deadline: float) -> None:
        """Writes the weak notifications at the commit timestamp, again whenever that has changed.

        This happens before the commit point, or a crash right after it would lose them. It happens
        after all locks are held, so that an observer that runs too early meets a lock and waits.
        """
        await notify_weak_observers(
            self._env, self._write.weak_notifications, commit_ts, deadline, self._statistics
        )

    async def _no_lock(self, answer: Refused, deadline: float) -> int:
        """The commit was refused, and the lock is gone. Returns the commit timestamp if there is
        one after all, and raises otherwise."""
        if answer.condition == steps.OWN_ROLLBACK:
            self._env.verdicts.put(self._write.start, ROLLED_BACK)
        else:
            # Neither record nor marker: that alone proves nothing, so put the marker, which does.
            commit_ts = await mark_primary(self._env, self._write, deadline)
            if commit_ts != ROLLED_BACK:
                return commit_ts
        self.sent = Sent.NOTHING  # nothing that was sent can be applied now
        raise conflicts.rolled_back_by_others(self._env, self._write, self._write.primary)

    # ------------------------------------------------------------------ giving up

    async def _give_up(self, problem: PercolatorError, deadline: float) -> int:
        """Rolls back and raises `problem`, unless the transaction turns out to be committed.

        If the marker gets no answer, the transaction is still as good as rolled back when no
        commit was sent and no other process will send one, or when the primary was never locked.
        Otherwise, and if a copy of a message that commits may still arrive, `OutcomeUnknown` is
        raised.
        """
        env, write, touched = self._env, self._write, self._touched
        problem = copy(problem)  # other callers may have received the same error object
        if problem.retry is Retry.UNKNOWN:
            problem.retry = Retry.SAFE  # nothing is committed, whatever was prewritten
        if self.state is State.UNSENT:
            raise problem
        self.state = State.GIVING_UP
        if self._met_newer_commit:
            self._end(State.ROLLED_BACK)
            # This is as final as a marker. The marker is still written if locks may be left on
            # other cells: clients that meet them will look for it on the primary.
            if touched:
                env.background.start(roll_back_all(env, write, touched))
            raise problem
        if env.verdicts.get(write.start) != ROLLED_BACK:
            try:
                commit_ts = await mark_primary(env, write, deadline)
            except PercolatorError as unmarked:
                env.background.start(roll_back_all(env, write, touched))
                is_safe = self._alone or write.primary not in touched
                if is_safe and self.sent is Sent.NOTHING:
                    raise problem from None
                raise self._unknown(unmarked) from problem
            if commit_ts != ROLLED_BACK:
                return commit_ts
        self._end(State.ROLLED_BACK)
        if touched:
            env.background.start(roll_back_others(env, write, touched))
        raise problem

    # ------------------------------------------------------------------ unknown outcomes

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

    def _leave_to_the_background(self) -> None:
        """Cleans up after a cancelled caller, so that others need not wait for our locks."""
        env = self._env
        if self.state is State.UNSENT:
            return
        if self.sent is not Sent.UNANSWERED:
            # Unanswered prewrites may still arrive.
            self._touched = self._write.cells
            self.state = State.GIVING_UP
            if self.sent is Sent.NOTHING:
                env.background.start(roll_back_all(env, self._write, self._touched))
                return
            # A late copy may commit it before the marker is there: only the marker tells.
        self._start_settling(background_deadline(env))

    def _start_settling(self, deadline: float) -> asyncio.Task[_Settled]:
        self._settling = self._env.background.start(self._settle(deadline))
        return self._settling

    async def _settle(self, deadline: float) -> _Settled:
        try:
            return await self._reach_outcome(deadline, is_settling=True)
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


class LockWaiting:
    """How long one transaction has waited so far, and for whose lock."""

    def __init__(self, env: Environment, start: int, statistics: Statistics) -> None:
        self._env = env
        self._start = start
        self._statistics = statistics
        self._began = env.now()
        self._backoff = env.backoff()
        self._wait: LockWait | None = None
        self._last_met: MetLock | None = None
        self._last_problem: PercolatorError | None = None

    async def settle(self, met: Sequence[MetLock], cleanup: Cleanup, deadline: float) -> None:
        """Resolves the locks that were met, if any. Raises when it has waited too long."""
        if not met:
            return
        waited = self._note(met[0])
        if waited > self._env.limits.lock_wait_seconds:
            raise conflicts.locked(self._env, self._start, met[0])
        until = self._until(deadline)
        try:
            await cleanup.resolve(met, deadline=until, known_now=self._start, waited_seconds=waited)
        except DeadlineExceeded as late:
            raise conflicts.locked(self._env, self._start, met[0]) from late

    async def pause(self, problem: PercolatorError | None, deadline: float) -> None:
        """Waits before the next attempt; `problem` is why this one got no answer. Raises if no time
        is left for another one."""
        self._statistics.retries += 1
        self._last_problem = problem or self._last_problem
        if await self._backoff.pause(deadline if problem else self._until(deadline)):
            return
        if self._last_met is not None:
            # Also if the time was up in the middle of an attempt, which then has no answer.
            raise conflicts.locked(self._env, self._start, self._last_met)
        raise self._last_problem or DeadlineExceeded("no time was left to prewrite")

    def _until(self, deadline: float) -> float:
        """When a wait for a lock ends."""
        return deadline - min(_LAST_SECONDS_MAX, _LAST_SHARE * (deadline - self._began))

    def _note(self, met: MetLock) -> float:
        """Records whose lock we wait for; returns the seconds waited, 0 at the first meeting."""
        self._last_met = met
        if self._wait is None:
            self._wait = LockWait(*locked_cell(met.address), met.lock.start_timestamp, 0.0)
            self._statistics.lock_waits.append(self._wait)
            return 0.0
        self._wait.seconds = self._env.now() - self._began
        return self._wait.seconds


class _Unlocked:
    """The cells that a round of prewrites did not lock, and why not."""

    __slots__ = ("blocked", "met", "problem", "unanswered")

    def __init__(self) -> None:
        self.unanswered: list[CellAddress] = []
        self.blocked: list[CellAddress] = []
        self.met: list[MetLock] = []
        """Locks of older transactions: on these, or on cells that exclude them."""
        self.problem: PercolatorError | None = None
        """Why the last unanswered one got no answer."""

    def cells(self) -> list[CellAddress]:
        return self.unanswered + self.blocked

    def has(self, cell: CellAddress) -> bool:
        return cell in self.unanswered or cell in self.blocked


def portions(cells: Sequence[T]) -> list[Sequence[T]]:
    """The cells, as many at a time as are sent together."""
    if len(cells) <= STEPS_AT_ONCE_MAX:
        return [cells]  # the usual case, in which nothing is copied
    step = STEPS_AT_ONCE_MAX
    return [cells[first : first + step] for first in range(0, len(cells), step)]


def _out_of_time() -> PercolatorError:
    return DeadlineExceeded("no time was left to commit")


# ---------------------------------------------------------------- the cells that do not decide


def start_secondaries(env: Environment, write: WriteSteps, commit_ts: int) -> None:
    """Commits the other cells in the background, together with those of all transactions whose
    commits are answered in this turn of the loop. A large one would hold up the others."""
    one = write, commit_ts
    if len(write.cells) > CELLS_TOGETHER_MAX:
        env.background.start(commit_secondaries(env, [one]))
    else:
        env.committed.add(one, env.background, partial(commit_secondaries, env))


async def commit_secondaries(env: Environment, committed: Sequence[tuple[WriteSteps, int]]) -> None:
    """Commits the other cells after the commit point, trying for `background_seconds`.

    Below the safe point it stops: there, all locks are resolved before anything is collected, and a
    record that is missing may have been written and collected. What goes wrong with one transaction
    stops none of the others.
    """
    deadline = background_deadline(env)
    pending: Sequence[_Secondary] = [
        (write, cell, commit_ts) for write, commit_ts in committed for cell in write.cells[1:]
    ]
    problem: PercolatorError | None = None
    backoff: Backoff | None = None
    while pending:
        again: list[_Secondary] = []
        unknown: set[int] = set()
        for some in portions(pending):
            requests: list[CellMutation] = []
            sent: list[_Secondary] = []
            for one in some:
                write, cell, commit_ts = one
                schema = env.schemas.get(cell.table_id)
                if schema is None and cell.table_id not in unknown:
                    try:
                        schema = await env.schemas.refresh(cell.table_id, deadline)
                    except PercolatorError as error:
                        unknown.add(cell.table_id)
                        problem = error
                if schema is not None:
                    requests.append(write.commit_secondary_step(cell, schema, commit_ts))
                    sent.append(one)
            answers = await env.cells.mutate(requests, deadline)
            if answers.count(APPLIED) == len(sent):
                continue
            for one, answer in zip(sent, answers, strict=True):
                if isinstance(answer, Refused):
                    try:
                        _check_secondary(*one, answer)
                    except InvariantViolation as torn:
                        problem = torn
                elif isinstance(answer, PercolatorError) and not isinstance(answer, SnapshotTooOld):
                    again.append(one)
            try:
                await env.refresh_schemas(requests, answers, deadline)
            except PercolatorError as error:
                problem = error
        pending = again
        if pending:
            backoff = backoff or env.backoff()
            if not await backoff.pause(deadline):
                break
    if problem is not None:
        raise problem


def _check_secondary(write: WriteSteps, cell: CellAddress, commit_ts: int, answer: Refused) -> None:
    """Another client may have committed it, at the same timestamp; otherwise the commit is torn."""
    if answer.condition == steps.OWN_COMMIT and answer.offender.timestamp == commit_ts:
        return
    raise InvariantViolation(
        f"transaction {write.start} is committed at {commit_ts}, but {cell} holds neither its lock "
        "nor that commit"
    )


async def mark_primary(env: Environment, write: WriteSteps, deadline: float) -> int:
    """Puts the rollback marker: from then on, the transaction can never commit.

    Returns ROLLED_BACK when the marker is durable, or the timestamp of the commit that was there
    before. Raises `SnapshotTooOld` below the safe point, where its commit may have been collected,
    so that the outcome can no longer be learned; and `SchemaError` when its table is gone for good,
    and the outcome with it.
    """
    backoff = env.backoff()
    mark = write.roll_back_step(write.primary, not_below=write.start)
    primaries = Primaries(env)
    while True:
        (answer,) = await primaries.mutate([mark], deadline)
        if answer is APPLIED:
            env.verdicts.put(write.start, ROLLED_BACK)
            return ROLLED_BACK
        if isinstance(answer, Refused):
            return answer.offender.timestamp
        if answer.retry is Retry.USELESS or not await backoff.pause(deadline):
            raise answer


async def settled(env: Environment, start: int, primary: CellAddress, deadline: float) -> int:
    """The commit timestamp of the transaction, or ROLLED_BACK once it can never commit.

    Raises `OutcomeUnknown` if there is no answer in time, and `OutcomeLost` if there is none left.
    """
    write = WriteSteps(start, {primary: (KIND_LOCK_ONLY, b"")}, 0)
    try:
        return await mark_primary(env, write, deadline)
    except (SnapshotTooOld, SchemaError) as problem:
        raise OutcomeLost(
            f"the outcome of the transaction that began at {start} can no longer be determined: "
            f"{problem}",
            start_timestamp=start,
            primary=primary,
        ) from problem
    except PercolatorError as problem:
        raise OutcomeUnknown(
            f"still unknown: {problem}", start_timestamp=start, primary=primary
        ) from problem


async def roll_back_all(
    env: Environment, write: WriteSteps, touched: Sequence[CellAddress]
) -> None:
    """Puts the marker on the primary, then rolls back the other cells that may carry a lock."""
    commit_ts = await mark_primary(env, write, background_deadline(env))
    if commit_ts != ROLLED_BACK:
        # Another committer of this transaction was first. It was not reported as aborted, so this
        # is no contradiction.
        env.verdicts.put(write.start, commit_ts)
    else:
        await roll_back_others(env, write, touched)


async def roll_back_others(
    env: Environment, write: WriteSteps, touched: Sequence[CellAddress]
) -> None:
    """Rolls back the other cells, once the marker on the primary is durable."""
    deadline = background_deadline(env)
    pending: Sequence[CellAddress] = sorted(set(touched) - {write.primary})
    backoff = env.backoff()
    while pending:
        again: list[CellAddress] = []
        for cells in portions(pending):
            requests: list[CellMutation] = [write.roll_back_step(cell) for cell in cells]
            answers = await env.cells.mutate(requests, deadline)
            for cell, answer in zip(cells, answers, strict=True):
                if isinstance(answer, Refused):
                    raise InvariantViolation(
                        f"{cell} is committed by the rolled back transaction {write.start}"
                    )
                # Where history was collected, all locks were resolved before.
                if answer is not APPLIED and not isinstance(answer, SnapshotTooOld):
                    again.append(cell)
        pending = again
        if pending and not await backoff.pause(deadline):
            return


def background_deadline(env: Environment) -> float:
    """When work in the background that began now is left to others."""
    return env.now() + env.limits.background_seconds
