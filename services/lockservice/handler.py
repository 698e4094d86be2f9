"""The lock service's remote procedures: checks requests, then asks the cores.

It knows nothing of sockets, so a simulation calls the same object. `expire_forever` has to run
in a task: it makes time advance (see `LivedTime`), and it forgets what has expired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from percolator.errors import InvalidArgument, Overloaded
from percolator.services.chassis.coordinator import ASK_SECONDS, LivedTime, ticks_of
from percolator.services.chassis.rpc import Quotas, caller_identity
from percolator.services.lockservice.sessions import (
    Deadlines,
    LockServiceLimits,
    OpenSessions,
    Session,
    SessionInfo,
    check_session_id,
)
from percolator.v1 import lockservice_pb2 as pb
from percolator.world import Clock, Random

_RETRY_SECONDS = 1.0
_LOCKS_EXPIRE_AT_MOST = 1_000


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
    """The advisory locks of one lock service. Sessions that are passed in are alive.

    They keep two workers from doing the same work at the same time.

    Invariants:
    - A lock is held exactly while its own deadline lies ahead *and* its session is alive. So the
      end of a session frees all of its locks at once, and costs the same however many they are.
    - No call waits for a lock, and at most one session holds a name.
    - No call shortens the life of a lock that it extends.
    - Memory is bounded by the number of locks and the bytes of their names, whatever callers send.
      A lock that is no longer held is forgotten when its deadline has passed.
    """

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

        Returns for each name whether the session holds it now. If the limit does not allow all of
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
        ) and self._expire(now, _LOCKS_EXPIRE_AT_MOST):
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


_EXPIRE_AT_MOST: Final = 5_000
"""In one slice, which takes a few milliseconds: requests are served between two slices."""
_INCARNATION_BYTES: Final = 8
_NUMBER_BYTES: Final = 8


class LockServiceHandler:
    """`percolator.v1.LockService`."""

    def __init__(
        self,
        clock: Clock,
        random: Random,
        limits: LockServiceLimits,
        quotas: Quotas | None = None,
    ) -> None:
        quotas = quotas or Quotas()
        self._clock = clock
        self._limits = limits
        self._incarnation = random.randbytes(_INCARNATION_BYTES)
        time = LivedTime(clock)
        self.sessions = OpenSessions(time, random, limits, quotas)
        self.locks = HeldLocks(time, limits, quotas)

    async def open_session(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        if request.ttl_may_be_shorter:
            longest = self._limits.ttl_milliseconds_max
            request.info.ttl_milliseconds = min(request.info.ttl_milliseconds, longest)
        info = self._info(request.HasField("info"), request.info)
        return pb.OpenSessionResponse(
            session_id=self.sessions.open(info, caller_identity()).session_id,
            ttl_milliseconds=info.ttl_milliseconds,
        )

    async def renew_session(self, request: pb.RenewSessionRequest) -> pb.RenewSessionResponse:
        check_session_id("session_id", request.session_id)
        info = self._info(request.HasField("info"), request.info)
        self.sessions.require_own(request.session_id, caller_identity())
        taken_over = self.sessions.renew(request.session_id, info, caller_identity())
        return pb.RenewSessionResponse(taken_over=taken_over)

    async def end_session(self, request: pb.EndSessionRequest) -> pb.EndSessionResponse:
        check_session_id("session_id", request.session_id)
        self.sessions.require_own(request.session_id, caller_identity())
        self.sessions.end(request.session_id)
        return pb.EndSessionResponse()

    async def check_sessions(self, request: pb.CheckSessionsRequest) -> pb.CheckSessionsResponse:
        self._limits.check_session_ids(request.session_ids)
        liveness = [self.sessions.liveness(i).value for i in request.session_ids]
        return pb.CheckSessionsResponse(liveness=liveness)

    async def list_sessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        if request.HasField("limits"):
            self.sessions.limit_history(request.limits)
        limits = self._limits
        limit = min(
            limits.page_sessions_max,
            limits.page_activities_max if request.activity else limits.page_sessions_max,
        )
        size = min(request.page_size or limit, limit)
        sessions, more = self.sessions.page(self._number_of_token(request.page_token), size)
        return pb.ListSessionsResponse(
            sessions=[self.describe(one, activity=request.activity) for one in sessions],
            next_page_token=self._token(sessions[-1].number) if more else b"",
            settling=self.sessions.settling,
            ttl_milliseconds_max=self._limits.ttl_milliseconds_max,
        )

    async def try_lock(self, request: pb.TryLockRequest) -> pb.TryLockResponse:
        session, milliseconds = self._check_lock_request(request)
        held = self.locks.try_lock(session, request.names, milliseconds)
        return pb.TryLockResponse(held=held)

    async def renew_locks(self, request: pb.RenewLocksRequest) -> pb.RenewLocksResponse:
        session, milliseconds = self._check_lock_request(request)
        held = self.locks.renew(session, request.names, milliseconds)
        return pb.RenewLocksResponse(held=held)

    async def unlock(self, request: pb.UnlockRequest) -> pb.UnlockResponse:
        check_session_id("session_id", request.session_id)
        self._limits.check_names(request.names)
        self.locks.unlock(self.sessions.find(request.session_id), request.names)
        return pb.UnlockResponse()

    async def expire_forever(self) -> None:
        """Advances time and forgets what has expired, in slices, until cancelled."""
        while True:
            forgotten = self.sessions.expire(_EXPIRE_AT_MOST) + self.locks.expire(_EXPIRE_AT_MOST)
            await self._clock.sleep(0.0 if forgotten else ASK_SECONDS)

    def _info(self, present: bool, info: pb.SessionInfo) -> SessionInfo:
        if not present:
            raise InvalidArgument("info", "is missing")
        self._limits.check_description("info.description", info.description)
        self._limits.check_ttl("info.ttl_milliseconds", info.ttl_milliseconds)
        if info.pin and not info.oldest_start_timestamp:
            raise InvalidArgument("info.oldest_start_timestamp", "is 0; a pin needs one")
        # Kept as bytes: people ask for it seldom, and clients send it every second.
        activity = info.activity.SerializeToString() if info.HasField("activity") else None
        self._limits.check_activity("info.activity", len(activity or b""))
        return SessionInfo(
            description=info.description,
            ttl_milliseconds=info.ttl_milliseconds,
            oldest_start_timestamp=info.oldest_start_timestamp,
            pin=info.pin,
            activity=activity,
        )

    def _check_lock_request(
        self, request: pb.TryLockRequest | pb.RenewLocksRequest
    ) -> tuple[Session, int]:
        """The session, and how long it gets the locks.

        A time above the limit is shortened, not refused: workers go on without locks that are
        refused, so a low limit would have all of them do the same work.
        """
        check_session_id("session_id", request.session_id)
        self._limits.check_names(request.names)
        milliseconds = min(request.ttl_milliseconds, self._limits.ttl_milliseconds_max)
        self._limits.check_ttl("ttl_milliseconds", milliseconds)
        return self.sessions.find(request.session_id), milliseconds

    def describe(self, session: Session, *, activity: bool = False) -> pb.Session:
        stored = session.info.activity if activity else None
        return pb.Session(
            session_id=session.session_id,
            info=pb.SessionInfo(
                description=session.info.description,
                ttl_milliseconds=session.info.ttl_milliseconds,
                oldest_start_timestamp=session.info.oldest_start_timestamp,
                pin=session.info.pin,
                activity=None if stored is None else pb.Activity.FromString(stored),
            ),
            age_milliseconds=self.sessions.age_milliseconds(session),
            remaining_milliseconds=self.sessions.remaining_milliseconds(session),
            locks=session.locks,
            too_old=self.sessions.is_too_old(session.info, session.caller),
        )

    def _token(self, number: int) -> bytes:
        return self._incarnation + number.to_bytes(_NUMBER_BYTES, "big")

    def _number_of_token(self, token: bytes) -> int:
        """Numbers start again after a restart, so an older token would skip sessions."""
        if not token:
            return 0
        incarnation, number = token[:_INCARNATION_BYTES], token[_INCARNATION_BYTES:]
        if incarnation != self._incarnation or len(number) != _NUMBER_BYTES:
            raise InvalidArgument(
                "page_token",
                "is not from this run of the service; start again from the first page",
            )
        return int.from_bytes(number, "big")
