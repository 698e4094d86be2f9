"""Advisory locks: they keep two workers from doing the same work at the same time.

Invariants:
- A lock is held exactly while its own deadline lies ahead *and* its session is alive. So the end of
  a session frees all of its locks at once, and costs the same however many they are.
- No call waits for a lock, and at most one session holds a name.
- No call shortens the life of a lock that it extends.
- Memory is bounded by the number of locks and the bytes of their names, whatever callers send. A
  lock that is no longer held is forgotten when its deadline has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from percolator.errors import Overloaded
from percolator.services.chassis.lived_time import LivedTime, ticks_of
from percolator.services.chassis.serving.quotas import Quotas
from percolator.services.lockservice.deadlines import Deadlines
from percolator.services.lockservice.limits import LockServiceLimits
from percolator.services.lockservice.sessions import Session

_RETRY_SECONDS = 1.0
_EXPIRE_AT_MOST = 1_000


@dataclass(slots=True, eq=False)
class _Lock:
    name: bytes
    session: Session
    deadline_tick: int


@dataclass(slots=True)
class LockCounts:
    """Totals since the start."""

    acquired: int = 0
    extended: int = 0
    contended: int = 0
    unlocked: int = 0
    expired: int = 0
    refused_full: int = 0


class HeldLocks:
    """All locks of one lock service. The sessions that are passed in are alive."""

    def __init__(self, time: LivedTime, limits: LockServiceLimits, quotas: Quotas) -> None:
        self._time = time
        self._quota = quotas.of(
            "locks", "locks_max", limits.locks_max, retry_after_seconds=_RETRY_SECONDS
        )
        self._bytes_quota = quotas.of(
            "bytes of lock names",
            "lock_name_bytes_total_max",
            limits.lock_name_bytes_total_max,
            retry_after_seconds=_RETRY_SECONDS,
        )
        self._by_name: dict[bytes, _Lock] = {}
        self._deadlines: Deadlines[_Lock] = Deadlines()
        self.counts = LockCounts()

    @property
    def name_bytes(self) -> int:
        """The bytes of all remembered names."""
        return self._bytes_quota.used

    def __len__(self) -> int:
        return len(self._by_name)

    def try_lock(
        self, session: Session, names: Sequence[bytes], ttl_milliseconds: int
    ) -> list[bool]:
        """Takes each name that no other session holds, and extends those that this one holds.

        Returns for each name whether the session holds it now. If there is no room for all of
        them, none is taken.
        """
        now = self._time.tick()
        self._forget_free(names, now)
        self._take_quotas(session, [name for name in names if name not in self._by_name], now)
        deadline_tick = now + ticks_of(ttl_milliseconds)
        held: list[bool] = []
        for name in names:
            lock = self._by_name.get(name)
            if lock is None:
                self._add(name, session, deadline_tick)
            elif lock.session is session:
                self._extend(lock, deadline_tick)
            else:
                self.counts.contended += 1
                held.append(False)
                continue
            held.append(True)
        return held

    def renew(self, session: Session, names: Sequence[bytes], ttl_milliseconds: int) -> list[bool]:
        """Extends the locks that the session still holds, and takes no others."""
        now = self._time.tick()
        deadline_tick = now + ticks_of(ttl_milliseconds)
        held: list[bool] = []
        for name in names:
            lock = self._by_name.get(name)
            holds = lock is not None and lock.session is session and lock.deadline_tick > now
            if lock is not None and holds:
                self._extend(lock, deadline_tick)
            held.append(holds)
        return held

    def unlock(self, session: Session, names: Sequence[bytes]) -> None:
        """Releases those of the names that the session holds, and leaves others alone."""
        for name in names:
            lock = self._by_name.get(name)
            if lock is not None and lock.session is session:
                self._deadlines.remove(lock, lock.deadline_tick)
                self._forget(lock)
                self.counts.unlocked += 1

    def expire(self, at_most: int) -> int:
        """Forgets up to `at_most` locks whose deadline has passed; returns how many."""
        return self._expire(self._time.tick(), at_most)

    def _expire(self, now: int, at_most: int) -> int:
        due = self._deadlines.take_due(now, at_most)
        for lock in due:
            self._forget(lock)
        self.counts.expired += len(due)
        return len(due)

    def _add(self, name: bytes, session: Session, deadline_tick: int) -> None:
        lock = _Lock(name, session, deadline_tick)
        self._by_name[name] = lock
        self._deadlines.add(lock, deadline_tick)
        session.locks += 1
        self.counts.acquired += 1

    def _extend(self, lock: _Lock, deadline_tick: int) -> None:
        if deadline_tick > lock.deadline_tick:
            self._deadlines.move(lock, lock.deadline_tick, deadline_tick)
            lock.deadline_tick = deadline_tick
        self.counts.extended += 1

    def _forget(self, lock: _Lock) -> None:
        del self._by_name[lock.name]
        self._quota.give_back(lock.session.caller)
        self._bytes_quota.give_back(lock.session.caller, len(lock.name))
        lock.session.locks -= 1

    def _forget_free(self, names: Sequence[bytes], now: int) -> None:
        """Forgets those that are remembered but held no longer: of them, another session may be
        about to become the holder, at the cost of its own quota."""
        for name in names:
            lock = self._by_name.get(name)
            if lock is not None and (
                lock.deadline_tick <= now or lock.session.deadline_tick <= now
            ):
                self._deadlines.remove(lock, lock.deadline_tick)
                self._forget(lock)

    def _take_quotas(self, session: Session, fresh: Sequence[bytes], now: int) -> None:
        """Counts these names for the session, after forgetting expired locks if need be. Raises
        `Overloaded` if they are too many, and then counts none.

        `now` is the tick of the whole call: at a later one, a lock could expire here that the call
        names, and then be taken without being counted.
        """
        caller, size = session.caller, sum(map(len, fresh))
        while (
            self._quota.reached(caller, len(fresh)) or self._bytes_quota.reached(caller, size)
        ) and self._expire(now, _EXPIRE_AT_MOST):
            pass
        try:
            self._quota.take(caller, len(fresh))
            try:
                self._bytes_quota.take(caller, size)
            except Overloaded:
                self._quota.give_back(caller, len(fresh))
                raise
        except Overloaded:
            self.counts.refused_full += 1
            raise
