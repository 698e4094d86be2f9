"""The commit point: replacing the primary's lock with its commit record decides the transaction.

Until then, this file keeps track of the lock as it is stored, not as it was sent: heartbeats raise
its time to live, readers push its least commit timestamp, and the commit succeeds only on the lock
that was last seen. A heartbeat that loses to readers raises that timestamp, too (raising.py).

Rules, each with the failure that it prevents:
- The commit timestamp is fetched when every cell is locked. If it were fetched earlier, a reader
  above it may have read a cell that was not locked yet.
- An unanswered commit is repeated with the *same* timestamp, since the first attempt may have been
  applied; with another timestamp, readers between the two would see half of the transaction. The
  one exception is a lock that a reader has pushed: the first attempt can never be applied then.
- The absence of both lock and record proves nothing: only a marker on the primary proves that the
  transaction is rolled back.
"""

from __future__ import annotations

from percolator.errors import (
    DeadlineExceeded,
    PercolatorError,
    Retry,
    SchemaChanged,
    TimestampRegression,
)
from percolator.formats.records import LOCK_HEADER, TTL_MILLISECONDS_MAX, timestamp_bytes
from percolator.protocol import aftermath, conflicts, steps
from percolator.protocol.announcing import Announcement
from percolator.protocol.environment import Environment
from percolator.protocol.raising import (
    LEAD_SECONDS_MAX,
    Heartbeat,
    Raises,
    later,
    seconds_until,
)
from percolator.protocol.same_codecs import require_same_codecs
from percolator.protocol.statistics import Statistics
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.protocol.weak_notifying import notify_weak_observers
from percolator.protocol.write_steps import WriteSteps
from percolator.routing.cells import APPLIED, Answer, NotSent, Refused
from percolator.wire.backoff import Backoff


class CommitPoint:
    """One transaction's lock on its primary, and the way from there to its commit record."""

    __slots__ = (
        "_commit",
        "_env",
        "_raises",
        "_started_seconds",
        "_statistics",
        "_write",
        "announcement",
        "is_awaited",
        "is_locked",
        "is_lost",
        "is_out",
        "min_commit",
        "sent",
        "ttl",
    )

    def __init__(
        self,
        env: Environment,
        write: WriteSteps,
        started_seconds: float,
        statistics: Statistics,
        announcement: Announcement | None = None,
    ) -> None:
        """`started_seconds`: when the start timestamp was received, on the monotonic clock."""
        self._env = env
        self.announcement = announcement
        self._write = write
        self._started_seconds = started_seconds
        self._statistics = statistics
        self._commit = 0
        self._raises = Raises(env.limits)
        self.min_commit = write.start + 1
        """The least commit timestamp in the stored lock; readers raise it."""
        self.ttl = 0
        """The time to live in the stored lock, in milliseconds; heartbeats raise it."""
        self.is_locked = False
        self.is_awaited = False
        """A prewrite of the primary was sent, with others, and they are not all answered."""
        self.is_lost = False
        """A heartbeat found the lock gone."""
        self.sent = False
        """A commit was sent, and it is not known whether it was applied."""
        self.is_out = False
        """A commit was sent, even if its answer was that it was not executed: networks repeat, so
        a copy may arrive late, at a server that has the tablet by then. Until a marker is durable,
        it may commit the transaction."""

    # ------------------------------------------------------------------ reaching it

    async def reach(self, deadline: float) -> int:
        """Returns the commit timestamp: ours, or that of an earlier commit of the same transaction.

        Raises when the transaction will never be committed, or, if `sent`, when that is not known.
        """
        write = self._write
        table_id = write.primary.table_id
        backoff: Backoff | None = None
        while True:
            while self.min_commit > self._commit:
                # Either this is the first round, or the lock was seen with this number in it. Then
                # nothing sent before was applied, and since the number only grows, nothing ever
                # will be.
                self.sent = self.is_out = False
                await self._take_commit_timestamp(deadline)
                if self.announcement is not None:
                    await self.announcement.renew(deadline)
            # A heartbeat may learn of a push while we wait below. The commit must be sent for the
            # lock that its timestamp was compared with, and for no other.
            min_commit, commit = self.min_commit, self._commit
            if write.weak_notifications:
                await self._notify(commit, deadline)
            schema = self._env.schemas.get(table_id)
            if schema is None:
                schema = await self._env.schemas.refresh(table_id, deadline)
            if not self.sent:  # otherwise it may be committed: only the same step can tell
                require_same_codecs(write.writes, write.tables, self._env.schemas)
            step = write.commit_primary(schema, min_commit, commit)
            sent_before, self.sent = self.sent, True
            out_before, self.is_out = self.is_out, True
            self._statistics.round_trips += 1
            (answer,) = await self._env.cells.mutate((step,), deadline)
            if answer is APPLIED:
                return commit
            if isinstance(answer, Refused):
                if answer.condition == steps.OWN_COMMIT:
                    return answer.offender.timestamp
                if not self._is_own_lock(answer):
                    return await self._no_lock(answer, deadline)
                self.learn_lock(answer)
                if self._env.now() >= deadline:
                    raise _out_of_time()
                continue
            if answer.retry is not Retry.UNKNOWN:
                self.sent = sent_before
            if isinstance(answer, NotSent):
                self.is_out = out_before
            if isinstance(answer, SchemaChanged):
                # The step is rebuilt, with the notifications that the newer schema asks for.
                await self._env.schemas.refresh(table_id, deadline)
            elif answer.retry is Retry.USELESS:
                raise answer
            self._statistics.retries += 1
            backoff = backoff or self._env.backoff()
            if not await backoff.pause(deadline):
                raise answer

    async def _take_commit_timestamp(self, deadline: float) -> None:
        """Fetches the commit timestamp. Never call this before the last prewrite was answered."""
        left = deadline - self._env.now()
        if left <= 0:
            raise _out_of_time()
        self._statistics.round_trips += 1
        before, in_use = max(self._write.start, self._commit), self.min_commit - 1
        self._commit = await self._env.timestamps.get(timeout_seconds=left)
        # Compared with what was in use before we asked. In the meantime, a heartbeat may have
        # learned of a push by a reader that began after this timestamp was issued; that is no
        # regression, and `reach` takes a later timestamp.
        # A heartbeat may have raised it, perhaps one of another committer: not too far.
        wait = seconds_until(in_use + 1, self._commit)
        if self._commit <= before or wait > 2 * LEAD_SECONDS_MAX:
            in_use = max(in_use, before)
            raise TimestampRegression(f"the oracle gave {self._commit} after {in_use} was in use")
        if wait:
            await self._env.clock.sleep(min(wait, left))

    async def _no_lock(self, answer: Refused, deadline: float) -> int:
        """The commit was refused, and the lock is gone. Returns the commit timestamp if there is
        one after all, and raises otherwise."""
        if answer.condition == steps.OWN_ROLLBACK:
            self._env.verdicts.put(self._write.start, ROLLED_BACK)
        else:
            # Neither record nor marker: that alone proves nothing, so put the marker, which does.
            commit = await aftermath.mark_primary(self._env, self._write, deadline)
            if commit:
                return commit
        self.sent = self.is_out = False  # nothing that was sent before can be applied now
        raise conflicts.rolled_back_by_others(self._env, self._write, self._write.primary)

    async def _notify(self, commit: int, deadline: float) -> None:
        """Writes the weak notifications at the commit timestamp, again whenever that has changed.

        This happens before the commit point, or a crash right after it would lose them. It happens
        after all locks are held, so that an observer that runs too early meets a lock and waits.
        """
        await notify_weak_observers(
            self._env, self._write.weak_notifications, commit, deadline, self._statistics
        )

    # ------------------------------------------------------------------ the lock until then

    def choose_ttl(self) -> None:
        """Sets the time to live of the next prewrite. Once the primary is locked, heartbeats do."""
        if not self.is_locked:
            self.ttl = self._ttl_from(self._env.now())

    def answered(self, *, is_locked: bool) -> None:
        """The prewrites that were sent with that of the primary have been answered."""
        self.is_awaited = False
        self.is_locked = self.is_locked or is_locked

    def _ttl_from(self, now: float) -> int:
        """A time to live counts from the start timestamp, so the time already elapsed is added."""
        elapsed = now - self._started_seconds
        seconds = elapsed + self._env.limits.lock_ttl_seconds
        return min(int(seconds * 1000), TTL_MILLISECONDS_MAX)

    def learn_lock(self, answer: Refused) -> None:
        """Takes over both numbers of our lock on the primary as it is stored: there, they only
        grow."""
        _, min_commit, ttl, _ = LOCK_HEADER.unpack_from(answer.offender.value)
        self.min_commit = max(self.min_commit, min_commit)  # answers may overtake each other
        # Until the primary is known to be locked, our `ttl` is what the last attempt would have
        # set. If we kept it, and an earlier attempt had set another, every heartbeat would fail.
        self.ttl = max(self.ttl, ttl) if self.is_locked else ttl

    def _is_own_lock(self, answer: Refused) -> bool:
        cell = answer.cell
        return cell is not None and cell.value.startswith(timestamp_bytes(self._write.start))

    def wants_heartbeat(self, now: float) -> bool:
        """True if the primary is locked, or may be, and a good part of its time to live has passed.

        It may be while another tablet, which has failed perhaps, has not answered for its cells.
        """
        limits = self._env.limits
        set_at = self._started_seconds + self.ttl / 1000 - limits.lock_ttl_seconds
        is_due = now >= set_at + limits.heartbeat_seconds / 2
        return is_due and (self.is_locked or self.is_awaited) and not self.is_lost

    def heartbeat(self) -> Heartbeat:
        """The step that raises the primary's time to live."""
        now = self._env.now()
        ttl = max(self.ttl, self._ttl_from(now))
        oracle = later(self._write.start, now - self._started_seconds)
        least = self._raises.least(self.min_commit, self._commit, oracle)
        step = self._write.heartbeat(self.min_commit, self.ttl, least, ttl)
        return Heartbeat(step, least, ttl, self.is_locked)

    def after_heartbeat(self, beat: Heartbeat, answer: Answer, took_seconds: float) -> bool:
        """Returns True if the lock had changed, so that another heartbeat should follow at once."""
        if answer is APPLIED:
            self.min_commit = max(self.min_commit, beat.min_commit)
            self.ttl = max(self.ttl, beat.ttl)
            self.is_locked = True
            self._raises.lead.applied()
        elif isinstance(answer, Refused):
            if self._is_own_lock(answer):
                self._raises.lead.refused(took_seconds)
                self.learn_lock(answer)
                self.is_locked = True
                return True
            # Otherwise it may have overtaken the prewrite, which may have been answered since.
            self.is_lost = self.is_lost or beat.is_for_lock
        return False


def _out_of_time() -> PercolatorError:
    return DeadlineExceeded("no time was left to commit")
