"""The commit point: the primary's lock is replaced by its commit record, and all is decided.

Until then the lock is kept as it is stored, not as it was sent: heartbeats raise its time to live,
readers push its least commit timestamp, and the commit holds only for the lock that was seen.

Rules, each with the failure that it prevents:
- The commit timestamp is fetched when every cell is locked. Fetched earlier, a reader above it may
  have read a cell that was not locked yet.
- An unanswered commit is repeated with the *same* timestamp, since the first may have been applied;
  with a second one, readers between the two would see half of the transaction. The one exception is
  a lock that a reader has pushed: then the first can never be applied any more.
- Neither lock nor record proves nothing: only a marker on the primary says that it is rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    PercolatorError,
    Retry,
    SchemaChanged,
    TimestampRegression,
)
from percolator.protocol import aftermath, conflicts, steps
from percolator.protocol.aftermath import shown
from percolator.protocol.records import LOCK_HEADER, TTL_MILLISECONDS_MAX, timestamp_bytes
from percolator.protocol.surroundings import Statistics, Surroundings
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.protocol.write_steps import WriteSteps
from percolator.wire.backoff import Backoff
from percolator.wire.questions import APPLIED, Answer, Refused, Step


class CommitPoint:
    """One transaction's lock on its primary, and the way from there to its commit record."""

    __slots__ = (
        "_around",
        "_commit",
        "_started_seconds",
        "_statistics",
        "_weak_notifications",
        "_write",
        "is_locked",
        "is_lost",
        "min_commit",
        "sent",
        "ttl",
    )

    def __init__(
        self,
        around: Surroundings,
        write: WriteSteps,
        weak_notifications: Sequence[CellAddress],
        started_seconds: float,
        statistics: Statistics,
    ) -> None:
        """`started_seconds`: when the start timestamp was received, on the monotonic clock."""
        self._around = around
        self._write = write
        self._weak_notifications = weak_notifications
        self._started_seconds = started_seconds
        self._statistics = statistics
        self._commit = 0
        self.min_commit = write.start + 1
        """As the lock has it: readers raise it."""
        self.ttl = 0
        """As the lock has it, in milliseconds: heartbeats raise it."""
        self.is_locked = False
        self.is_lost = False
        """A heartbeat found the lock gone."""
        self.sent = False
        """The commit may have been applied; nobody knows."""

    # ------------------------------------------------------------------ passing it

    async def reach(self, deadline: float) -> int:
        """Returns the commit timestamp: ours, or that of whoever has committed the same before.

        Raises when it will never be committed, or, if `sent`, when nobody knows.
        """
        table_id = self._write.primary.table_id
        backoff: Backoff | None = None
        while True:
            while self.min_commit > self._commit:
                # The first time, or the lock was seen with this number in it: then nothing sent
                # before was applied, and since the number only grows, nothing ever will be.
                self.sent = False
                await self._take_commit_timestamp(deadline)
            # A heartbeat may learn of a push while we wait here: the commit is sent for the lock
            # that it was compared with, and for no other.
            min_commit, commit = self.min_commit, self._commit
            if self._weak_notifications:
                await self._notify(commit, deadline)
            schema = self._around.schemas.get(table_id)
            if schema is None:
                schema = await self._around.schemas.refresh(table_id, deadline)
            step = self._write.commit_primary(schema, min_commit, commit)
            sent_before, self.sent = self.sent, True
            self._statistics.round_trips += 1
            (answer,) = await self._around.cells.mutate((step,), deadline)
            if answer is APPLIED:
                return commit
            if isinstance(answer, Refused):
                if answer.condition == steps.OWN_COMMIT:
                    return shown(answer).timestamp
                if not self._is_own_lock(answer):
                    return await self._no_lock(answer, deadline)
                self.learn_lock(answer)
                if self._around.clock.monotonic_seconds() >= deadline:
                    raise _out_of_time()
                continue
            if answer.retry is not Retry.UNKNOWN:
                self.sent = sent_before
            if isinstance(answer, SchemaChanged):
                # It is built anew, with the notifications that the newer schema asks for.
                await self._around.schemas.refresh(table_id, deadline)
            elif answer.retry is Retry.USELESS:
                raise answer
            self._statistics.retries += 1
            backoff = backoff or self._around.backoff()
            if not await backoff.pause(deadline):
                raise answer

    async def _take_commit_timestamp(self, deadline: float) -> None:
        """Never before the last prewrite was answered."""
        left = deadline - self._around.clock.monotonic_seconds()
        if left <= 0:
            raise _out_of_time()
        self._statistics.round_trips += 1
        in_use = self.min_commit - 1
        self._commit = await self._around.timestamps.get(timeout_seconds=left)
        # Compared with what was in use before asking: a heartbeat may learn meanwhile of a push
        # by a reader that began after this timestamp was given. Then a later one is taken.
        if self._commit <= in_use:
            raise TimestampRegression(f"the oracle gave {self._commit} after {in_use} was in use")

    async def _no_lock(self, answer: Refused, deadline: float) -> int:
        """The commit was refused, and the lock is gone. Returns when to find it was committed."""
        if answer.condition == steps.OWN_ROLLBACK:
            self._around.verdicts.put(self._write.start, ROLLED_BACK)
        else:
            # Neither record nor marker: that alone proves nothing, the marker does.
            commit = await aftermath.mark_primary(self._around, self._write, deadline)
            if commit:
                return commit
        self.sent = False  # nothing that was sent before can be applied any more
        raise conflicts.rolled_back_by_others(self._write, self._write.primary)

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

    # ------------------------------------------------------------------ the lock until then

    def choose_ttl(self) -> None:
        """Of the next prewrite. Once the primary is locked, heartbeats raise it."""
        if not self.is_locked:
            self.ttl = self._ttl_from(self._around.clock.monotonic_seconds())

    def _ttl_from(self, now: float) -> int:
        """A time to live counts from the start timestamp: what was lived until now is added."""
        lived = now - self._started_seconds
        seconds = lived + self._around.limits.lock_ttl_seconds
        return min(int(seconds * 1000), TTL_MILLISECONDS_MAX)

    def learn_lock(self, answer: Refused) -> None:
        """The own lock on the primary, as it is stored: both numbers only grow there."""
        _, min_commit, ttl, _ = LOCK_HEADER.unpack_from(shown(answer).value)
        self.min_commit = max(self.min_commit, min_commit)  # answers may overtake each other
        # Until the primary is known to be locked, ours is what the last attempt would have set.
        # Kept instead of the one that an earlier attempt has set, it would fail every heartbeat.
        self.ttl = max(self.ttl, ttl) if self.is_locked else ttl

    def _is_own_lock(self, answer: Refused) -> bool:
        cell = answer.cell
        return cell is not None and cell.value.startswith(timestamp_bytes(self._write.start))

    def wants_heartbeat(self, now: float) -> bool:
        """Once the primary is locked, whenever a good part of its time to live is over."""
        limits = self._around.limits
        set_at = self._started_seconds + self.ttl / 1000 - limits.lock_ttl_seconds
        is_due = now >= set_at + limits.heartbeat_seconds / 2
        return is_due and self.is_locked and not self.is_lost

    def heartbeat(self) -> tuple[Step, int]:
        """The step that raises the primary's time to live, and to what."""
        ttl = max(self.ttl, self._ttl_from(self._around.clock.monotonic_seconds()))
        return self._write.heartbeat(self.min_commit, self.ttl, ttl), ttl

    def after_heartbeat(self, ttl_milliseconds: int, answer: Answer) -> bool:
        """Returns whether another one, for the lock as it turned out to be, is wanted at once."""
        if answer is APPLIED:
            self.ttl = max(self.ttl, ttl_milliseconds)
        elif isinstance(answer, Refused):
            if self._is_own_lock(answer):
                self.learn_lock(answer)
                return True
            self.is_lost = True
        return False


def _out_of_time() -> PercolatorError:
    return DeadlineExceeded("no time was left to commit")
