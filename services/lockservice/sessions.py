"""Sessions: which processes are alive, as far as this service can tell.

Invariants:
- A session lives at least its time to live after its last renewal, and at most two ticks longer.
- An id that ended or expired here is never alive again, not even in the grace period after a
  restart.
- No session is declared dead before every session of the previous incarnation would have expired:
  for one largest time to live after the start, an id unknown here is *undecided*.
- A session is declared expired only if that is remembered, so that it cannot be taken over
  later. Without this rule, strangers that fill the memory with invented ids would make the service
  revive sessions that it has declared dead.
- An unknown id is taken over while less time has passed since the start than the time to live that
  its renewal carries. A session that would be dead without the restart is dead with it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from sortedcontainers import SortedDict

from percolator.errors import (
    InvalidArgument,
    NotReady,
    Overloaded,
    PermissionDenied,
    SessionExpired,
    SnapshotTooOld,
)
from percolator.services.chassis.access import CallerIdentity
from percolator.services.chassis.coordinator import LivedTime, milliseconds_between, ticks_of
from percolator.services.chassis.rpc import Quotas
from percolator.timestamps import Timestamp
from percolator.v1.lockservice_pb2 import HistoryLimits
from percolator.wire.liveness import SESSION_ID_BYTES, Liveness
from percolator.wire.roles import Role
from percolator.wire.sessions import ACTIVITY_BYTES_MAX
from percolator.world import Random


@dataclass(frozen=True)
class LockServiceLimits:
    """The limits of one lock service, which together bound its memory.

    They say what a request may contain, and how much the service remembers in total.

    Every check here comes before any change, so a refused request has changed nothing.
    """

    ttl_milliseconds_min: int = 500
    ttl_milliseconds_max: int = 60_000
    sessions_max: int = 100_000
    ended_max: int = 100_000
    """Ids that ended in the grace period after a restart: they must not be revived."""
    locks_max: int = 1_000_000
    lock_name_bytes_total_max: int = 256 * 1024 * 1024
    lock_name_bytes_max: int = 1_024
    description_bytes_max: int = 256
    request_items_max: int = 4_096
    """Lock names or session ids in one request."""
    page_sessions_max: int = 1_000
    activity_bytes_max: int = ACTIVITY_BYTES_MAX
    activity_bytes_total_max: int = 64 * 1024 * 1024
    """When it is reached, activities are left out; sessions are not refused."""
    page_activities_max: int = 100
    """Sessions on a page that shows what they do."""

    def check_ttl(self, field: str, milliseconds: int) -> None:
        """Too short, and it ends before a renewal can arrive; too long, and it outlives a crash."""
        if not self.ttl_milliseconds_min <= milliseconds <= self.ttl_milliseconds_max:
            raise InvalidArgument(
                field,
                f"{milliseconds} ms is outside {self.ttl_milliseconds_min} to "
                f"{self.ttl_milliseconds_max} ms",
            )

    def check_description(self, field: str, description: str) -> None:
        size = len(description.encode())
        if size > self.description_bytes_max:
            raise InvalidArgument(
                field, f"has {size} bytes; at most {self.description_bytes_max} are allowed"
            )

    def check_activity(self, field: str, size: int) -> None:
        if size > self.activity_bytes_max:
            raise InvalidArgument(
                field, f"has {size} bytes; at most {self.activity_bytes_max} are allowed"
            )

    def check_names(self, names: Sequence[bytes]) -> None:
        """Lock names: at least one, not too many, none empty, too long or repeated."""
        self._check_count("names", len(names))
        for index, name in enumerate(names):
            if not 0 < len(name) <= self.lock_name_bytes_max:
                raise InvalidArgument(
                    f"names[{index}]",
                    f"has {len(name)} bytes; expected 1 to {self.lock_name_bytes_max}",
                )
        if len(set(names)) != len(names):
            raise InvalidArgument(f"names[{_first_repetition(names)}]", "appears twice")

    def check_session_ids(self, session_ids: Sequence[bytes]) -> None:
        """Ids to ask about. A repeated id is harmless, so it is allowed."""
        self._check_count("session_ids", len(session_ids))
        for index, session_id in enumerate(session_ids):
            check_session_id(f"session_ids[{index}]", session_id)

    def _check_count(self, field: str, count: int) -> None:
        if not 0 < count <= self.request_items_max:
            raise InvalidArgument(
                field, f"has {count} entries; expected 1 to {self.request_items_max}"
            )


def check_session_id(field: str, session_id: bytes) -> None:
    if len(session_id) != SESSION_ID_BYTES:
        raise InvalidArgument(field, f"has {len(session_id)} bytes; expected {SESSION_ID_BYTES}")


def _first_repetition(names: Sequence[bytes]) -> int:
    seen: set[bytes] = set()
    for index, name in enumerate(names):
        if name in seen:
            return index
        seen.add(name)
    return len(names)


T = TypeVar("T")


class Deadlines(Generic[T]):
    """Things by the tick at which they expire.

    One bucket per tick: adding, moving and removing cost the same however many things there are. A
    thing is in exactly one bucket, so memory is bounded by the number of things, not of renewals.
    Things that expire at the same tick come out in an order that depends only on the calls (buckets
    are dictionaries, not sets), so that a simulation runs the same way every time.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, dict[T, None]] = {}
        # Every bucket's tick, once. An emptied bucket stays until its tick has passed. Otherwise
        # its tick would be pushed again each time the bucket is filled again.
        self._ticks: list[int] = []

    def add(self, thing: T, tick: int) -> None:
        bucket = self._buckets.get(tick)
        if bucket is None:
            bucket = self._buckets[tick] = {}
            heapq.heappush(self._ticks, tick)
        bucket[thing] = None

    def move(self, thing: T, old: int, new: int) -> None:
        self.remove(thing, old)
        self.add(thing, new)

    def remove(self, thing: T, tick: int) -> None:
        del self._buckets[tick][thing]

    def take_due(self, now: int, at_most: int) -> list[T]:
        """Takes out up to `at_most` things that have expired at `now`, earliest first."""
        due: list[T] = []
        while self._ticks and self._ticks[0] <= now:
            bucket = self._buckets[self._ticks[0]]
            while bucket:
                if len(due) >= at_most:
                    return due
                due.append(bucket.popitem()[0])
            del self._buckets[heapq.heappop(self._ticks)]
        return due


_RETRY_SECONDS = 1.0
_EXPIRE_AT_MOST = 1_000


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The description of a session, sent with every renewal."""

    description: str
    ttl_milliseconds: int
    oldest_start_timestamp: int
    pin: bool
    activity: bytes | None = None
    """Activity report of the process, as sent; None if it says nothing, or above the limit."""


@dataclass(slots=True, eq=False)
class Session:
    """One living session. When it ends its deadline becomes tick 0, which frees its locks."""

    session_id: bytes
    number: int
    """Sessions are numbered in the order in which they were opened."""
    info: SessionInfo
    opened_tick: int
    deadline_tick: int
    caller: CallerIdentity
    """The caller that opened it, or took it over."""
    locks: int = 0


@dataclass(slots=True)
class SessionCounts:
    """Totals since the start."""

    opened: int = 0
    renewed: int = 0
    ended: int = 0
    expired: int = 0
    taken_over: int = 0
    refused_expired: int = 0
    refused_full: int = 0
    refused_too_old: int = 0
    ended_too_old: int = 0
    """Pins that were ended because they had become too old."""


class OpenSessions:
    """The living sessions of one lock service."""

    def __init__(
        self, time: LivedTime, random: Random, limits: LockServiceLimits, quotas: Quotas
    ) -> None:
        self._time = time
        self._random = random
        self._limits = limits
        self._quota = quotas.of(
            "sessions",
            "sessions_max",
            limits.sessions_max,
            retry_after_seconds=_RETRY_SECONDS,
        )
        self._history = HistoryLimits()
        self._started_tick = time.tick()
        self._by_id: dict[bytes, Session] = {}
        self._by_number: SortedDict[int, Session] = SortedDict()
        self._deadlines: Deadlines[Session] = Deadlines()
        self._last_number = 0
        self._activity_bytes = 0
        # Ids that ended or expired here, kept for as long as a takeover could revive them.
        self._ended: dict[bytes, CallerIdentity] = {}
        self._ended_quota = quotas.of("ended sessions", "ended_max", limits.ended_max)
        self._takes_over = True
        """False once an id that ended could not be remembered: a takeover could revive it."""
        self._forgetful: set[tuple[bytes, str]] = set()
        """Clients whose sessions are not taken over: ids of theirs could not be remembered, because
        these clients had too many. The sessions of others must not die of that."""
        self.counts = SessionCounts()

    def __len__(self) -> int:
        return len(self._by_id)

    def limit_history(self, limits: HistoryLimits) -> None:
        """Ends the pins that are older than this, and refuses such pins from now on."""
        if limits == self._history:
            return  # sent with each page of a listing
        self._history = limits
        for session in list(self._by_id.values()):
            if session.info.pin and self.is_too_old(session.info, session.caller):
                self._remove(session)
                self.counts.ended_too_old += 1

    def is_too_old(self, info: SessionInfo, caller: CallerIdentity) -> bool:
        """True if a session or pin of this caller needs history that is not kept for it."""
        return 0 < info.oldest_start_timestamp < self._since(caller)

    def open(self, info: SessionInfo, caller: CallerIdentity) -> Session:
        """A new session under a fresh id."""
        if info.pin and self.is_too_old(info, caller):
            self.counts.refused_too_old += 1
            raise SnapshotTooOld(
                self._too_old_text(info, caller),
                timestamp=info.oldest_start_timestamp,
                safe_point=self._since(caller),
            )
        self._take_quota(caller)
        session_id = self._random.randbytes(SESSION_ID_BYTES)
        while session_id in self._by_id or session_id in self._ended:
            session_id = self._random.randbytes(SESSION_ID_BYTES)
        self.counts.opened += 1
        return self._add(session_id, info, caller)

    def require_own(self, session_id: bytes, caller: CallerIdentity) -> None:
        """Raises `PermissionDenied` if a token with rights to some tables only has not opened this
        session: its end would free locks in other tables."""
        session = self._by_id.get(session_id)
        if caller.rights is not None and session is not None and session.caller.name != caller.name:
            raise PermissionDenied(f"the token {caller.name!r} has not opened this session")

    def renew(self, session_id: bytes, info: SessionInfo, caller: CallerIdentity) -> bool:
        """Keeps a session alive. True if it was taken over from before the restart."""
        if info.pin and self.is_too_old(info, caller):
            raise SessionExpired(self._too_old_text(info, caller), session_id=session_id)
        session = self._living(session_id)
        if session is None:
            self._take_over(session_id, info, caller)
            return True
        _check_pin_unchanged(session.info, info)
        self._activity_bytes -= len(session.info.activity or b"")
        session.info = self._within_limits(info)
        deadline_tick = self._time.tick() + ticks_of(info.ttl_milliseconds)
        self._deadlines.move(session, session.deadline_tick, deadline_tick)
        session.deadline_tick = deadline_tick
        self.counts.renewed += 1
        return False

    def end(self, session_id: bytes) -> None:
        """Ends a session. It is no error if it has ended already.

        Raises `NotReady` in the grace period for a session that has not reported yet: if such ends
        were remembered, any caller could fill the memory. The session expires by itself.
        """
        session = self._by_id.get(session_id)
        if session is None:
            if self._is_undecided(session_id):
                raise self._not_heard_yet()
            return
        self._remove(session)
        self.counts.ended += 1

    def find(self, session_id: bytes) -> Session:
        """The living session of this id, for a call that acts in its name."""
        session = self._living(session_id)
        if session is not None:
            return session
        if self._is_undecided(session_id):
            raise self._not_heard_yet()
        raise self._expired(session_id)

    def liveness(self, session_id: bytes) -> Liveness:
        if self._living(session_id) is not None:
            return Liveness.ALIVE
        return Liveness.UNDECIDED if self._is_undecided(session_id) else Liveness.DEAD

    def page(self, after_number: int, at_most: int) -> tuple[list[Session], bool]:
        """Living sessions numbered above `after_number`, oldest first; whether more follow."""
        now = self._time.tick()
        found: list[Session] = []
        for number in self._by_number.irange(after_number, None, inclusive=(False, True)):
            session = self._by_number[number]
            if session.deadline_tick <= now:
                continue
            if len(found) == at_most:
                return found, True
            found.append(session)
        return found, False

    @property
    def settling(self) -> bool:
        """True if sessions of the previous incarnation may still report."""
        return self._is_in_grace()

    def age_milliseconds(self, session: Session) -> int:
        return milliseconds_between(session.opened_tick, self._time.tick())

    def remaining_milliseconds(self, session: Session) -> int:
        return milliseconds_between(self._time.tick(), session.deadline_tick)

    def expire(self, at_most: int) -> int:
        """Forgets up to `at_most` sessions that have expired; returns how many."""
        due = self._deadlines.take_due(self._time.tick(), at_most)
        for session in due:
            self._forget(session)
        self.counts.expired += len(due)
        if self._ended and not self._is_in_grace():
            for caller in self._ended.values():
                self._ended_quota.give_back(caller)
            self._ended.clear()
            self._forgetful.clear()
        return len(due)

    def _living(self, session_id: bytes) -> Session | None:
        session = self._by_id.get(session_id)
        if session is None or session.deadline_tick <= self._time.tick():
            return None
        return session

    def _take_over(self, session_id: bytes, info: SessionInfo, caller: CallerIdentity) -> None:
        if not self._is_undecided(session_id):
            raise self._expired(session_id)
        if not self._is_within(info.ttl_milliseconds) and self._remember_end(session_id, caller):
            # Its owner is told that it expired, so a later renewal that asks for a longer life must
            # not revive it. If its end cannot be remembered, the owner is not told.
            raise self._expired(session_id)
        takes_over = self._takes_over and caller.client not in self._forgetful
        if not takes_over or not self._is_within(info.ttl_milliseconds):
            raise self._not_heard_yet()
        self._take_quota(caller)
        self._add(session_id, info, caller)
        self.counts.taken_over += 1

    def _is_undecided(self, session_id: bytes) -> bool:
        """True if this may be a session of the previous incarnation that has not reported."""
        return (
            session_id not in self._by_id and session_id not in self._ended and self._is_in_grace()
        )

    def _is_within(self, milliseconds: int) -> bool:
        """True if less time has passed since the start."""
        return self._time.tick() < self._started_tick + ticks_of(milliseconds)

    def _is_in_grace(self) -> bool:
        return self._is_within(self._limits.ttl_milliseconds_max)

    def _add(self, session_id: bytes, info: SessionInfo, caller: CallerIdentity) -> Session:
        self._last_number += 1
        now = self._time.tick()
        deadline_tick = now + ticks_of(info.ttl_milliseconds)
        session = Session(
            session_id, self._last_number, self._within_limits(info), now, deadline_tick, caller
        )
        self._by_id[session_id] = session
        self._by_number[session.number] = session
        self._deadlines.add(session, deadline_tick)
        return session

    def _within_limits(self, info: SessionInfo) -> SessionInfo:
        """The part that is kept. An activity above the limit is left out: a session that
        was refused because of it would be declared dead."""
        size = len(info.activity or b"")
        if self._activity_bytes + size > self._limits.activity_bytes_total_max:
            return replace(info, activity=None)
        self._activity_bytes += size
        return info

    def _since(self, caller: CallerIdentity) -> int:
        is_admin = caller.role == Role.ADMIN
        return self._history.admins_since if is_admin else self._history.clients_since

    def _too_old_text(self, info: SessionInfo, caller: CallerIdentity) -> str:
        at, since = Timestamp(info.oldest_start_timestamp), Timestamp(self._since(caller))
        who, setting = "clients", "client_held_seconds_max"
        if caller.role == Role.ADMIN:
            who, setting = "administrators", "admin_held_seconds_max"
        return (
            f"a pin at {at.describe()} is too old: history is kept for pins of {who} from "
            f"{since.describe()} on ({setting} of the master, and the longest retention of a table)"
        )

    def _remove(self, session: Session) -> None:
        self._deadlines.remove(session, session.deadline_tick)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        session.deadline_tick = 0
        self._activity_bytes -= len(session.info.activity or b"")
        self._quota.give_back(session.caller)
        del self._by_id[session.session_id]
        del self._by_number[session.number]
        caller = session.caller
        if self._is_in_grace() and not self._remember_end(session.session_id, caller):
            if caller.client is not None and self._ended_quota.reached(caller) == "client":
                self._forgetful.add(caller.client)
            else:
                self._takes_over = False

    def _remember_end(self, session_id: bytes, caller: CallerIdentity) -> bool:
        """Remembers that a session of this caller has ended, unless a limit is reached."""
        if self._ended_quota.reached(caller):
            return False
        self._ended_quota.take(caller)
        self._ended[session_id] = caller
        return True

    def _take_quota(self, caller: CallerIdentity) -> None:
        """Counts one more session of the caller, after forgetting expired ones if need be."""
        while self._quota.reached(caller) and self.expire(_EXPIRE_AT_MOST):
            pass
        try:
            self._quota.take(caller)
        except Overloaded:
            self.counts.refused_full += 1
            raise

    def _not_heard_yet(self) -> NotReady:
        return NotReady(
            "the lock service restarted and has not heard from this session yet; renew it",
            retry_after_seconds=_RETRY_SECONDS,
        )

    def _expired(self, session_id: bytes) -> SessionExpired:
        self.counts.refused_expired += 1
        return SessionExpired(
            f"session {session_id.hex()} ended or was not renewed in time", session_id=session_id
        )


def _check_pin_unchanged(old: SessionInfo, new: SessionInfo) -> None:
    """If a pin moved, history that its owner relies on would be given up."""
    if old.pin != new.pin:
        raise InvalidArgument("info.pin", f"was {old.pin} when the session was opened")
    if new.pin and old.oldest_start_timestamp != new.oldest_start_timestamp:
        raise InvalidArgument(
            "info.oldest_start_timestamp",
            f"is {new.oldest_start_timestamp}; the pin was set at {old.oldest_start_timestamp}",
        )
