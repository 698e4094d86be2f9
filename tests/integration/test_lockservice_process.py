"""The lock service as a process: killed, restarted, paused, and sent nonsense."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from percolator.errors import InvalidArgument, NotReady, SessionExpired
from percolator.services.local.process import ServiceProcess
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.liveness import Liveness
from percolator.wire.sessions import Sessions, SessionSettings
from percolator.world import MachineClock, World, machine_random

pytestmark = pytest.mark.integration

START_SECONDS = 20.0
TTL_SECONDS = 4.0
"""A renewal times out after a third of this, within which even a busy machine answers."""
SHORT_TTL_SECONDS = 1.0
SHORT_LONGEST_TTL_SECONDS = 2.0
TICKS_SECONDS = 0.1
"""More than the service adds to a time to live, because it counts in ticks."""


@pytest.fixture
def longest_ttl_seconds() -> float:
    """How long a restarted service waits for the sessions of its previous run."""
    return 10.0


@pytest.fixture
def service(tmp_path: Path, longest_ttl_seconds: float) -> Iterator[ServiceProcess]:
    arguments = ["--ttl-milliseconds-max", str(round(longest_ttl_seconds * 1000))]
    process = ServiceProcess("lockservice", "lockservice", arguments, logs=tmp_path, run=tmp_path)
    process.start()
    process.wait_ready(START_SECONDS)
    yield process
    process.ask_to_stop()
    assert process.wait_stopped() == 0, "it did not stop cleanly"


@asynccontextmanager
async def client(
    service: ServiceProcess, lost: list[bytes], ttl_seconds: float = TTL_SECONDS
) -> AsyncIterator[Sessions]:
    network = GrpcNetwork()
    world = World(MachineClock(), network, machine_random())
    settings = SessionSettings(description="a test", ttl_seconds=ttl_seconds)
    sessions = Sessions(world, [service.address], settings, on_expired=lost.append)
    try:
        yield sessions
    finally:
        await sessions.close()
        await network.close()


async def until(sessions: Sessions, session_id: bytes, expected: Liveness) -> float:
    """Waits until the service reports this liveness. Returns how many seconds that took."""
    started = time.monotonic()
    while await sessions.liveness([session_id]) != [expected]:
        assert time.monotonic() < started + 15
        await asyncio.sleep(0.02)
    return time.monotonic() - started


async def becomes_true(fact: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not fact():
        assert time.monotonic() < started + 15
        await asyncio.sleep(0.01)


async def try_lock(service: ServiceProcess, session_id: bytes, *names: bytes) -> list[bool]:
    network = GrpcNetwork()
    try:
        request = pb.TryLockRequest(session_id=session_id, names=names, ttl_milliseconds=2_000)
        return list((await network.unary(service.address, methods.TRY_LOCK)(request, 5)).held)
    finally:
        await network.close()


async def test_after_kill_9_and_restart_a_client_continues_under_its_id(
    service: ServiceProcess,
) -> None:
    lost: list[bytes] = []
    async with client(service, lost) as sessions:
        session_id = await sessions.current()
        assert session_id is not None
        assert await try_lock(service, session_id, b"row 1") == [True]
        service.kill()
        assert await sessions.liveness([session_id]) == [Liveness.UNDECIDED]
        service.start()
        service.wait_ready(START_SECONDS)
        await until(sessions, session_id, Liveness.ALIVE)
        assert sessions.session_id == session_id
        assert lost == []
        # Its locks are gone, and any session can take them.
        async with client(service, lost) as others:
            other = await others.current()
            assert other is not None
            assert await try_lock(service, other, b"row 1") == [True]
            assert await try_lock(service, session_id, b"row 1") == [False]


@pytest.mark.parametrize("longest_ttl_seconds", [SHORT_LONGEST_TTL_SECONDS])
async def test_a_client_that_died_with_the_service_is_dead_only_after_the_longest_ttl(
    service: ServiceProcess,
) -> None:
    """A client that does not return, as if its machine had died at the same moment."""
    async with client(service, [], SHORT_TTL_SECONDS) as sessions:
        died = b"sixteen bytes id"
        started = time.monotonic()
        service.kill()
        service.start()
        service.wait_ready(START_SECONDS)
        await until(sessions, died, Liveness.UNDECIDED)
        with pytest.raises(NotReady):
            await try_lock(service, died, b"row 1")
        await until(sessions, died, Liveness.DEAD)
        assert time.monotonic() - started >= SHORT_LONGEST_TTL_SECONDS
        with pytest.raises(SessionExpired) as caught:
            await try_lock(service, died, b"row 1")
        assert caught.value.session_id == died


async def test_a_client_that_stops_renewing_dies_and_one_that_renews_does_not(
    service: ServiceProcess,
) -> None:
    async with client(service, []) as renewing:
        living = await renewing.current()
        assert living is not None
        network = GrpcNetwork()
        opened = await network.unary(service.address, methods.OPEN_SESSION)(
            pb.OpenSessionRequest(info=pb.SessionInfo(ttl_milliseconds=1_000)), 5
        )
        seconds = await until(renewing, opened.session_id, Liveness.DEAD)
        assert seconds >= 0.9
        assert await renewing.liveness([living, opened.session_id]) == [
            Liveness.ALIVE,
            Liveness.DEAD,
        ]
        await network.close()


async def test_a_service_paused_for_longer_than_its_sessions_live_declares_none_of_them_dead(
    service: ServiceProcess,
) -> None:
    lost: list[bytes] = []
    async with client(service, lost, SHORT_TTL_SECONDS) as sessions:
        session_id = await sessions.current()
        assert session_id is not None
        service.pause()
        # By the client's own count of the time since it sent the last renewal.
        await becomes_true(lambda: sessions.session_id is None)
        over_at = time.monotonic() + TICKS_SECONDS
        await becomes_true(lambda: time.monotonic() >= over_at)
        service.resume()
        await becomes_true(lambda: sessions.session_id is not None)
        assert sessions.session_id == session_id
        assert lost == []


async def test_bad_input_gets_its_error_and_does_no_harm(service: ServiceProcess) -> None:
    async with client(service, []) as sessions:
        session_id = await sessions.current()
        assert session_id is not None
        with pytest.raises(InvalidArgument) as caught:
            await try_lock(service, session_id, b"row 1", b"x" * 1_025)
        assert caught.value.field == "names[1]"
        # Half an HTTP/2 preface, then something else.
        host, _, port = service.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\n\x00\xff garbage")
        await writer.drain()
        writer.close()
        assert await try_lock(service, session_id, b"row 1") == [True]


async def test_the_metrics_count_sessions_locks_and_refusals(service: ServiceProcess) -> None:
    async with client(service, []) as sessions:
        session_id = await sessions.current()
        assert session_id is not None
        await try_lock(service, session_id, b"row 1", b"row 2")
        assert service.ready is not None
        url = f"http://{service.ready.metrics_address}/metrics"
        text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
        assert "percolator_lockservice_sessions 1.0" in text
        assert "percolator_lockservice_locks 2.0" in text
        assert 'percolator_lockservice_refused_total{reason="session_expired"} 0.0' in text
