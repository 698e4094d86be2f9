"""A client's session, with real lock services behind a network that can be cut."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    SnapshotTooOld,
    Unavailable,
    UsageError,
)
from percolator.services.chassis.settings import load
from percolator.services.lockservice.service import LockServiceSettings
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire import advisory_locks
from percolator.wire.advisory_locks import NAME_BYTES_MAX, AdvisoryLocks, row_name
from percolator.wire.liveness import Liveness
from percolator.wire.lock_service import LockServiceCalls
from percolator.wire.sessions import Sessions, SessionSettings
from tests.unit.refusals import refused
from tests.unit.wire.lock_services import (
    ROUND_TRIP_SECONDS,
    A,
    B,
    LockServices,
    client,
    held,
    lock_services,
    problem,
)


@pytest.fixture
def services(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[LockServices]:
    """One lock service, unless a test names several."""
    return lock_services(*getattr(request, "param", [A]))


on_no_service = pytest.mark.parametrize("services", [[]], indirect=True)
on_two_services = pytest.mark.parametrize("services", [[A, B]], indirect=True)


async def opened(sessions: Sessions) -> bytes:
    """The id of the session, which can be opened."""
    session_id = await sessions.current()
    assert session_id is not None
    return session_id


async def test_a_session_is_opened_when_it_is_first_needed(services: LockServices) -> None:
    sessions = client(services)
    await asyncio.sleep(10)
    assert services.calls == []
    assert held(sessions) is None
    first, second = await asyncio.gather(sessions.current(), sessions.current())
    assert first is not None
    assert first == second == held(sessions)
    assert [s.session_id for s in services.alive(A)] == [first]


async def test_a_session_is_renewed_in_the_background_for_as_long_as_it_is_open(
    services: LockServices,
) -> None:
    oldest = 0
    sessions = client(services, oldest_start=lambda: oldest)
    session_id = await sessions.current()
    for oldest in (17, 99, 0):
        await asyncio.sleep(60)
        (session,) = services.alive(A)
        assert session.session_id == session_id == held(sessions)
        assert session.info.oldest_start_timestamp == oldest
    assert 1.0 <= services.count("RenewSession") / 180 <= 1.3
    # However slow the answers are.
    services.answer_seconds = 0.7
    await asyncio.sleep(180)
    assert 1.0 <= services.count("RenewSession") / 360 <= 1.3


async def test_closing_ends_the_session_at_once_and_for_good(services: LockServices) -> None:
    sessions = client(services)
    await sessions.current()
    await sessions.close()
    assert services.alive(A) == []
    assert held(sessions) is None
    calls = len(services.calls)
    await asyncio.sleep(60)
    assert len(services.calls) == calls
    for use in (sessions.current(), sessions.liveness([b"x" * 16])):
        with pytest.raises(UsageError):
            await use


async def test_closing_does_not_hang_on_a_silent_lock_service(services: LockServices) -> None:
    sessions = client(services)
    await sessions.current()
    services.silent.add(A)
    assert await services.seconds_of(sessions.close()) <= 1.0


async def test_a_session_that_is_being_opened_when_it_is_closed_is_not_left_behind(
    services: LockServices,
) -> None:
    sessions = client(services)
    opening = asyncio.ensure_future(sessions.current())
    await asyncio.sleep(0.75 * ROUND_TRIP_SECONDS)
    assert len(services.alive(A)) == 1, "it is opened, and the answer is on its way"
    await sessions.close()
    assert services.alive(A) == []
    assert await opening is None


async def test_closing_that_was_cancelled_can_be_done_again(services: LockServices) -> None:
    sessions = client(services)
    await sessions.current()
    closing = asyncio.ensure_future(sessions.close())
    await asyncio.sleep(0.25 * ROUND_TRIP_SECONDS)  # the call is on its way, and is lost
    closing.cancel()
    await asyncio.wait([closing])
    assert held(sessions) is None
    assert len(services.alive(A)) == 1
    await sessions.close()
    assert services.alive(A) == []


async def test_closing_that_was_cancelled_while_a_session_was_being_opened_lets_it_expire(
    services: LockServices,
) -> None:
    """Whoever is cancelled need not close it once more, and nobody uses the session."""
    sessions = client(services)
    opening = asyncio.ensure_future(sessions.current())
    await asyncio.sleep(0.75 * ROUND_TRIP_SECONDS)
    closing = asyncio.ensure_future(sessions.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing, opening])
    await asyncio.sleep(2 * SessionSettings().ttl_seconds)
    assert services.alive(A) == []


async def test_closing_does_not_wait_for_long_for_a_session_that_is_being_opened(
    services: LockServices,
) -> None:
    services.silent.add(A)
    sessions = client(services, settings=SessionSettings(ttl_seconds=60.0))
    opening = asyncio.ensure_future(sessions.current())
    await asyncio.sleep(ROUND_TRIP_SECONDS)
    assert await services.seconds_of(sessions.close()) <= 1.0
    assert await opening is None


@on_no_service
async def test_without_a_lock_service_work_continues_without_a_session(
    services: LockServices,
) -> None:
    services.refusing.add(A)
    sessions = client(services)
    assert await sessions.current() is None
    assert isinstance(problem(sessions), Unavailable)
    services.start(A)
    await asyncio.sleep(1.1)
    assert held(sessions) is not None
    assert problem(sessions) is None


async def test_a_silent_lock_service_delays_only_the_first_lookup(services: LockServices) -> None:
    services.silent.add(A)
    sessions = client(services)
    before = services.clock.monotonic_seconds()
    assert await sessions.current() is None
    assert services.clock.monotonic_seconds() - before <= 1.0
    before = services.clock.monotonic_seconds()
    assert await sessions.current() is None
    assert services.clock.monotonic_seconds() == before


@on_no_service
async def test_without_addresses_everything_is_as_if_no_service_answered(
    services: LockServices,
) -> None:
    addresses: list[str] = []
    sessions = client(services, all_of=addresses)
    assert await sessions.current() is None
    assert await sessions.liveness([b"x" * 16]) == [Liveness.UNDECIDED]
    services.start(A)
    addresses.append(A)
    await asyncio.sleep(1.1)
    assert held(sessions) is not None


async def test_two_renewals_may_be_lost_before_the_session_is_given_up(
    services: LockServices,
) -> None:
    sessions = client(services)
    session_id = await sessions.current()
    services.silent.add(A)
    await asyncio.sleep(1.9)
    assert held(sessions) == session_id
    await asyncio.sleep(1.2)
    assert held(sessions) is None


async def test_a_session_is_used_only_while_it_is_certainly_alive(services: LockServices) -> None:
    """The client's own clock decides, counted from before the renewal was sent."""
    sessions = client(services)
    session_id = await opened(sessions)
    services.answer_seconds = 0.9
    await asyncio.sleep(10)
    services.silent.add(A)
    while held(sessions) is not None:
        assert services.handlers[A].sessions.liveness(session_id) is Liveness.ALIVE
        await asyncio.sleep(0.01)


async def test_an_expired_session_is_replaced_and_its_owner_notified(
    services: LockServices,
) -> None:
    lost: list[bytes] = []
    sessions = client(services, on_expired=lost.append)
    first = await sessions.current()
    services.silent.add(A)
    await asyncio.sleep(10)
    services.silent.clear()
    await asyncio.sleep(1.1)
    second = held(sessions)
    assert second is not None
    assert second != first
    assert (lost, [s.session_id for s in services.alive(A)]) == ([first], [second])


async def test_an_error_in_the_owners_callback_does_not_stop_the_renewals(
    services: LockServices,
) -> None:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))

    def fail(session_id: bytes) -> None:
        raise ValueError("the owner's own bug")

    sessions = client(services, on_expired=fail)
    first = await sessions.current()
    await services.handlers[A].end_session(pb.EndSessionRequest(session_id=first))
    await asyncio.sleep(60)
    assert held(sessions) is not None
    assert [str(context["exception"]) for context in complaints] == ["the owner's own bug"]


async def test_a_restart_of_the_lock_service_costs_no_session(services: LockServices) -> None:
    sessions = client(services)
    session_id = await sessions.current()
    services.stop(A)
    await asyncio.sleep(1.5)
    services.start(A)
    await asyncio.sleep(1.1)
    assert held(sessions) == session_id
    assert [s.session_id for s in services.alive(A)] == [session_id]


@on_two_services
@pytest.mark.parametrize("silent", [True, False])
async def test_another_lock_service_takes_over_when_one_does_not_answer(
    services: LockServices, silent: bool
) -> None:
    await asyncio.sleep(61)  # B's grace period is over
    sessions = client(services, A, B)
    first = await sessions.current()
    (services.silent if silent else services.refusing).add(A)
    await asyncio.sleep(2.1)
    assert held(sessions) not in (None, first)
    assert [s.session_id for s in services.alive(B)] == [held(sessions)]
    await sessions.close()
    assert services.alive(B) == []


@on_two_services
async def test_a_silent_address_leaves_time_for_the_next_one(services: LockServices) -> None:
    services.silent.add(A)
    assert await client(services, A, B).current() is not None
    assert services.clock.monotonic_seconds() < 1.0


@on_two_services
async def test_calls_that_fail_together_move_on_to_the_next_address_once(
    services: LockServices,
) -> None:
    services.silent.add(A)
    sessions = client(services, A, B)
    lookups = [asyncio.create_task(sessions.liveness([b"1" * 16])) for _ in range(2)]
    assert await sessions.current() is not None
    await asyncio.gather(*lookups)
    services.calls.clear()
    await sessions.liveness([b"1" * 16])
    await asyncio.sleep(10.0)
    assert {address for address, _, _ in services.calls} == {B}


@on_two_services
async def test_a_session_stays_with_its_lock_service_when_others_come_and_go(
    services: LockServices,
) -> None:
    """The others do not know the session, and a pin that is lost is not set again."""
    await asyncio.sleep(61)  # their grace periods are over
    addresses = [B]
    sessions = client(services, all_of=addresses, settings=SessionSettings(pin_at=42))
    first = await sessions.current()
    for now in ([A, B], [B], ["lock-0:7102", A, B], [B, A]):
        addresses[:] = now
        await asyncio.sleep(3.0)
        assert held(sessions) == first


@on_two_services
async def test_a_session_that_is_renewed_keeps_its_lock_service_though_lookups_fail_there(
    services: LockServices,
) -> None:
    """Advisory locks, for one, are taken in its name."""
    sessions = client(services, A, B)
    first = await sessions.current()
    services.refusing.add(A)
    await sessions.liveness([b"1" * 16])
    services.refusing.discard(A)
    await asyncio.sleep(3.0)
    assert (held(sessions), sessions.calls.current()) == (first, A)


async def test_a_time_to_live_that_may_be_shorter_is_what_the_lock_service_allows(
    services: LockServices,
) -> None:
    long = SessionSettings(ttl_seconds=90, ttl_may_be_shorter=True, pin_at=42)
    sessions = client(services, settings=long)
    assert await sessions.current() is not None
    await asyncio.sleep(200)
    assert held(sessions) is not None
    (session,) = services.alive(A)
    assert session.info.ttl_milliseconds == 60_000
    assert services.count("RenewSession") >= 10, "it is renewed as often as that demands"
    services.refusing.add(A)
    await asyncio.sleep(61)
    assert held(sessions) is None, "it is not taken to be alive for longer"


async def test_a_time_to_live_that_must_not_be_shorter_is_refused(services: LockServices) -> None:
    sessions = client(services, settings=SessionSettings(ttl_seconds=90, pin_at=42))
    assert await sessions.current() is None
    assert isinstance(problem(sessions), InvalidArgument)


async def test_a_mistake_is_reported_once_and_does_not_stop_the_work(
    services: LockServices,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sessions = client(services, settings=SessionSettings(ttl_seconds=0.3))
    assert await sessions.current() is None
    await asyncio.sleep(10)
    assert isinstance(problem(sessions), InvalidArgument)
    assert len(caplog.records) == 1
    assert "info.ttl_milliseconds" in caplog.text


def _fails() -> int:
    raise ZeroDivisionError


@pytest.mark.parametrize("oldest_start", [_fails, lambda: -1, lambda: 2**64])
async def test_a_wrong_oldest_start_is_reported_and_keeps_no_caller_waiting(
    services: LockServices,
    oldest_start: Callable[[], int],
) -> None:
    sessions = client(services, oldest_start=oldest_start)
    async with asyncio.timeout(1):
        assert await sessions.current() is None
    assert isinstance(sessions.last_error, UsageError)
    assert "oldest_start" in str(sessions.last_error)


async def test_a_session_id_that_is_not_bytes_is_refused_and_harms_no_other_caller(
    services: LockServices,
) -> None:
    sessions = client(services)
    session_id = await opened(sessions)
    other = asyncio.ensure_future(sessions.liveness([session_id]))
    wrong: Any = ["y" * 16]
    with pytest.raises(InvalidArgument, match=r"session_ids\[0\]"):
        await sessions.liveness(wrong)
    assert await other == [Liveness.ALIVE]


async def test_one_address_in_place_of_a_list_is_refused_by_sessions(
    services: LockServices,
) -> None:
    with pytest.raises(InvalidArgument, match="addresses: expected a list"):
        client(services, all_of=A)


async def test_renewals_of_clients_that_began_together_spread_out(services: LockServices) -> None:
    """Otherwise, all clients would call a restarted lock service at once, again and again."""
    loop = asyncio.get_running_loop()
    clients = [client(services, seed=seed) for seed in range(10)]
    renewed_at: list[float] = []
    await asyncio.gather(*(sessions.current() for sessions in clients))
    before = len(services.calls)
    started = loop.time()
    while len(services.calls) < before + 10:
        await asyncio.sleep(0.001)
        renewed_at += [loop.time() - started] * (len(services.calls) - before - len(renewed_at))
    assert 0.7 <= min(renewed_at) < max(renewed_at) <= 1.0
    assert max(renewed_at) - min(renewed_at) > 0.1


@on_two_services
async def test_an_address_that_left_the_cluster_is_dialled_anew_when_it_comes_back(
    services: LockServices,
) -> None:
    """State is kept only for the addresses that exist now, not for all that ever existed."""
    addresses = [A]
    calls = LockServiceCalls(services, addresses)
    request = pb.CheckSessionsRequest(session_ids=[bytes(16)])
    for address in (A, B, A, A):
        addresses[:] = [address]
        await calls.call(lambda stub: stub.check_sessions, request, 1.0)
    assert services.dialled.count(f"{A} CheckSessions") == 2
    assert services.dialled.count(f"{B} CheckSessions") == 1


# How a process presents itself to the lock service: what can be sent, and what cannot.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl_seconds", 0.0),
        ("ttl_seconds", -1.0),
        ("ttl_seconds", math.nan),
        ("ttl_seconds", math.inf),
        ("liveness_timeout_seconds", math.nan),
        ("liveness_timeout_seconds", 0.0),
        ("pin_at", -1),
        ("pin_at", 2**64),
        ("description", "x" * 257),
        ("description", "ä" * 129),
        ("description", "\ud800"),
    ],
)
def test_settings_that_cannot_be_sent_are_refused_by_name(field: str, value: Any) -> None:
    """They would end the task that renews, and leave callers waiting for a session."""
    with refused(field):
        SessionSettings(**{field: value})


# The sessions of all lock services, and which of these do not answer.


@on_two_services
async def test_the_sessions_of_all_lock_services_are_listed_and_who_does_not_answer(
    services: LockServices,
) -> None:
    one, other = client(services, A, B), client(services, B, A)
    held_by = {A: await one.current(), B: await other.current()}
    calls = LockServiceCalls(services, [A, B])
    by_address = await calls.sessions_of_each(5.0)
    assert {
        address: [session.session_id for session in listed]
        for address, listed in by_address.items()
        if not isinstance(listed, PercolatorError)
    } == {address: [session] for address, session in held_by.items()}
    missing: list[str] = []

    async def all_sessions() -> set[bytes]:
        listed = await calls.all_sessions(5.0, lambda address, _: missing.append(address))
        return {one.session_id for one in listed}

    assert (await all_sessions(), missing) == (set(held_by.values()), [])
    services.refusing.add(A)
    assert (await all_sessions(), missing) == ({held_by[B]}, [A])
    assert isinstance((await calls.sessions_of_each(5.0))[A], Unavailable)
    services.refusing.add(B)
    with pytest.raises(Unavailable):
        await all_sessions()


# Pins: sessions that stay with their lock service, and are lost after their time to live.


async def test_a_pin_sends_the_same_with_every_renewal(services: LockServices) -> None:
    pin = SessionSettings(description="a backup", ttl_seconds=30, pin_at=42)
    await client(services, settings=pin, oldest_start=lambda: 77).current()
    await asyncio.sleep(100)
    (session,) = services.alive(A)
    assert session.info == pb.SessionInfo(
        description="a backup", ttl_milliseconds=30_000, oldest_start_timestamp=42, pin=True
    )


@on_two_services
@pytest.mark.parametrize("restarts", [True, False])
async def test_a_restart_of_its_lock_service_costs_no_pin_though_there_are_others(
    services: LockServices,
    restarts: bool,
) -> None:
    await asyncio.sleep(61)  # their grace periods are over
    pin = client(services, A, B, settings=SessionSettings(ttl_seconds=30, pin_at=42))
    first = await opened(pin)
    services.refusing.add(A)
    await asyncio.sleep(15)
    if restarts:
        services.start(A)
    services.refusing.discard(A)
    await asyncio.sleep(100)
    assert (held(pin), [one.session_id for one in services.alive(A)]) == (first, [first])
    assert services.alive(B) == []
    await pin.close()
    assert services.alive(A) == []


@on_two_services
@pytest.mark.parametrize("ttl_seconds", [60.0, 3600.0])
async def test_silent_lock_services_take_no_more_than_the_time_of_who_sets_or_releases_a_pin(
    services: LockServices,
    ttl_seconds: float,
) -> None:
    sessions = client(services, A, B)
    services.silent.add(A)
    pin = sessions.pin(17, "", ttl_seconds=ttl_seconds, ttl_may_be_shorter=True, timeout_seconds=8)
    before = services.clock.monotonic_seconds()
    assert await pin.current() is not None
    assert services.clock.monotonic_seconds() - before < 5, "B answers, and some time is left"
    services.silent.add(B)
    assert await services.seconds_of(pin.close()) <= 8


@on_two_services
async def test_a_pin_is_lost_when_its_lock_service_stays_away_for_its_time_to_live(
    services: LockServices,
) -> None:
    await asyncio.sleep(61)
    lost: list[bytes] = []
    settings = SessionSettings(ttl_seconds=30, pin_at=42)
    pin = client(services, A, B, settings=settings, on_expired=lost.append)
    first = await pin.current()
    services.refusing.add(A)
    await asyncio.sleep(25)
    assert (lost, held(pin)) == ([], first)
    await asyncio.sleep(20)
    assert (lost, held(pin)) == ([first], None)


async def test_a_pin_that_becomes_too_old_is_lost_and_its_holder_is_told_why(
    services: LockServices,
) -> None:
    lost: list[bytes] = []
    settings = SessionSettings(ttl_seconds=30, pin_at=42)
    pin = client(services, A, settings=settings, on_expired=lost.append)
    first = await pin.current()
    limits = pb.HistoryLimits(clients_since=43)
    await services.handlers[A].list_sessions(pb.ListSessionsRequest(limits=limits))
    await asyncio.sleep(15)
    assert (lost, held(pin)) == ([first], None)
    assert "too old" in pin.lost_because
    assert "client_held_seconds_max" in pin.lost_because
    another = client(services, A, settings=settings)
    assert await another.current() is None
    assert isinstance(another.last_error, SnapshotTooOld)


# Questions about the owners of locks, with real lock services behind a network that can be cut.


async def test_live_dead_and_undecided_sessions_are_told_apart(services: LockServices) -> None:
    one, other = client(services), client(services)
    living, ended = await opened(one), await opened(other)
    await other.close()
    never = b"never seen here!"
    expected = [Liveness.DEAD, Liveness.ALIVE, Liveness.UNDECIDED]
    assert await one.liveness([ended, living, never]) == expected
    await asyncio.sleep(61)
    expected = [Liveness.DEAD, Liveness.ALIVE, Liveness.DEAD]
    assert await one.liveness([ended, living, never]) == expected


async def test_no_answer_means_undecided(services: LockServices) -> None:
    await asyncio.sleep(61)
    sessions = client(services)
    services.silent.add(A)
    before = services.clock.monotonic_seconds()
    assert await sessions.liveness([b"x" * 16]) == [Liveness.UNDECIDED]
    assert services.clock.monotonic_seconds() - before <= 1.0


async def test_a_malformed_session_id_is_undecided_and_harms_no_other_lookup(
    services: LockServices,
) -> None:
    await asyncio.sleep(61)
    sessions = client(services)
    expected = [Liveness.UNDECIDED, Liveness.DEAD, Liveness.UNDECIDED]
    assert await sessions.liveness([b"", b"x" * 16, b"long" * 5]) == expected
    assert await sessions.liveness([b""]) == [Liveness.UNDECIDED]
    assert await sessions.liveness([]) == []
    assert services.count("CheckSessions") == 1


async def test_an_answer_is_never_older_than_its_lookup(services: LockServices) -> None:
    """The session dies after the first lookup arrived and before the second began."""
    owner, asker = client(services), client(services)
    session_id = await opened(owner)
    first = asyncio.create_task(asker.liveness([session_id]))
    await asyncio.sleep(ROUND_TRIP_SECONDS * 0.75)
    await services.handlers[A].end_session(pb.EndSessionRequest(session_id=session_id))
    second = asyncio.create_task(asker.liveness([session_id]))
    assert await first == [Liveness.ALIVE]
    assert await second == [Liveness.DEAD]


async def test_lookups_during_a_call_share_the_next_one(services: LockServices) -> None:
    await asyncio.sleep(61)
    sessions = client(services)
    first = asyncio.create_task(sessions.liveness([b"x" * 16]))
    await asyncio.sleep(ROUND_TRIP_SECONDS / 4)
    ids = [number.to_bytes(16, "big") for number in range(2_500)]
    rest = [asyncio.create_task(sessions.liveness([i, ids[0]])) for i in ids]
    await asyncio.sleep(0)
    rest[7].cancel()
    answers = await asyncio.gather(first, *rest[:7], *rest[8:])
    assert answers[1:] == [[Liveness.DEAD, Liveness.DEAD]] * 2_499
    asked = [len(c.session_ids) for _, name, c in services.calls if name == "CheckSessions"]
    assert asked == [1, 1_000, 1_000, 500]


async def test_closing_leaves_no_lookup_waiting(services: LockServices) -> None:
    sessions = client(services)
    services.silent.add(A)
    first = asyncio.create_task(sessions.liveness([b"x" * 16]))
    await asyncio.sleep(0.1)
    second = asyncio.create_task(sessions.liveness([b"y" * 16]))
    await asyncio.sleep(0.1)
    before = services.clock.monotonic_seconds()
    await sessions.close()
    assert await first == await second == [Liveness.UNDECIDED]
    assert services.clock.monotonic_seconds() == before


@on_two_services
async def test_a_session_is_dead_only_if_no_lock_service_knows_it(services: LockServices) -> None:
    """Clients may be with different ones, as after the first was away for a while."""
    await asyncio.sleep(61)  # their grace periods are over
    one, other = client(services, A, B), client(services, B, A)
    session = await opened(one)
    nobody = b"?" * 16
    await other.current()
    assert await other.liveness([session, nobody]) == [Liveness.ALIVE, Liveness.DEAD]
    services.refusing.add(A)
    assert await other.liveness([session, nobody]) == [Liveness.UNDECIDED] * 2


# Advisory locks keep processes from doing the same work, and never from doing any.


async def test_a_lock_that_one_session_holds_is_refused_to_others(services: LockServices) -> None:
    one, other = client(services), client(services, seed=8)
    await asyncio.gather(one.current(), other.current())
    first, second = AdvisoryLocks(one), AdvisoryLocks(other)
    assert await first.try_lock([b"a", b"b"]) == [True, True]
    assert await second.try_lock([b"b", b"c", b"b"]) == [False, True, False]
    assert await first.renew([b"a", b"c"]) == [True, False]
    await first.unlock([b"b", b"c"])
    assert await second.try_lock([b"b", b"a"]) == [True, False]
    await one.close()
    assert await second.try_lock([b"a"]) == [True]


async def test_a_lock_that_is_not_renewed_is_free_again(services: LockServices) -> None:
    one, other = client(services), client(services, seed=8)
    await one.current()
    await other.current()
    first = AdvisoryLocks(one, ttl_seconds=1)
    await first.try_lock([b"kept", b"forgotten"])
    for _ in range(4):
        await asyncio.sleep(0.5)
        await first.renew([b"kept"])
    assert await AdvisoryLocks(other).try_lock([b"kept", b"forgotten"]) == [False, True]


async def test_work_continues_without_a_lock_service_or_a_session(services: LockServices) -> None:
    session = client(services)
    locks = AdvisoryLocks(session)
    assert await locks.try_lock([b"a"]) == [True]
    assert services.calls == []
    await session.current()
    services.stop(A)
    assert await locks.try_lock([b"a", b"b"]) == [True, True]
    assert "refused" in str(locks.last_error)
    await locks.unlock([b"a"])
    services.start(A)
    await asyncio.sleep(10)
    assert await locks.renew([b"a"]) == [False]  # it is asked again as soon as it answers
    assert locks.last_error is None


async def test_many_names_go_in_several_calls(
    services: LockServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisory_locks, "NAMES_PER_CALL_MAX", 2)
    session = client(services)
    await session.current()
    locks = AdvisoryLocks(session)
    assert await locks.try_lock([b"%d" % number for number in range(5)]) == [True] * 5
    assert services.count("TryLock") == 3
    assert await locks.try_lock([]) == []


def test_every_row_has_a_unique_name_that_the_lock_service_accepts() -> None:
    long = b"x" * 4096
    rows = [b"", b"a", b"a\0", long[:1000], long[:1001], long, long[:-1] + b"y"]
    names = {row_name(table_id, row) for table_id in (1, 256) for row in rows}
    assert len(names) == 2 * len(rows)
    assert max(map(len, names)) <= NAME_BYTES_MAX


def test_so_many_of_the_longest_names_fit_into_a_request_to_a_lock_service() -> None:
    names = [bytes(NAME_BYTES_MAX)] * advisory_locks.NAMES_PER_CALL_MAX
    request = pb.TryLockRequest(session_id=bytes(16), names=names, ttl_milliseconds=2**31 - 1)
    assert request.ByteSize() <= load(LockServiceSettings, [], {}).request_bytes_max
