"""A client's session, with real lock services behind a network that can be cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from percolator.errors import InvalidArgument, Unavailable, UsageError
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire.liveness import Liveness
from percolator.wire.lock_service import LockServiceCalls
from percolator.wire.sessions import Sessions, SessionSettings
from percolator.world import World
from tests.unit.wire.lock_services import (
    ROUND_TRIP_SECONDS,
    A,
    B,
    client,
    held,
    lock_services,
    problem,
)


async def test_a_session_is_opened_when_it_is_first_needed() -> None:
    async with lock_services(A) as services:
        sessions = client(services)
        await asyncio.sleep(10)
        assert services.calls == []
        assert held(sessions) is None
        first, second = await asyncio.gather(sessions.current(), sessions.current())
        assert first is not None
        assert first == second == held(sessions)
        assert [s.session_id for s in services.alive(A)] == [first]
        await sessions.close()


async def test_a_session_is_renewed_in_the_background_for_as_long_as_it_is_open() -> None:
    oldest = 0
    async with lock_services(A) as services:
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
        await sessions.close()


async def test_closing_ends_the_session_at_once_and_for_good() -> None:
    async with lock_services(A) as services:
        sessions = client(services)
        await sessions.current()
        await sessions.close()
        assert services.alive(A) == []
        assert held(sessions) is None
        calls = len(services.calls)
        await asyncio.sleep(60)
        assert len(services.calls) == calls
        with pytest.raises(UsageError):
            await sessions.current()
        with pytest.raises(UsageError):
            await sessions.liveness([b"x" * 16])
        await sessions.close()


async def test_closing_does_not_hang_on_a_silent_lock_service() -> None:
    async with lock_services(A) as services:
        sessions = client(services)
        await sessions.current()
        services.silent.add(A)
        before = services.clock.monotonic_seconds()
        await sessions.close()
        assert services.clock.monotonic_seconds() - before <= 1.0


async def test_a_session_that_is_being_opened_when_it_is_closed_is_not_left_behind() -> None:
    async with lock_services(A) as services:
        sessions = client(services)
        opening = asyncio.ensure_future(sessions.current())
        await asyncio.sleep(0.75 * ROUND_TRIP_SECONDS)
        assert len(services.alive(A)) == 1, "it is opened, and the answer is on its way"
        await sessions.close()
        assert services.alive(A) == []
        assert await opening is None


async def test_closing_that_was_cancelled_can_be_done_again() -> None:
    async with lock_services(A) as services:
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


async def test_closing_that_was_cancelled_while_a_session_was_being_opened_lets_it_expire() -> None:
    """Whoever is cancelled need not close it once more, and nobody uses the session."""
    async with lock_services(A) as services:
        sessions = client(services)
        opening = asyncio.ensure_future(sessions.current())
        await asyncio.sleep(0.75 * ROUND_TRIP_SECONDS)
        closing = asyncio.ensure_future(sessions.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing, opening])
        await asyncio.sleep(2 * SessionSettings().ttl_seconds)
        assert services.alive(A) == []


async def test_closing_does_not_wait_for_long_for_a_session_that_is_being_opened() -> None:
    async with lock_services(A) as services:
        services.silent.add(A)
        sessions = client(services, settings=SessionSettings(ttl_seconds=60.0))
        opening = asyncio.ensure_future(sessions.current())
        await asyncio.sleep(ROUND_TRIP_SECONDS)
        before = services.clock.monotonic_seconds()
        await sessions.close()
        assert services.clock.monotonic_seconds() - before <= 1.0
        assert await opening is None


async def test_without_a_lock_service_work_continues_without_a_session() -> None:
    async with lock_services() as services:
        services.refusing.add(A)
        sessions = client(services)
        assert await sessions.current() is None
        assert isinstance(problem(sessions), Unavailable)
        services.start(A)
        await asyncio.sleep(1.1)
        assert held(sessions) is not None
        assert problem(sessions) is None
        await sessions.close()


async def test_a_silent_lock_service_delays_only_the_first_lookup() -> None:
    async with lock_services(A) as services:
        services.silent.add(A)
        sessions = client(services)
        before = services.clock.monotonic_seconds()
        assert await sessions.current() is None
        assert services.clock.monotonic_seconds() - before <= 1.0
        before = services.clock.monotonic_seconds()
        assert await sessions.current() is None
        assert services.clock.monotonic_seconds() == before
        await sessions.close()


async def test_without_addresses_everything_is_as_if_no_service_answered() -> None:
    async with lock_services() as services:
        addresses: list[str] = []
        world = World(services.clock, services, random.Random(9))
        sessions = Sessions(world, addresses, SessionSettings())
        assert await sessions.current() is None
        assert await sessions.liveness([b"x" * 16]) == [Liveness.UNDECIDED]
        services.start(A)
        addresses.append(A)
        await asyncio.sleep(1.1)
        assert held(sessions) is not None
        await sessions.close()


async def test_two_renewals_may_be_lost_before_the_session_is_given_up() -> None:
    async with lock_services(A) as services:
        sessions = client(services)
        session_id = await sessions.current()
        services.silent.add(A)
        await asyncio.sleep(1.9)
        assert held(sessions) == session_id
        await asyncio.sleep(1.2)
        assert held(sessions) is None
        await sessions.close()


async def test_a_session_is_used_only_while_it_is_certainly_alive() -> None:
    """The client's own clock decides, counted from before the renewal was sent."""
    async with lock_services(A) as services:
        sessions = client(services)
        session_id = await sessions.current()
        assert session_id is not None
        services.answer_seconds = 0.9
        await asyncio.sleep(10)
        services.silent.add(A)
        while held(sessions) is not None:
            assert services.handlers[A].sessions.liveness(session_id) is Liveness.ALIVE
            await asyncio.sleep(0.01)
        await sessions.close()


async def test_an_expired_session_is_replaced_and_its_owner_notified() -> None:
    lost: list[bytes] = []
    async with lock_services(A) as services:
        sessions = client(services, on_expired=lost.append)
        first = await sessions.current()
        services.silent.add(A)
        await asyncio.sleep(10)
        services.silent.clear()
        await asyncio.sleep(1.1)
        second = held(sessions)
        assert second is not None
        assert second != first
        assert lost == [first]
        assert [s.session_id for s in services.alive(A)] == [second]
        await sessions.close()


async def test_an_error_in_the_owners_callback_does_not_stop_the_renewals() -> None:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))

    def fail(session_id: bytes) -> None:
        raise ValueError("the owner's own bug")

    async with lock_services(A) as services:
        sessions = client(services, on_expired=fail)
        first = await sessions.current()
        await services.handlers[A].end_session(pb.EndSessionRequest(session_id=first))
        await asyncio.sleep(60)
        assert held(sessions) is not None
        assert [str(context["exception"]) for context in complaints] == ["the owner's own bug"]
        await sessions.close()


async def test_a_restart_of_the_lock_service_costs_no_session() -> None:
    async with lock_services(A) as services:
        sessions = client(services)
        session_id = await sessions.current()
        services.stop(A)
        await asyncio.sleep(1.5)
        services.start(A)
        await asyncio.sleep(1.1)
        assert held(sessions) == session_id
        assert [s.session_id for s in services.alive(A)] == [session_id]
        await sessions.close()


@pytest.mark.parametrize("silent", [True, False])
async def test_another_lock_service_takes_over_when_one_does_not_answer(silent: bool) -> None:
    async with lock_services(A, B) as services:
        await asyncio.sleep(61)  # B's grace period is over
        sessions = client(services, A, B)
        first = await sessions.current()
        (services.silent if silent else services.refusing).add(A)
        await asyncio.sleep(2.1)
        assert held(sessions) not in (None, first)
        assert [s.session_id for s in services.alive(B)] == [held(sessions)]
        await sessions.close()
        assert services.alive(B) == []


async def test_a_silent_address_leaves_time_for_the_next_one() -> None:
    async with lock_services(A, B) as services:
        services.silent.add(A)
        sessions = client(services, A, B)
        assert await sessions.current() is not None
        assert services.clock.monotonic_seconds() < 1.0
        await sessions.close()


async def test_calls_that_fail_together_move_on_to_the_next_address_once() -> None:
    async with lock_services(A, B) as services:
        services.silent.add(A)
        sessions = client(services, A, B)
        lookups = [asyncio.create_task(sessions.liveness([b"1" * 16])) for _ in range(2)]
        assert await sessions.current() is not None
        await asyncio.gather(*lookups)
        services.calls.clear()
        await sessions.liveness([b"1" * 16])
        await asyncio.sleep(10.0)
        assert {address for address, _, _ in services.calls} == {B}
        await sessions.close()


async def test_a_session_stays_with_its_lock_service_when_others_come_and_go() -> None:
    """The others do not know the session, and a pin that is lost is not set again."""
    async with lock_services(A, B) as services:
        await asyncio.sleep(61)  # their grace periods are over
        addresses = [B]
        world = World(services.clock, services, random.Random(9))
        sessions = Sessions(world, addresses, SessionSettings(pin_at=42))
        first = await sessions.current()
        for now in ([A, B], [B], ["lock-0:7102", A, B], [B, A]):
            addresses[:] = now
            await asyncio.sleep(3.0)
            assert held(sessions) == first
        await sessions.close()


async def test_a_session_that_is_renewed_keeps_its_lock_service_though_lookups_fail_there() -> None:
    """Advisory locks, for one, are taken in its name."""
    async with lock_services(A, B) as services:
        sessions = client(services, A, B)
        first = await sessions.current()
        services.refusing.add(A)
        await sessions.liveness([b"1" * 16])
        services.refusing.discard(A)
        await asyncio.sleep(3.0)
        assert held(sessions) == first
        assert sessions.calls.current() == A
        await sessions.close()


async def test_a_time_to_live_that_may_be_shorter_is_what_the_lock_service_allows() -> None:
    async with lock_services(A) as services:
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
        await sessions.close()


async def test_a_time_to_live_that_must_not_be_shorter_is_refused() -> None:
    async with lock_services(A) as services:
        sessions = client(services, settings=SessionSettings(ttl_seconds=90, pin_at=42))
        assert await sessions.current() is None
        assert isinstance(problem(sessions), InvalidArgument)
        await sessions.close()


async def test_a_mistake_is_reported_once_and_does_not_stop_the_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with lock_services(A) as services:
        sessions = client(services, settings=SessionSettings(ttl_seconds=0.3))
        assert await sessions.current() is None
        await asyncio.sleep(10)
        assert isinstance(problem(sessions), InvalidArgument)
        assert len(caplog.records) == 1
        assert "info.ttl_milliseconds" in caplog.text
        await sessions.close()


def _fails() -> int:
    raise ZeroDivisionError


@pytest.mark.parametrize("oldest_start", [_fails, lambda: -1, lambda: 2**64])
async def test_a_wrong_oldest_start_is_reported_and_keeps_no_caller_waiting(
    oldest_start: Callable[[], int],
) -> None:
    async with lock_services(A) as services:
        world = World(services.clock, services, random.Random(1))
        sessions = Sessions(world, [A], SessionSettings(), oldest_start=oldest_start)
        async with asyncio.timeout(1):
            assert await sessions.current() is None
        assert isinstance(sessions.last_error, UsageError)
        assert "oldest_start" in str(sessions.last_error)
        await sessions.close()


async def test_a_session_id_that_is_not_bytes_is_refused_and_harms_no_other_caller() -> None:
    async with lock_services(A) as services:
        world = World(services.clock, services, random.Random(1))
        sessions = Sessions(world, [A], SessionSettings())
        session_id = await sessions.current()
        assert session_id is not None
        other = asyncio.ensure_future(sessions.liveness([session_id]))
        wrong: Any = ["y" * 16]
        with pytest.raises(InvalidArgument, match=r"session_ids\[0\]"):
            await sessions.liveness(wrong)
        assert await other == [Liveness.ALIVE]
        await sessions.close()


async def test_one_address_in_place_of_a_list_is_refused_by_sessions() -> None:
    async with lock_services(A) as services:
        world = World(services.clock, services, random.Random(1))
        with pytest.raises(InvalidArgument, match="addresses: expected a list"):
            Sessions(world, A, SessionSettings())


async def test_renewals_of_clients_that_began_together_spread_out() -> None:
    """Otherwise, all clients would call a restarted lock service at once, again and again."""
    async with lock_services(A) as services:
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
        for sessions in clients:
            await sessions.close()


async def test_an_address_that_left_the_cluster_is_dialled_anew_when_it_comes_back() -> None:
    """State is kept only for the addresses that exist now, not for all that ever existed."""
    async with lock_services(A, B) as services:
        addresses = [A]
        calls = LockServiceCalls(services, addresses)
        request = pb.CheckSessionsRequest(session_ids=[bytes(16)])
        for address in (A, B, A, A):
            addresses[:] = [address]
            await calls.call(lambda stub: stub.check_sessions, request, 1.0)
        assert services.dialled.count(f"{A} CheckSessions") == 2
        assert services.dialled.count(f"{B} CheckSessions") == 1
