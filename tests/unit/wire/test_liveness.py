"""Questions about the owners of locks, with real lock services behind a network that can be cut."""

from __future__ import annotations

import asyncio

from percolator.v1 import lockservice_pb2 as pb
from percolator.wire.liveness import Liveness
from tests.unit.wire.lock_services import ROUND_TRIP_SECONDS, A, B, client, lock_services


async def test_live_dead_and_undecided_sessions_are_told_apart() -> None:
    async with lock_services(A) as services:
        one, other = client(services), client(services)
        living, ended = await one.current(), await other.current()
        assert living is not None
        assert ended is not None
        await other.close()
        never = b"never seen here!"
        expected = [Liveness.DEAD, Liveness.ALIVE, Liveness.UNDECIDED]
        assert await one.liveness([ended, living, never]) == expected
        await asyncio.sleep(61)
        expected = [Liveness.DEAD, Liveness.ALIVE, Liveness.DEAD]
        assert await one.liveness([ended, living, never]) == expected
        await one.close()


async def test_no_answer_means_undecided() -> None:
    async with lock_services(A) as services:
        await asyncio.sleep(61)
        sessions = client(services)
        services.silent.add(A)
        before = services.clock.monotonic_seconds()
        assert await sessions.liveness([b"x" * 16]) == [Liveness.UNDECIDED]
        assert services.clock.monotonic_seconds() - before <= 1.0
        await sessions.close()


async def test_a_malformed_session_id_is_undecided_and_harms_no_other_lookup() -> None:
    async with lock_services(A) as services:
        await asyncio.sleep(61)
        sessions = client(services)
        expected = [Liveness.UNDECIDED, Liveness.DEAD, Liveness.UNDECIDED]
        assert await sessions.liveness([b"", b"x" * 16, b"long" * 5]) == expected
        assert await sessions.liveness([b""]) == [Liveness.UNDECIDED]
        assert await sessions.liveness([]) == []
        assert services.count("CheckSessions") == 1
        await sessions.close()


async def test_an_answer_is_never_older_than_its_lookup() -> None:
    """The session dies after the first lookup arrived and before the second began."""
    async with lock_services(A) as services:
        owner, asker = client(services), client(services)
        session_id = await owner.current()
        assert session_id is not None
        first = asyncio.create_task(asker.liveness([session_id]))
        await asyncio.sleep(ROUND_TRIP_SECONDS * 0.75)
        await services.handlers[A].end_session(pb.EndSessionRequest(session_id=session_id))
        second = asyncio.create_task(asker.liveness([session_id]))
        assert await first == [Liveness.ALIVE]
        assert await second == [Liveness.DEAD]
        await owner.close()
        await asker.close()


async def test_lookups_during_a_call_share_the_next_one() -> None:
    async with lock_services(A) as services:
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
        await sessions.close()


async def test_closing_leaves_no_lookup_waiting() -> None:
    async with lock_services(A) as services:
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


async def test_a_session_is_dead_only_if_no_lock_service_knows_it() -> None:
    """Clients may be with different ones, as after the first was away for a while."""
    async with lock_services(A, B) as services:
        await asyncio.sleep(61)  # their grace periods are over
        one, other = client(services, A, B), client(services, B, A)
        session = await one.current()
        assert session is not None
        nobody = b"?" * 16
        await other.current()
        assert await other.liveness([session, nobody]) == [Liveness.ALIVE, Liveness.DEAD]
        services.refusing.add(A)
        assert await other.liveness([session, nobody]) == [Liveness.UNDECIDED] * 2
        await one.close()
        await other.close()
