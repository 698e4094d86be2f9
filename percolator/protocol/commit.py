"""Committing a transaction: the paper's Figure 6, with an answer for every lost message.

    prewrite   lock every cell that the transaction writes, all at once
    timestamp  ask the oracle for the commit timestamp: only now, or a reader above it may already
               have read a cell that was not locked yet
    commit     replace the primary's lock by its commit record: from here on, it is committed
    (later)    the other cells, in the background

Rules, each with the failure that it prevents:
- The primary is the least cell of the write set. Two committers of one transaction (a gateway that
  took over) with different primaries would decide twice.
- A repeated step has the same content. In particular an unanswered commit is repeated with the
  *same* commit timestamp, since the first may have been applied; with a second one, readers between
  the two would see half of the transaction. The one exception is a lock that a reader has pushed:
  then the first can never be applied any more.
- Aborting marks the primary first and touches nothing else until the mark is durable. If the mark
  is refused because the commit record is there, the outcome is: committed.
- Once the commit was sent and not answered, the outcome is unknown until the primary tells.
  Guessing "failed" makes the user do the work twice.
- Whoever asks for an unknown outcome joins the one attempt that is going on. Two at a time might
  each take a commit timestamp after a push, and commit the other cells at the wrong one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from copy import copy

from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    SchemaChanged,
    TimestampRegression,
    Unavailable,
)
from percolator.protocol import aftermath, steps
from percolator.protocol.aftermath import shown
from percolator.protocol.cleanup import Cleanup, MetLock
from percolator.protocol.heartbeats import Heartbeats
from percolator.protocol.lock_waiting import LockWaiting
from percolator.protocol.records import LOCK_HEADER, TTL_MILLISECONDS_MAX, timestamp_bytes
from percolator.protocol.surroundings import Statistics, Surroundings
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.protocol.write_steps import WriteSteps
from percolator.wire.backoff import Backoff
from percolator.wire.questions import APPLIED, Answer, Refused, Step

_Settled = int | ConflictError | OutcomeUnknown
"""What became of a commit, or its timestamp."""


class Commit:
    """One transaction's way from its write set to its outcome."""

    def __init__(
        self,
        around: Surroundings,
        cleanup: Cleanup,
        heartbeats: Heartbeats,
        write: WriteSteps,
        *,
        weak_notifications: Sequence[CellAddress],
        started_seconds: float,
        statistics: Statistics,
    ) -> None:
        """`started_seconds`: when the start timestamp was received, on the monotonic clock."""
        self._around = around
        self._cleanup = cleanup
        self._heartbeats = heartbeats
        self._write = write
        self._weak_notifications = weak_notifications
        self._started_seconds = started_seconds
        self._statistics = statistics
        self._min_commit = write.start + 1
        self._ttl = 0
        self._commit = 0
        self._commit_sent = False
        """May have been applied; nobody knows."""
        self._settling: asyncio.Task[_Settled] | None = None
        """Finds out what became of the commit."""
        self._primary_locked = False
        self._primary_lost = False
        """Somebody committed the primary above our start: it can never be locked any more."""
        self._touched: list[CellAddress] = []
        """May carry our locks."""
        self._last_problem: PercolatorError | None = None
        """Why the last attempt of a step was not answered."""

    def run(self, deadline: float) -> Coroutine[None, None, int]:
        """Returns the commit timestamp.

        Raises `ConflictError`, `OutcomeUnknown`, or what made it impossible; of these only
        `OutcomeUnknown` leaves open whether it is committed.
        """
        return self._reach_outcome(deadline, prewritten=False)

    async def settle(self, deadline: float) -> int:
        """After `OutcomeUnknown`: sends the very same commit again, and returns its timestamp.

        Raises `ConflictError` when the transaction turns out to be rolled back, `OutcomeUnknown`
        when still nobody answers. It goes on in the background when its caller leaves.
        """
        while True:
            joined = self._settling
            settling = joined or self._start_settling(deadline)
            left = deadline - self._around.clock.monotonic_seconds()
            await asyncio.wait((settling,), timeout=max(left, 0.0))
            if not settling.done():
                raise self._unknown(DeadlineExceeded("no answer in time"))
            if settling.cancelled():
                raise self._unknown(Unavailable("the client was closed"))
            outcome = settling.result()
            if isinstance(outcome, int):
                return outcome
            if joined is None or not isinstance(outcome, OutcomeUnknown):
                raise copy(outcome)  # others may wait for the same
            # The one that was joined had less time than there is left.

    @property
    def may_be_committed(self) -> bool:
        """The commit was sent, and nothing since then says that it was not applied."""
        return self._commit_sent

    async def _reach_outcome(self, deadline: float, *, prewritten: bool) -> int:
        around, write = self._around, self._write
        self._heartbeats.add(self)
        try:
            try:
                commit = 0 if prewritten else await self._prewrite(deadline)
                if not commit:
                    commit = await self._commit_primary(deadline)
            except PercolatorError as problem:
                if self._commit_sent:
                    raise self._unknown(problem) from problem
                commit = await self._give_up(problem, deadline)
        except asyncio.CancelledError:
            if not prewritten:
                self._go_on_alone()
            raise
        finally:
            self._heartbeats.discard(self)
        self._commit = commit
        around.verdicts.put(write.start, commit)
        if len(write.cells) > 1:
            rest = aftermath.commit_secondaries(around, write, commit)
            if around.background.full:
                await rest
            else:
                around.background.start(rest)
        return commit

    # ------------------------------------------------------------------ prewrite

    async def _prewrite(self, deadline: float) -> int:
        """Locks every cell. Returns 0, or the timestamp at which somebody has committed it."""
        pending = self._write.cells
        waiting: LockWaiting | None = None
        while True:
            self._set_ttl()
            unanswered: list[CellAddress] = []
            met: list[MetLock] = []
            for cells in aftermath.portions(pending):
                answers = await self._send_prewrites(cells, deadline)
                if answers.count(APPLIED) == len(cells):
                    self._touched.extend(cells)
                    continue
                committed = self._sort_out(cells, answers, unanswered, met)
                if committed:
                    return committed
            pending = unanswered + [lock.address for lock in met]
            self._primary_locked = not pending or self._write.primary not in pending
            if not pending:
                return 0
            self._statistics.retries += 1
            waiting = waiting or LockWaiting(self._around)
            await self._wait_for_locks(waiting, met, deadline)

    def _send_prewrites(
        self, cells: Sequence[CellAddress], deadline: float
    ) -> Awaitable[list[Answer]]:
        prewrite, min_commit, ttl = self._write.prewrite, self._min_commit, self._ttl
        self._statistics.round_trips += 1
        return self._around.cells.mutate(
            [prewrite(cell, min_commit, ttl) for cell in cells], deadline
        )

    def _sort_out(
        self,
        cells: Sequence[CellAddress],
        answers: Sequence[Answer],
        unanswered: list[CellAddress],
        met: list[MetLock],
    ) -> int:
        """Returns the timestamp at which somebody has committed it, or 0. Raises conflicts."""
        problem: PercolatorError | None = None
        for cell, answer in zip(cells, answers, strict=True):
            if answer is APPLIED:
                self._touched.append(cell)
            elif isinstance(answer, Refused):
                if answer.condition == steps.OWN_COMMIT:
                    return shown(answer).timestamp
                problem = self._obstacle(cell, answer, met) or problem
            elif answer.retry is Retry.UNKNOWN:
                self._touched.append(cell)
                unanswered.append(cell)
                self._last_problem = answer
            else:
                problem = answer
        if problem is not None:
            raise problem
        return 0

    async def _wait_for_locks(
        self, waiting: LockWaiting, met: Sequence[MetLock], deadline: float
    ) -> None:
        """Settles what was met, and pauses. Raises when it has lasted too long."""
        if met:
            waited = waiting.note(met[0], self._statistics)
            if waited > self._around.limits.lock_wait_seconds:
                raise self._conflict_with_lock(met[0])
            await self._cleanup.clear(
                met, deadline=deadline, known_now=self._write.start, waited_seconds=waited
            )
        if not await waiting.backoff.pause(deadline):
            raise self._conflict_with_lock(met[0]) if met else self._out_of_time()

    def _obstacle(
        self, cell: CellAddress, answer: Refused, met: list[MetLock]
    ) -> PercolatorError | None:
        """What a refused prewrite means. The lock of an older transaction is put into `met`."""
        start = self._write.start
        in_the_way = shown(answer)
        if answer.condition == steps.PREWRITE_LOCKED:
            lock = MetLock.of(cell.table_id, in_the_way)
            if lock.lock.start_timestamp == start:
                self._touched.append(cell)  # an earlier attempt of ours, whose answer was lost
                if cell == self._write.primary:
                    self._learn_lock(answer)
                return None
            if lock.lock.start_timestamp < start:
                met.append(lock)
                return None
            # Only the younger waits for the older. Two that wait for each other wait for ever.
            return self._conflict_with_lock(lock)
        if answer.condition == steps.OWN_ROLLBACK:
            return self._rolled_back_by_others(cell)
        if cell == self._write.primary:
            self._primary_lost = True
        other = int.from_bytes(in_the_way.value[:8], "big")
        return ConflictError(
            f"{cell} was committed by transaction {other} at {in_the_way.timestamp}, "
            f"after this one had begun at {start}",
            cell=cell,
            start_timestamp=start,
            other_start_timestamp=other,
            other_commit_timestamp=in_the_way.timestamp,
        )

    def _set_ttl(self) -> None:
        """Until the primary is locked; later, heartbeats raise it."""
        if not self._primary_locked:
            self._ttl = self._ttl_from(self._around.clock.monotonic_seconds())

    def _ttl_from(self, now: float) -> int:
        """A time to live counts from the start timestamp: what was lived until now is added."""
        lived = now - self._started_seconds
        seconds = lived + self._around.limits.lock_ttl_seconds
        return min(int(seconds * 1000), TTL_MILLISECONDS_MAX)

    # ------------------------------------------------------------------ the commit point

    async def _take_commit_timestamp(self, deadline: float) -> None:
        """Never before the last prewrite was answered."""
        left = deadline - self._around.clock.monotonic_seconds()
        if left <= 0:
            raise self._out_of_time()
        self._statistics.round_trips += 1
        in_use = self._min_commit - 1
        self._commit = await self._around.timestamps.get(timeout_seconds=left)
        # Compared with what was in use before asking: a heartbeat may learn meanwhile of a push
        # by a reader that began after this timestamp was given. Then a later one is taken.
        if self._commit <= in_use:
            raise TimestampRegression(f"the oracle gave {self._commit} after {in_use} was in use")

    async def _commit_primary(self, deadline: float) -> int:
        """Passes the commit point, or finds out that somebody has. Raises if nobody ever will."""
        table_id = self._write.primary.table_id
        backoff: Backoff | None = None
        while True:
            while self._min_commit > self._commit:
                # The first time, or the lock was seen with this number in it: then nothing sent
                # before was applied, and since the number only grows, nothing ever will be.
                self._commit_sent = False
                await self._take_commit_timestamp(deadline)
            # A heartbeat may learn of a push while we wait here: the commit is sent for the lock
            # that it was compared with, and for no other.
            min_commit, commit = self._min_commit, self._commit
            if self._weak_notifications:
                await self._notify(commit, deadline)
            schema = self._around.schemas.get(table_id)
            if schema is None:
                schema = await self._around.schemas.refresh(table_id, deadline)
            step = self._write.commit_primary(schema, min_commit, commit)
            sent_before, self._commit_sent = self._commit_sent, True
            self._statistics.round_trips += 1
            (answer,) = await self._around.cells.mutate((step,), deadline)
            if answer is APPLIED:
                return commit
            if isinstance(answer, Refused):
                if answer.condition == steps.OWN_COMMIT:
                    return shown(answer).timestamp
                if not self._is_own_lock(answer):
                    return await self._no_lock(answer, deadline)
                self._learn_lock(answer)
                if self._around.clock.monotonic_seconds() >= deadline:
                    raise self._out_of_time()
                continue
            if answer.retry is not Retry.UNKNOWN:
                self._commit_sent = sent_before
            if isinstance(answer, SchemaChanged):
                # It is built anew, with the notifications that the newer schema asks for.
                await self._around.schemas.refresh(table_id, deadline)
            elif answer.retry is Retry.USELESS:
                raise answer
            self._statistics.retries += 1
            backoff = backoff or self._around.backoff()
            if not await backoff.pause(deadline):
                raise answer

    async def _no_lock(self, answer: Refused, deadline: float) -> int:
        """The commit was refused, and the lock is gone. Returns when to find it was committed."""
        if answer.condition == steps.OWN_ROLLBACK:
            self._around.verdicts.put(self._write.start, ROLLED_BACK)
        else:
            # Neither record nor marker: that alone proves nothing, the marker does.
            commit = await aftermath.mark_primary(self._around, self._write, deadline)
            if commit:
                return commit
        self._commit_sent = False  # nothing that was sent before can be applied any more
        raise self._rolled_back_by_others(self._write.primary)

    async def _notify(self, commit: int, deadline: float) -> None:
        """Weak notifications at the commit timestamp, again whenever that has changed.

        Before the commit point, or a crash right after it would lose them; after all locks are
        held, so that an observer that runs for them too early meets a lock and waits.
        """
        backoff = self._around.backoff()
        while True:
            questions = []
            for table_id, row, column in self._weak_notifications:
                schema = await self._around.schema(table_id, deadline)
                observers = schema.weak_observers.get(column, ())
                if observers:
                    step = steps.notify(row, column, commit, observers)
                    questions.append(Step(table_id, step))
            if not questions:
                return
            self._statistics.round_trips += 1
            answers = await self._around.cells.mutate(questions, deadline)
            problems = [answer for answer in answers if isinstance(answer, PercolatorError)]
            if not problems:
                return
            if not await backoff.pause(deadline):
                raise problems[0]

    # ------------------------------------------------------------------ giving up

    async def _give_up(self, problem: PercolatorError, deadline: float) -> int:
        """Rolls back and raises `problem`, unless it turns out that it is committed."""
        problem = copy(problem)  # the same answer may have gone to others
        if problem.retry is Retry.UNKNOWN:
            problem.retry = Retry.SAFE  # nothing is committed, whatever was prewritten
        if self._primary_lost:
            # As final as a marker, which a dying owner's lock on another cell will still find.
            if self._touched:
                self._roll_back_in_background()
            raise problem
        if self._around.verdicts.get(self._write.start) != ROLLED_BACK:
            try:
                commit = await aftermath.mark_primary(self._around, self._write, deadline)
            except PercolatorError:
                self._roll_back_in_background()
                raise problem from None
            if commit:
                return commit
        others = aftermath.roll_back_others(self._around, self._write, self._touched)
        self._around.background.start(others)
        raise problem

    def _roll_back_in_background(self) -> None:
        work = aftermath.roll_back_all(self._around, self._write, self._touched)
        self._around.background.start(work)

    def _go_on_alone(self) -> None:
        """The caller has left in the middle. Nobody else should have to wait for our locks."""
        if self._commit_sent:
            self._start_settling(aftermath.background_deadline(self._around))
        else:
            self._touched = self._write.cells  # prewrites that were not answered may still arrive
            self._roll_back_in_background()

    def _start_settling(self, deadline: float) -> asyncio.Task[_Settled]:
        self._settling = self._around.background.start(self._settle(deadline))
        return self._settling

    async def _settle(self, deadline: float) -> _Settled:
        try:
            return await self._reach_outcome(deadline, prewritten=True)
        except (ConflictError, OutcomeUnknown) as outcome:
            # An outcome like any other, which whoever asks is told; maybe nobody does.
            return outcome
        finally:
            self._settling = None

    def _unknown(self, problem: PercolatorError) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"whether the transaction begun at {self._write.start} is committed could not be "
            f"learned: {problem}",
            start_timestamp=self._write.start,
            primary=self._write.primary,
        )

    def _out_of_time(self) -> PercolatorError:
        return self._last_problem or DeadlineExceeded("no time was left to commit")

    def _conflict_with_lock(self, met: MetLock) -> ConflictError:
        other = met.lock.start_timestamp
        return ConflictError(
            f"{met.address} is locked by transaction {other}",
            cell=met.address,
            start_timestamp=self._write.start,
            other_start_timestamp=other,
        )

    def _rolled_back_by_others(self, cell: CellAddress) -> ConflictError:
        return ConflictError(
            f"somebody who met the lock on {cell} took this transaction, begun at "
            f"{self._write.start}, for dead, and rolled it back",
            cell=cell,
            start_timestamp=self._write.start,
        )

    # ------------------------------------------------------------------ heartbeats

    def wants_heartbeat(self, now: float) -> bool:
        """Once the primary is locked, whenever a good part of its time to live is over."""
        limits = self._around.limits
        set_at = self._started_seconds + self._ttl / 1000 - limits.lock_ttl_seconds
        return self._primary_locked and now >= set_at + limits.heartbeat_seconds / 2

    def heartbeat(self) -> tuple[Step, int]:
        """The step that raises the primary's time to live, and to what."""
        ttl = max(self._ttl, self._ttl_from(self._around.clock.monotonic_seconds()))
        return self._write.heartbeat(self._min_commit, self._ttl, ttl), ttl

    def after_heartbeat(self, ttl_milliseconds: int, answer: Answer) -> bool:
        """Returns whether another one, for the lock as it turned out to be, is wanted at once."""
        if answer is APPLIED:
            self._ttl = max(self._ttl, ttl_milliseconds)
        elif isinstance(answer, Refused):
            if self._is_own_lock(answer):
                self._learn_lock(answer)
                return True
            self._heartbeats.discard(self)
        return False

    def _is_own_lock(self, answer: Refused) -> bool:
        cell = answer.cell
        return cell is not None and cell.value.startswith(timestamp_bytes(self._write.start))

    def _learn_lock(self, answer: Refused) -> None:
        """The own lock on the primary, as it is stored: both numbers only grow there."""
        _, min_commit, ttl, _ = LOCK_HEADER.unpack_from(shown(answer).value)
        self._min_commit = max(self._min_commit, min_commit)  # answers may overtake each other
        # Until the primary is known to be locked, ours is what the last attempt would have set.
        # Kept instead of the one that an earlier attempt has set, it would fail every heartbeat.
        self._ttl = max(self._ttl, ttl) if self._primary_locked else ttl
