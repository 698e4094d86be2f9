"""Requests to the lock service, good and bad, on virtual time.

What sessions say of their processes is listed for those who ask, and never harms a session.

What the lock service does not know after a restart or a pause, and how it behaves then.
"""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import pytest
from prometheus_client import CollectorRegistry

from percolator.errors import (
    InvalidArgument,
    NotReady,
    Overloaded,
    PermissionDenied,
    SessionExpired,
    SnapshotTooOld,
)
from percolator.services.chassis import rpc
from percolator.services.chassis.access import CallerIdentity
from percolator.services.chassis.coordinator import LivedTime
from percolator.services.chassis.rpc import Quotas
from percolator.services.chassis.settings import load
from percolator.services.lockservice.handler import HeldLocks, LockServiceHandler
from percolator.services.lockservice.service import LockServiceMetrics, LockServiceSettings
from percolator.services.lockservice.sessions import LockServiceLimits, Session, SessionInfo
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire.roles import Role
from percolator.wire.tokens import Rights
from tests import restricted
from tests.patching import in_place_of
from tests.simulation.virtual_time import VirtualClock
from tests.unit.lockservice.test_lockservice_model import HandMovedClock
from tests.unit.refusals import refused

# Short names for the calls that the tests of the lock service make.

UNKNOWN_ID = b"sixteen bytes id"
Call = Callable[[LockServiceHandler], Awaitable[object]]


@asynccontextmanager
async def started_lock_service(
    limits: LockServiceLimits | None = None,
) -> AsyncIterator[LockServiceHandler]:
    """A lock service that has just started."""
    clock = VirtualClock(asyncio.get_running_loop())
    handler = LockServiceHandler(clock, random.Random(1), limits or LockServiceLimits())
    living = asyncio.create_task(handler.expire_forever())
    try:
        yield handler
    finally:
        living.cancel()


@pytest.fixture
def started() -> AbstractAsyncContextManager[LockServiceHandler]:
    """A lock service that has just started."""
    return started_lock_service()


@asynccontextmanager
async def lock_service(
    limits: LockServiceLimits | None = None,
) -> AsyncIterator[LockServiceHandler]:
    """A lock service whose grace period after the start is over."""
    async with started_lock_service(limits) as handler:
        await asyncio.sleep(61)
        yield handler


@pytest.fixture
def handler() -> AbstractAsyncContextManager[LockServiceHandler]:
    """A lock service whose grace period is over."""
    return lock_service()


@contextmanager
def called_by(caller: CallerIdentity) -> Iterator[None]:
    """Calls in this block are those of this caller."""
    token = rpc._caller.set(caller)
    try:
        yield
    finally:
        rpc._caller.reset(token)


def info(
    ttl_milliseconds: int = 3_000,
    description: str = "a test",
    oldest_start_timestamp: int = 0,
    pin: bool = False,
) -> pb.SessionInfo:
    return pb.SessionInfo(
        description=description,
        ttl_milliseconds=ttl_milliseconds,
        oldest_start_timestamp=oldest_start_timestamp,
        pin=pin,
    )


async def opened(handler: LockServiceHandler, about: pb.SessionInfo | None = None) -> bytes:
    response = await handler.open_session(pb.OpenSessionRequest(info=about or info()))
    return response.session_id


async def renewed(
    handler: LockServiceHandler, session_id: bytes, about: pb.SessionInfo | None = None
) -> bool:
    request = pb.RenewSessionRequest(session_id=session_id, info=about or info())
    return (await handler.renew_session(request)).taken_over


async def liveness(handler: LockServiceHandler, session_id: bytes) -> int:
    request = pb.CheckSessionsRequest(session_ids=[session_id])
    return (await handler.check_sessions(request)).liveness[0]


async def locked(
    handler: LockServiceHandler, session_id: bytes, *names: bytes, ttl_milliseconds: int = 3_000
) -> list[bool]:
    request = pb.TryLockRequest(
        session_id=session_id, names=names, ttl_milliseconds=ttl_milliseconds
    )
    return list((await handler.try_lock(request)).held)


async def listed(handler: LockServiceHandler, page_size: int = 0) -> list[pb.Session]:
    sessions: list[pb.Session] = []
    request = pb.ListSessionsRequest(page_size=page_size)
    while True:
        page = await handler.list_sessions(request)
        sessions += page.sessions
        if not page.next_page_token:
            return sessions
        request.page_token = page.next_page_token


# Sessions


async def test_a_session_lives_while_it_is_renewed_and_dies_one_ttl_later(
    handler: LockServiceHandler,
) -> None:
    session_id = await opened(handler)
    for _ in range(10):
        await asyncio.sleep(2.9)
        assert not await renewed(handler, session_id)
    await asyncio.sleep(2.99)
    assert await liveness(handler, session_id) == pb.LIVENESS_ALIVE
    await asyncio.sleep(0.04)
    assert await liveness(handler, session_id) == pb.LIVENESS_DEAD
    with pytest.raises(SessionExpired) as caught:
        await renewed(handler, session_id)
    assert caught.value.session_id == session_id


async def test_an_expired_session_is_forgotten_even_if_no_call_asks_for_it(
    handler: LockServiceHandler,
) -> None:
    await locked(handler, await opened(handler), b"a", b"b")
    await asyncio.sleep(3.2)
    assert (len(handler.sessions), len(handler.locks)) == (0, 0)


async def test_a_renewal_replaces_what_the_session_says_about_itself(
    handler: LockServiceHandler,
) -> None:
    await renewed(handler, await opened(handler), info(10_000, "renamed", 77))
    await asyncio.sleep(1)
    (session,) = await listed(handler)
    assert (session.info, session.age_milliseconds) == (info(10_000, "renamed", 77), 1_000)
    assert 9_000 <= session.remaining_milliseconds <= 9_020


async def test_the_timestamp_of_a_pin_never_changes(handler: LockServiceHandler) -> None:
    pin = info(oldest_start_timestamp=42, pin=True)
    session_id = await opened(handler, pin)
    for other, field in (
        (info(oldest_start_timestamp=43, pin=True), "info.oldest_start_timestamp"),
        (info(oldest_start_timestamp=0, pin=True), "info.oldest_start_timestamp"),
        (info(oldest_start_timestamp=42, pin=False), "info.pin"),
    ):
        with refused(field):
            await renewed(handler, session_id, other)
    assert not await renewed(handler, session_id, pin)
    assert (await listed(handler))[0].info == pin


async def test_sessions_are_listed_by_pages_oldest_first(handler: LockServiceHandler) -> None:
    ids = [await opened(handler, info(description=str(n))) for n in range(7)]
    await handler.end_session(pb.EndSessionRequest(session_id=ids.pop(3)))
    for page_size in (0, 1, 2, 6, 7, 1_000_000):
        assert [s.session_id for s in await listed(handler, page_size)] == ids


async def test_a_session_that_ends_between_two_pages_hides_no_other(
    handler: LockServiceHandler,
) -> None:
    ids = [await opened(handler) for _ in range(4)]
    first = await handler.list_sessions(pb.ListSessionsRequest(page_size=2))
    await handler.end_session(pb.EndSessionRequest(session_id=ids[1]))
    rest = await handler.list_sessions(pb.ListSessionsRequest(page_token=first.next_page_token))
    assert [session.session_id for session in rest.sessions] == ids[2:]


async def test_every_page_tells_how_long_any_session_may_live() -> None:
    async with lock_service(LockServiceLimits(ttl_milliseconds_max=7_000)) as handler:
        empty = await handler.list_sessions(pb.ListSessionsRequest())
        assert empty.ttl_milliseconds_max == 7_000


# Locks


async def test_of_two_sessions_one_gets_the_lock_and_the_other_does_not_wait(
    handler: LockServiceHandler,
) -> None:
    one, other = await opened(handler), await opened(handler)
    assert await locked(handler, one, b"a", b"b") == [True, True]
    assert await locked(handler, other, b"b", b"c") == [False, True]
    assert await locked(handler, one, b"a", b"c") == [True, False]
    assert [session.locks for session in await listed(handler)] == [2, 1]


async def test_a_lock_that_lapsed_is_not_renewed_even_if_no_other_session_took_it() -> None:
    """Its holder may have been told meanwhile that another worker is there."""
    clock = VirtualClock(asyncio.get_running_loop())
    handler = LockServiceHandler(clock, random.Random(1), LockServiceLimits())
    one, other = await opened(handler, info(60_000)), await opened(handler, info(60_000))
    await locked(handler, one, b"a", ttl_milliseconds=500)
    for _ in range(6):  # time passes, but what has expired is not collected yet
        await asyncio.sleep(0.1)
        await liveness(handler, one)
    request = pb.RenewLocksRequest(session_id=one, names=[b"a"], ttl_milliseconds=3_000)
    assert list((await handler.renew_locks(request)).held) == [False]
    assert await locked(handler, other, b"a") == [True]
    assert [session.locks for session in await listed(handler)] == [0, 1]


@pytest.mark.parametrize(
    "limits",
    [LockServiceLimits(locks_max=3), LockServiceLimits(lock_name_bytes_total_max=3)],
    ids=["count", "bytes"],
)
async def test_if_there_is_no_room_for_all_locks_none_is_taken(limits: LockServiceLimits) -> None:
    async with lock_service(limits) as handler:
        one = await opened(handler, info(60_000))
        await locked(handler, one, b"a", b"b", ttl_milliseconds=500)
        with pytest.raises(Overloaded):
            await locked(handler, one, b"a", b"c", b"d")
        assert len(handler.locks) == 2
        assert await locked(handler, one, b"a", b"c") == [True, True]
        await asyncio.sleep(0.53)
        # "b" has lapsed, which makes room.
        assert await locked(handler, one, b"d") == [True]


# Quotas

GREEDY = CallerIdentity(Role.CLIENT, (b"a token", "192.0.2.1"))
OTHER = CallerIdentity(Role.CLIENT, (b"another", "192.0.2.1"))
ADMIN = CallerIdentity(Role.ADMIN)


async def test_one_client_leaves_sessions_for_others_and_keeps_its_own_alive() -> None:
    async with lock_service(LockServiceLimits(sessions_max=10)) as handler:
        with called_by(GREEDY):
            sessions = [await opened(handler) for _ in range(5)]
            with pytest.raises(Overloaded, match=r"5 sessions .*client_quota_percent"):
                await opened(handler)
            await handler.renew_session(pb.RenewSessionRequest(session_id=sessions[0], info=info()))
        for caller in (OTHER, ADMIN):
            with called_by(caller):
                await opened(handler)
        with called_by(GREEDY):
            await handler.end_session(pb.EndSessionRequest(session_id=sessions[1]))
            await opened(handler)
        await asyncio.sleep(60)
        assert len(handler.sessions) == 0
        with called_by(GREEDY):
            for _ in range(5):
                await opened(handler)


async def test_one_client_leaves_locks_and_the_memory_of_their_names_for_others() -> None:
    limits = LockServiceLimits(locks_max=10, lock_name_bytes_total_max=100)
    async with lock_service(limits) as handler:
        with called_by(GREEDY):
            one, two = await opened(handler), await opened(handler)
            assert all(await locked(handler, one, b"a", b"b", b"c"))
            with pytest.raises(Overloaded, match=r"5 locks .*client_quota_percent"):
                await locked(handler, two, b"d", b"e", b"f")
            assert await locked(handler, two, b"a", b"d", b"e") == [False, True, True]
            await handler.unlock(pb.UnlockRequest(session_id=two, names=[b"d", b"e"]))
            with pytest.raises(Overloaded, match="50 bytes of lock names"):
                await locked(handler, two, b"n" * 48)
        with called_by(OTHER):
            other = await opened(handler)
            assert all(await locked(handler, other, b"n" * 48))
            assert await locked(handler, other, b"a") == [False]
            with called_by(GREEDY):
                await handler.end_session(pb.EndSessionRequest(session_id=one))
            assert await locked(handler, other, b"a") == [True], "it counts for the other now"
        with called_by(GREEDY):
            assert all(await locked(handler, two, b"f", b"g", b"h"))


def test_a_lock_that_expires_while_a_quota_is_used_up_is_counted_when_it_is_taken_again() -> None:
    class PassingTime(LivedTime):
        ticks: Iterator[int]

        def tick(self) -> int:
            return next(self.ticks)

    time = PassingTime(HandMovedClock())
    locks = HeldLocks(time, LockServiceLimits(locks_max=2), Quotas(100, 100))
    about = SessionInfo("a test", 3_000, 0, pin=False)
    session = Session(UNKNOWN_ID, 1, about, 0, 1_000, GREEDY)
    time.ticks = iter([0])
    assert locks.try_lock(session, [b"a", b"b"], 100) == [True, True]
    time.ticks = iter([10, 11])  # they expire at 11
    with pytest.raises(Overloaded):
        locks.try_lock(session, [b"b", b"c"], 100)
    time.ticks = iter([12, 13])
    assert locks.try_lock(session, [b"b", b"c"], 100) == [True, True]
    locks.unlock(session, [b"b", b"c"])
    assert (len(locks), locks.name_bytes) == (0, 0)


# History

T = 1_000 << 18
LIMITED = pb.ListSessionsRequest(limits=pb.HistoryLimits(clients_since=T, admins_since=T // 2))


async def test_a_pin_that_is_too_old_is_refused_with_its_limit_and_setting(
    handler: LockServiceHandler,
) -> None:
    old = info(oldest_start_timestamp=T - 1, pin=True)
    with called_by(GREEDY):
        kept = await opened(handler, old)
        await handler.list_sessions(LIMITED)
        with pytest.raises(SnapshotTooOld, match="client_held_seconds_max") as caught:
            await opened(handler, old)
        assert (caught.value.timestamp, caught.value.safe_point) == (T - 1, T)
        # The one that was set before has ended, and its holder is told why.
        assert await liveness(handler, kept) == pb.LIVENESS_DEAD
        with pytest.raises(SessionExpired, match=r"too old.*client_held_seconds_max"):
            await handler.renew_session(pb.RenewSessionRequest(session_id=kept, info=old))
        await opened(handler, info(oldest_start_timestamp=T, pin=True))
    with called_by(ADMIN):
        await opened(handler, old)
        with pytest.raises(SnapshotTooOld, match="admin_held_seconds_max"):
            await opened(handler, info(oldest_start_timestamp=T // 2 - 1, pin=True))
    assert handler.sessions.counts.ended_too_old == 1
    assert handler.sessions.counts.refused_too_old == 2


async def test_a_pin_that_has_become_too_old_is_not_taken_over_after_a_restart(
    started: LockServiceHandler,
) -> None:
    await started.list_sessions(LIMITED)
    old = info(60_000, oldest_start_timestamp=T - 1, pin=True)
    with called_by(GREEDY), pytest.raises(SessionExpired, match="too old"):
        await started.renew_session(pb.RenewSessionRequest(session_id=UNKNOWN_ID, info=old))


async def test_an_ordinary_session_lives_on_when_its_transactions_are_too_old(
    handler: LockServiceHandler,
) -> None:
    """It may hold locks, and others ask whether it is alive."""
    with called_by(GREEDY):
        session_id = await opened(handler, info(oldest_start_timestamp=T - 1))
        recent = await opened(handler, info(oldest_start_timestamp=T))
        told = (await handler.list_sessions(LIMITED)).sessions
        assert {one.session_id: one.too_old for one in told} == {
            session_id: True,
            recent: False,
        }
        await handler.renew_session(pb.RenewSessionRequest(session_id=session_id, info=info()))
    (told_again, _) = (await handler.list_sessions(LIMITED)).sessions
    assert not told_again.too_old


# Bad input


BAD_INFO = [
    (info(ttl_milliseconds=0), "info.ttl_milliseconds"),
    (info(ttl_milliseconds=499), "info.ttl_milliseconds"),
    (info(ttl_milliseconds=60_001), "info.ttl_milliseconds"),
    (info(description="é" * 129), "info.description"),
    (info(pin=True), "info.oldest_start_timestamp"),
]


@pytest.mark.parametrize(("bad", "field"), BAD_INFO)
async def test_an_invalid_session_is_refused_by_the_name_of_the_field(
    handler: LockServiceHandler, bad: pb.SessionInfo, field: str
) -> None:
    session_id = await opened(handler)
    before = await listed(handler)
    for telling in (opened(handler, bad), renewed(handler, session_id, bad)):
        with refused(field):
            await telling
    assert await listed(handler) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda handler: handler.open_session(pb.OpenSessionRequest()),
        lambda handler: handler.renew_session(pb.RenewSessionRequest(session_id=UNKNOWN_ID)),
    ],
    ids=["open", "renew"],
)
async def test_info_is_required(handler: LockServiceHandler, call: Call) -> None:
    with pytest.raises(InvalidArgument, match="info: is missing"):
        await call(handler)


BAD_NAMES = [
    ([], "names"),
    ([b"n%d" % n for n in range(4_097)], "names"),
    ([b"a", b""], "names[1]"),
    ([b"a" * 1_024, b"a" * 1_025], "names[1]"),
    ([b"a", b"b", b"a"], "names[2]"),
]


@pytest.mark.parametrize(
    ("names", "field"), BAD_NAMES, ids=["none", "too many", "empty", "too long", "twice"]
)
async def test_invalid_names_are_refused_and_nothing_changes(
    handler: LockServiceHandler, names: list[bytes], field: str
) -> None:
    session_id = await opened(handler)
    await locked(handler, session_id, b"a")
    for call in (
        handler.try_lock(
            pb.TryLockRequest(session_id=session_id, names=names, ttl_milliseconds=3_000)
        ),
        handler.renew_locks(
            pb.RenewLocksRequest(session_id=session_id, names=names, ttl_milliseconds=3_000)
        ),
        handler.unlock(pb.UnlockRequest(session_id=session_id, names=names)),
    ):
        with refused(field):
            await call
    assert [session.locks for session in await listed(handler)] == [1]


@pytest.mark.parametrize("ttl_milliseconds", [60_001, 2**32 - 1])
async def test_a_lock_for_longer_than_is_allowed_is_held_as_long_as_is_allowed(
    handler: LockServiceHandler, ttl_milliseconds: int
) -> None:
    about = info(ttl_milliseconds=60_000)
    first = await opened(handler, about)
    assert await locked(handler, first, b"a", ttl_milliseconds=ttl_milliseconds) == [True]
    await asyncio.sleep(50)
    await renewed(handler, first, about)
    second = await opened(handler)
    assert await locked(handler, second, b"a") == [False]
    await asyncio.sleep(11)
    second = await opened(handler)
    assert await locked(handler, second, b"a") == [True]


@pytest.mark.parametrize("session_id", [b"", b"short", b"x" * 17])
async def test_an_id_of_the_wrong_length_is_refused_everywhere(
    handler: LockServiceHandler, session_id: bytes
) -> None:
    for call in (
        handler.renew_session(pb.RenewSessionRequest(session_id=session_id, info=info())),
        handler.end_session(pb.EndSessionRequest(session_id=session_id)),
        handler.try_lock(pb.TryLockRequest(session_id=session_id)),
        handler.renew_locks(pb.RenewLocksRequest(session_id=session_id)),
        handler.unlock(pb.UnlockRequest(session_id=session_id)),
    ):
        with refused("session_id"):
            await call
    with refused("session_ids[1]"):
        await handler.check_sessions(pb.CheckSessionsRequest(session_ids=[UNKNOWN_ID, session_id]))


def checked(*session_ids: bytes) -> Call:
    return lambda handler: handler.check_sessions(pb.CheckSessionsRequest(session_ids=session_ids))


def paged(token: bytes) -> Call:
    return lambda handler: handler.list_sessions(pb.ListSessionsRequest(page_token=token))


async def locked_for(handler: LockServiceHandler, ttl_milliseconds: int) -> None:
    await locked(handler, await opened(handler), b"a", ttl_milliseconds=ttl_milliseconds)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        pytest.param("session_ids", checked(), id="a liveness check of no session"),
        pytest.param("session_ids", checked(*[UNKNOWN_ID] * 4_097), id="of too many"),
        pytest.param("ttl_milliseconds", lambda it: locked_for(it, 0), id="no time to live"),
        pytest.param("ttl_milliseconds", lambda it: locked_for(it, 499), id="too short a one"),
        *(
            pytest.param("page_token", paged(token), id=f"an invented token of {len(token)}")
            for token in (b"x", b"x" * 16, b"x" * 4_000)
        ),
        pytest.param(
            "100 ms is outside 500 to 60000 ms", lambda it: opened(it, info(100)), id="its unit"
        ),
    ],
)
async def test_what_is_outside_its_limits_is_refused_by_name_and_takes_no_lock(
    handler: LockServiceHandler, field: str, call: Call
) -> None:
    with pytest.raises(InvalidArgument, match=field):
        await call(handler)
    assert len(handler.locks) == 0


async def test_a_session_that_is_not_alive_can_lock_nothing(handler: LockServiceHandler) -> None:
    unlock = handler.unlock(pb.UnlockRequest(session_id=UNKNOWN_ID, names=[b"a"]))
    for call in (locked(handler, UNKNOWN_ID, b"a"), unlock):
        with pytest.raises(SessionExpired):
            await call


async def test_a_page_token_of_an_earlier_run_is_refused() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    earlier = LockServiceHandler(clock, random.Random(1), LockServiceLimits())
    await opened(earlier)
    await opened(earlier)
    page = await earlier.list_sessions(pb.ListSessionsRequest(page_size=1))
    later = LockServiceHandler(clock, random.Random(2), LockServiceLimits())
    with pytest.raises(InvalidArgument, match="page_token"):
        await later.list_sessions(pb.ListSessionsRequest(page_token=page.next_page_token))


async def test_requests_are_served_while_very_many_sessions_are_forgotten(
    handler: LockServiceHandler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expire = handler.sessions.expire
    seen_by_requests: list[int] = []

    @in_place_of(monkeypatch, handler.sessions, "expire")
    def expire_and_be_asked(at_most: int) -> int:
        forgotten = expire(at_most)
        if forgotten:
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: seen_by_requests.append(len(handler.sessions)))
        return forgotten

    for _ in range(12_000):
        await opened(handler, info(500))
    await asyncio.sleep(1)
    assert seen_by_requests == [7_000, 2_000, 0]


async def test_the_metrics_show_which_limit_refused() -> None:
    async with lock_service(LockServiceLimits(sessions_max=1, locks_max=1)) as handler:
        session_id = await opened(handler)
        for refusal in (opened(handler), locked(handler, session_id, b"a", b"b")):
            with pytest.raises(Overloaded) as caught:
                await refusal
            assert caught.value.retry_after_seconds > 0
        with pytest.raises(SessionExpired):
            await locked(handler, UNKNOWN_ID, b"a")
        await locked(handler, session_id, b"a")
        registry = CollectorRegistry()
        registry.register(LockServiceMetrics(handler))
        name = "percolator_lockservice_refused_total"
        for reason in ("sessions_full", "locks_full", "session_expired"):
            assert registry.get_sample_value(name, {"reason": reason}) == 1
        assert registry.get_sample_value("percolator_lockservice_sessions") == 1
        assert registry.get_sample_value("percolator_lockservice_locks") == 1


def _busy(commits: int, column: bytes = b"stock") -> pb.SessionInfo:
    about = info()
    about.activity.CopyFrom(
        pb.Activity(
            commits=commits,
            cells=[pb.ContendedCell(table_id=7, row=b"tea", column=column, conflicts=2)],
        )
    )
    return about


async def _activities(handler: LockServiceHandler) -> list[int | None]:
    page = await handler.list_sessions(pb.ListSessionsRequest(activity=True))
    return [
        one.info.activity.commits if one.info.HasField("activity") else None
        for one in page.sessions
    ]


async def test_the_newest_activity_is_listed_for_those_who_ask_and_for_no_others(
    handler: LockServiceHandler,
) -> None:
    session_id = await opened(handler, _busy(1))
    await opened(handler)
    assert await _activities(handler) == [1, None]
    await renewed(handler, session_id, _busy(2))
    for _ in range(2):
        assert await _activities(handler) == [2, None]
    assert [one.info for one in await listed(handler)] == [info(), info()]


async def test_an_activity_that_is_too_large_is_refused_by_name_and_changes_nothing() -> None:
    async with lock_service(LockServiceLimits(activity_bytes_max=100)) as handler:
        session_id = await opened(handler, _busy(1))
        with refused("info.activity"):
            await renewed(handler, session_id, _busy(2, column=b"c" * 200))
        assert await _activities(handler) == [1]


async def test_without_room_for_activities_sessions_live_on_and_say_nothing() -> None:
    size = len(_busy(1).activity.SerializeToString())
    async with lock_service(LockServiceLimits(activity_bytes_total_max=2 * size)) as handler:
        first, second, third = [await opened(handler, _busy(1)) for _ in range(3)]
        assert await _activities(handler) == [1, 1, None]
        await handler.end_session(pb.EndSessionRequest(session_id=first))
        assert not await renewed(handler, second, _busy(2))
        assert not await renewed(handler, third, _busy(3))
        assert await _activities(handler) == [2, 3]


async def test_pages_with_activities_are_shorter() -> None:
    limits = LockServiceLimits(page_activities_max=2)
    async with lock_service(limits) as handler:
        for _ in range(3):
            await opened(handler, _busy(1))
        page = await handler.list_sessions(pb.ListSessionsRequest(page_size=3, activity=True))
        assert len(page.sessions) == 2
        assert page.next_page_token
        assert len(await listed(handler, page_size=3)) == 3


async def test_after_a_restart_a_session_is_taken_over_under_its_id_without_its_locks(
    started: LockServiceHandler,
) -> None:
    with pytest.raises(NotReady):
        await locked(started, UNKNOWN_ID, b"a")
    assert await renewed(started, UNKNOWN_ID)
    assert await liveness(started, UNKNOWN_ID) == pb.LIVENESS_ALIVE
    assert [session.locks for session in await listed(started)] == [0]
    assert not await renewed(started, UNKNOWN_ID)
    assert await locked(started, UNKNOWN_ID, b"a") == [True]


async def test_a_session_that_would_have_expired_anyway_is_not_taken_over(
    started: LockServiceHandler,
) -> None:
    await asyncio.sleep(3.1)
    for about in (info(3_000), info(10_000)):
        with pytest.raises(SessionExpired):
            await renewed(started, UNKNOWN_ID, about)
    assert await renewed(started, b"another sessions", info(10_000))


@pytest.mark.parametrize("ended", [True, False])
async def test_a_session_that_died_after_the_restart_is_not_revived_in_the_grace_period(
    started: LockServiceHandler,
    ended: bool,
) -> None:
    session_id = await opened(started, info(500))
    if ended:
        await started.end_session(pb.EndSessionRequest(session_id=session_id))
    else:
        await asyncio.sleep(0.6)
    with pytest.raises(SessionExpired):
        await renewed(started, session_id, info(60_000))
    assert await liveness(started, session_id) == pb.LIVENESS_DEAD


async def test_the_end_of_a_session_that_has_not_reported_yet_is_not_promised(
    started: LockServiceHandler,
) -> None:
    """It expires by itself. If its end were remembered, any caller could fill the memory."""
    with pytest.raises(NotReady):
        await started.end_session(pb.EndSessionRequest(session_id=UNKNOWN_ID))
    assert await renewed(started, UNKNOWN_ID)
    await started.end_session(pb.EndSessionRequest(session_id=UNKNOWN_ID))
    await started.end_session(pb.EndSessionRequest(session_id=UNKNOWN_ID))
    with pytest.raises(SessionExpired):
        await renewed(started, UNKNOWN_ID)
    assert await liveness(started, UNKNOWN_ID) == pb.LIVENESS_DEAD


async def test_a_token_with_rights_to_some_tables_ends_and_renews_only_its_own_sessions() -> None:
    async with started_lock_service() as handler:
        theirs = await opened(handler)
        with restricted.token(Rights()):
            own = await opened(handler)
            for call in (renewed(handler, theirs), ended(handler, theirs)):
                with pytest.raises(PermissionDenied, match="has not opened this session"):
                    await call
            assert not await renewed(handler, own)
            await ended(handler, own)
        assert await liveness(handler, theirs) == pb.LIVENESS_ALIVE
        assert await liveness(handler, own) != pb.LIVENESS_ALIVE


async def ended(handler: LockServiceHandler, session_id: bytes) -> None:
    await handler.end_session(pb.EndSessionRequest(session_id=session_id))


async def test_strangers_with_invented_ids_end_no_living_session() -> None:
    async with started_lock_service(LockServiceLimits(ended_max=3)) as handler:
        await asyncio.sleep(2)
        told = set()
        for number in range(10):
            invented = number.to_bytes(16, "big")
            with pytest.raises(NotReady):
                await handler.end_session(pb.EndSessionRequest(session_id=invented))
            with pytest.raises((SessionExpired, NotReady)) as caught:
                await renewed(handler, invented, info(500))
            told.add(caught.type)
            if caught.type is NotReady:
                assert await liveness(handler, invented) == pb.LIVENESS_UNDECIDED
        assert told == {SessionExpired, NotReady}, "the memory was filled"
        assert await renewed(handler, UNKNOWN_ID)
        assert await liveness(handler, UNKNOWN_ID) == pb.LIVENESS_ALIVE


async def test_when_the_dead_cannot_all_be_remembered_no_session_is_taken_over() -> None:
    async with started_lock_service(LockServiceLimits(ended_max=1)) as handler:
        remembered, forgotten = await opened(handler), await opened(handler)
        for session_id in (remembered, forgotten):
            await handler.end_session(pb.EndSessionRequest(session_id=session_id))
        with pytest.raises(SessionExpired):
            await renewed(handler, remembered)
        for session_id in (forgotten, UNKNOWN_ID):
            with pytest.raises(NotReady):
                await renewed(handler, session_id)
        await asyncio.sleep(61)
        for session_id in (remembered, forgotten, UNKNOWN_ID):
            with pytest.raises(SessionExpired):
                await renewed(handler, session_id)


async def test_who_ends_very_many_sessions_keeps_no_others_from_being_taken_over() -> None:
    async with started_lock_service(LockServiceLimits(ended_max=10)) as handler:
        with restricted.token(Rights()):
            ends = [await opened(handler) for _ in range(11)]
            for session_id in ends:
                await ended(handler, session_id)
        with restricted.token(Rights(), "another"):
            assert await renewed(handler, UNKNOWN_ID)
        with restricted.token(Rights()):
            for session_id in ends[:5]:
                with pytest.raises(SessionExpired):
                    await renewed(handler, session_id)
            for session_id in (*ends[5:], b"invented".ljust(16)):
                with pytest.raises(NotReady):
                    await renewed(handler, session_id)


async def test_the_dead_are_forgotten_when_no_session_can_be_taken_over_any_more(
    started: LockServiceHandler,
) -> None:
    """Otherwise the memory used after one restart would be kept until the next."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(2_000):
        await started.end_session(pb.EndSessionRequest(session_id=await opened(started)))
    await asyncio.sleep(59)
    kept = tracemalloc.get_traced_memory()[0] - before
    await asyncio.sleep(2)
    left = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert left < kept / 4


async def test_a_pause_of_the_process_counts_against_no_session() -> None:
    async with lock_service() as handler:
        session_id = await opened(handler)
        await asyncio.sleep(1)

    # Nothing of the service runs for an hour, as if the process were stopped.
    await asyncio.sleep(3_600)
    living = asyncio.create_task(handler.expire_forever())
    assert await liveness(handler, session_id) == pb.LIVENESS_ALIVE
    await asyncio.sleep(1.7)
    assert await liveness(handler, session_id) == pb.LIVENESS_ALIVE
    await asyncio.sleep(0.2)
    assert await liveness(handler, session_id) == pb.LIVENESS_DEAD
    living.cancel()


# The settings of the lock service: defaults, and values that are refused.


def test_without_flags_it_has_the_default_limits() -> None:
    assert load(LockServiceSettings, [], {}).limits() == LockServiceLimits()


def test_every_setting_reaches_the_cores() -> None:
    flags = {
        "ttl_milliseconds_min": 600,
        "ttl_milliseconds_max": 700,
        "sessions_max": 8,
        "locks_max": 9,
        "lock_name_bytes_total_max": 2_000,
        "request_items_max": 10,
        "page_sessions_max": 11,
    }
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    assert load(LockServiceSettings, argv, {}).limits() == LockServiceLimits(**flags)


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--ttl-milliseconds-min=499", "ttl_milliseconds_min"),
        ("--ttl-milliseconds-max=499", "ttl_milliseconds_max"),
        ("--ttl-milliseconds-min=60001", "ttl_milliseconds_min"),
        ("--sessions-max=0", "sessions_max"),
        ("--request-bytes-max=1048577", "request_bytes_max"),
        ("--locks-max=0", "locks_max"),
        ("--locks-max=many", "locks_max"),
        ("--lock-name-bytes-total-max=1023", "lock_name_bytes_total_max"),
        ("--request-items-max=0", "request_items_max"),
        ("--page-sessions-max=0", "page_sessions_max"),
    ],
)
def test_an_invalid_value_stops_the_start_and_names_the_field(
    flag: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(LockServiceSettings, [flag], {})
    assert stopped.value.code == 2
    assert field in capsys.readouterr().err
