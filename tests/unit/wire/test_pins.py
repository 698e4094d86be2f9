"""Pins: sessions that stay with their lock service, and are lost after their time to live."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import SnapshotTooOld
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire.sessions import SessionSettings
from tests.unit.wire.lock_services import A, B, client, held, lock_services


async def test_a_pin_sends_the_same_with_every_renewal() -> None:
    async with lock_services(A) as services:
        pin = SessionSettings(description="a backup", ttl_seconds=30, pin_at=42)
        sessions = client(services, settings=pin, oldest_start=lambda: 77)
        await sessions.current()
        await asyncio.sleep(100)
        (session,) = services.alive(A)
        assert session.info == pb.SessionInfo(
            description="a backup", ttl_milliseconds=30_000, oldest_start_timestamp=42, pin=True
        )
        await sessions.close()


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_restart_of_its_lock_service_costs_no_pin_though_there_are_others(
    restarts: bool,
) -> None:
    async with lock_services(A, B) as services:
        await asyncio.sleep(61)  # their grace periods are over
        pin = client(services, A, B, settings=SessionSettings(ttl_seconds=30, pin_at=42))
        first = await pin.current()
        assert first is not None
        services.refusing.add(A)
        await asyncio.sleep(15)
        if restarts:
            services.start(A)
        services.refusing.discard(A)
        await asyncio.sleep(100)
        assert held(pin) == first
        assert [one.session_id for one in services.alive(A)] == [first]
        assert services.alive(B) == []
        await pin.close()
        assert services.alive(A) == []


@pytest.mark.parametrize("ttl_seconds", [60.0, 3600.0])
async def test_silent_lock_services_take_no_more_than_the_time_of_who_sets_or_releases_a_pin(
    ttl_seconds: float,
) -> None:
    async with lock_services(A, B) as services:
        sessions = client(services, A, B)
        services.silent.add(A)
        pin = sessions.pin(
            17, "", ttl_seconds=ttl_seconds, ttl_may_be_shorter=True, timeout_seconds=8
        )
        before = services.clock.monotonic_seconds()
        assert await pin.current() is not None
        assert services.clock.monotonic_seconds() - before < 5, "B answers, and some time is left"
        services.silent.add(B)
        before = services.clock.monotonic_seconds()
        await pin.close()
        assert services.clock.monotonic_seconds() - before <= 8
        await sessions.close()


async def test_a_pin_is_lost_when_its_lock_service_stays_away_for_its_time_to_live() -> None:
    async with lock_services(A, B) as services:
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
        await pin.close()


async def test_a_pin_that_becomes_too_old_is_lost_and_its_holder_is_told_why() -> None:
    async with lock_services(A) as services:
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
        await pin.close()
        await another.close()
