"""Keeping long commits alive: the lock on the primary, and the heartbeats that raise it.

A lock's time to live is short, so that a dead owner holds others up for seconds only. While its
owner is alive and committing, the primary's time to live is raised every second; the time to live
of the other locks does not matter. One timer serves all commits of a client, since most end before
it fires.

Readers push the least commit timestamp in that lock, each time a younger snapshot meets one of the
transaction's locks. A replacement that fits only the lock as it was last seen comes too late if its
way takes longer than the time between two pushes. On a busy cluster, every one would, and a
transaction at work would be taken for dead. So what keeps it alive pushes it as well: it raises the
least commit timestamp, whatever that is by then, unless it is as high already. After a refusal, the
next replacement has a longer lead: pushes follow the oracle's clock, so it arrives above them once
the lead is longer than its way.

The attempts at shared transactions are kept alive like that, too (shared/keeping.py). A commit
raises its lock only if a reader was faster than a plain replacement.

Rules, each with the failure that it prevents:
- A replacement is never below what its process has sent before: the lead is kept until one was
  applied. And once a process says that the attempt has finished, it sends nothing else. Otherwise a
  beat that is late, or on its way at the same time, would say that the attempt is still at work,
  and nobody but that attempt would keep the part alive.
- The lead is no longer than it has to be, and zero without a refusal: the commit waits until the
  oracle is above it.
- A commit's lock that is above the oracle already is not raised: no reader pushes it, so another
  committer has. Two of them would raise it ever higher, and neither could commit.
- While an ordinary commit has a timestamp that no reader has passed, its heartbeats raise the lock
  no higher than that. Otherwise each of them would make the commit in progress fail, and a slow
  commit would never be applied.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import NamedTuple

from percolator.formats.records import (
    LOCK_HEADER,
    TTL_MILLISECONDS_MAX,
    LockRecord,
    timestamp_bytes,
)
from percolator.limits import Limits
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.protocol.write_set import WriteSteps
from percolator.routing.cells import APPLIED, Answer, CellMutation, Refused
from percolator.timestamps import SEQUENCE_BITS

ATTEMPTS_PER_BEAT_MAX = 4
"""A reader that pushes the lock makes a heartbeat fail. The next one has a longer lead."""
LEAD_SECONDS_MAX = 5.0
_ORACLE_SECONDS = 0.5
"""How far the oracle may be above where it is believed to be: its answer took time, too."""


class Lead:
    """How far above the least commit timestamps that were seen the next replacement is."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seconds = 0.0

    def above(self, least: int) -> int:
        """The least commit timestamp to set."""
        return later(least, self._seconds) + 1

    @property
    def is_needed(self) -> bool:
        """Readers were faster, and no replacement was applied since."""
        return self._seconds > 0.0

    def refused(self, took_seconds: float) -> None:
        """A reader was faster; the answer came after this time."""
        # A push is at most this much ahead of its time.
        ahead = self._limits.push_after_seconds
        self._seconds = min(ahead + 2 * (self._seconds + took_seconds), LEAD_SECONDS_MAX)

    def applied(self) -> None:
        self._seconds = 0.0


def later(timestamp: int, seconds: float) -> int:
    """The timestamp that many seconds above."""
    return timestamp + (int(seconds * 1000) << SEQUENCE_BITS)


def seconds_until(least: int, now: int) -> float:
    """How long it takes until the oracle, which is at `now`, has reached this timestamp."""
    if now >= least:
        return 0.0
    return max((least >> SEQUENCE_BITS) - (now >> SEQUENCE_BITS), 1) / 1000


class Heartbeat(NamedTuple):
    """A step that raises the time to live of a commit's lock, and the lock's fields after it."""

    step: CellMutation
    min_commit: int
    ttl: int
    is_for_lock: bool
    """The lock was known to be there when this was sent."""


class Raises:
    """The least commit timestamps that the heartbeats of one ordinary commit set."""

    __slots__ = ("_highest", "lead")

    def __init__(self, limits: Limits) -> None:
        self.lead = Lead(limits)
        self._highest = 0

    def least(self, seen: int, commit: int, oracle: int) -> int:
        """What the next heartbeat sets, given what the lock had when it was last seen, the commit
        timestamp, if one was taken, and about where the oracle is. It leaves the lock as it is
        unless it has to raise it.
        """
        least = seen
        if self.lead.is_needed and seen <= later(oracle, _ORACLE_SECONDS):
            least = commit if commit >= seen else self.lead.above(seen)
        # One that was sent and not answered may still arrive.
        least = max(least, self._highest)
        if least > seen:
            self._highest = least
        return least


class PrimaryLock:
    """The lock of one commit on its primary, as it is stored: not as it was sent.

    Heartbeats raise its time to live, and readers push its least commit timestamp. The commit
    succeeds only on the lock that was last seen.
    """

    __slots__ = (
        "_env",
        "_raises",
        "_started_seconds",
        "_write",
        "commit",
        "is_awaited",
        "is_locked",
        "is_lost",
        "min_commit",
        "ttl",
    )

    def __init__(self, env: Environment, write: WriteSteps, started_seconds: float) -> None:
        """`started_seconds`: when the start timestamp was received, on the monotonic clock."""
        self._env = env
        self._write = write
        self._started_seconds = started_seconds
        self._raises = Raises(env.limits)
        self.commit = 0
        """The commit timestamp that was taken for it."""
        self.min_commit = write.start + 1
        """The least commit timestamp in the stored lock; readers raise it."""
        self.ttl = 0
        """The time to live in the stored lock, in milliseconds; heartbeats raise it."""
        self.is_locked = False
        self.is_awaited = False
        """A prewrite of the primary was sent, with others, and they are not all answered."""
        self.is_lost = False
        """A heartbeat found the lock gone."""

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

    def learn(self, answer: Refused) -> None:
        """Takes over both numbers of our lock as it is stored: there, they only grow."""
        _, min_commit, ttl, _ = LOCK_HEADER.unpack_from(answer.offender.value)
        self.min_commit = max(self.min_commit, min_commit)  # answers may overtake each other
        # Until the primary is known to be locked, our `ttl` is what the last attempt would have
        # set. If we kept it, and an earlier attempt had set another, every heartbeat would fail.
        self.ttl = max(self.ttl, ttl) if self.is_locked else ttl

    def is_ours(self, answer: Refused) -> bool:
        """Whether the lock that was found is that of this transaction."""
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
        """The step that raises the time to live."""
        now = self._env.now()
        ttl = max(self.ttl, self._ttl_from(now))
        oracle = later(self._write.start, now - self._started_seconds)
        least = self._raises.least(self.min_commit, self.commit, oracle)
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
            if self.is_ours(answer):
                self._raises.lead.refused(took_seconds)
                self.learn(answer)
                self.is_locked = True
                return True
            # Otherwise it may have overtaken the prewrite, which may have been answered since.
            self.is_lost = self.is_lost or beat.is_for_lock
        return False


class Heartbeats:
    """The locks of the commits in progress that take two phases."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._locks: dict[PrimaryLock, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, lock: PrimaryLock) -> None:
        self._locks[lock] = None
        if self._timer is None:
            self._wait()

    def discard(self, lock: PrimaryLock) -> None:
        self._locks.pop(lock, None)

    def close(self) -> None:
        self._locks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._env.limits.heartbeat_seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._locks:
            self._env.background.start(self._beat())
            self._wait()

    async def _beat(self) -> None:
        env, limits = self._env, self._env.limits
        now = env.now()
        due = [lock for lock in self._locks if lock.wants_heartbeat(now)]
        # The next beat repeats one that gets no answer: there are two in each time to live.
        deadline = now + limits.heartbeat_seconds
        for _ in range(ATTEMPTS_PER_BEAT_MAX):
            if not due:
                return
            beats = [lock.heartbeat() for lock in due]
            began = env.now()
            answers = await env.cells.mutate([beat.step for beat in beats], deadline)
            took = env.now() - began
            # A refused heartbeat is sent again at once. If it waited for the next beat, one reader
            # a second, each pushing the lock, would be enough to let a live owner's lock expire.
            due = [
                lock
                for lock, beat, answer in zip(due, beats, answers, strict=True)
                if lock.after_heartbeat(beat, answer, took) and lock in self._locks
            ]


def raised(lock: LockRecord, least: int, ttl_milliseconds: float, value: bytes) -> LockRecord:
    """The lock with a higher least commit timestamp, another time to live, and another state."""
    ttl = min(int(ttl_milliseconds), TTL_MILLISECONDS_MAX)
    return replace(lock, min_commit_timestamp=least, ttl_milliseconds=ttl, value=value)


def raising(lock: LockRecord) -> CellMutation:
    """Puts this lock in the place of the part's lock, if that has a lower least commit
    timestamp."""
    table_id, row, column = lock.primary
    below = lock.min_commit_timestamp - 1
    step = steps.raise_lock(row, column, lock.start_timestamp, below, lock.encode())
    return CellMutation(table_id, step)
