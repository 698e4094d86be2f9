"""The lock service's remote procedures: checks requests, then asks the cores.

It knows nothing of sockets, so a simulation calls the same object. `expire_forever` has to run
beside it: it makes time advance (see `LivedTime`), and it forgets what has expired.
"""

from __future__ import annotations

from typing import Final

from percolator.errors import InvalidArgument
from percolator.services.chassis.lived_time import ASK_SECONDS, LivedTime
from percolator.services.chassis.serving.quotas import Quotas
from percolator.services.chassis.serving.rpc import caller_identity
from percolator.services.lockservice.advisory_locks import HeldLocks
from percolator.services.lockservice.limits import LockServiceLimits, check_session_id
from percolator.services.lockservice.sessions import OpenSessions, Session, SessionInfo
from percolator.v1 import lockservice_pb2 as pb
from percolator.world import Clock, Random

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
        taken_over = self.sessions.renew(request.session_id, info, caller_identity())
        return pb.RenewSessionResponse(taken_over=taken_over)

    async def end_session(self, request: pb.EndSessionRequest) -> pb.EndSessionResponse:
        check_session_id("session_id", request.session_id)
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
        session = self._check_lock_request(request)
        held = self.locks.try_lock(session, request.names, request.ttl_milliseconds)
        return pb.TryLockResponse(held=held)

    async def renew_locks(self, request: pb.RenewLocksRequest) -> pb.RenewLocksResponse:
        session = self._check_lock_request(request)
        held = self.locks.renew(session, request.names, request.ttl_milliseconds)
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

    def _check_lock_request(self, request: pb.TryLockRequest | pb.RenewLocksRequest) -> Session:
        check_session_id("session_id", request.session_id)
        self._limits.check_names(request.names)
        self._limits.check_ttl("ttl_milliseconds", request.ttl_milliseconds)
        return self.sessions.find(request.session_id)

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
