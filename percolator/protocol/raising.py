"""Raising the lock on a primary while readers push it.

Readers push the least commit timestamp in that lock, each time a younger snapshot meets one of the
transaction's locks. A replacement that fits only the lock as it was last seen comes too late if its
way takes longer than the time between two pushes. On a busy cluster, every one would, and a
transaction at work would be taken for dead. So what keeps it alive pushes it as well: it raises the
least commit timestamp, whatever that is by then, unless it is as high already. After a refusal, the
next replacement has a longer lead: pushes follow the oracle's clock, so it arrives above them once
the lead is longer than its way.

What is kept alive are the parts of shared transactions, and ordinary commits that take long
(heartbeats.py). A commit raises its lock only if a reader was faster than a plain replacement.

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

from dataclasses import replace
from typing import NamedTuple

from percolator.formats.records import TTL_MILLISECONDS_MAX, LockRecord
from percolator.limits import Limits
from percolator.protocol import steps
from percolator.routing.cells import CellMutation
from percolator.timestamps import SEQUENCE_BITS

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
    """A step that raises the time to live of a commit's lock, and what the lock is then."""

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
