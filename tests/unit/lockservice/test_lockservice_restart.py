"""What the lock service does not know after a restart or a pause, and how it behaves then."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from percolator.errors import NotReady, SessionExpired
from percolator.services.lockservice.sessions import LockServiceLimits
from percolator.v1 import lockservice_pb2 as pb
from tests.unit.lockservice.lock_calls import (
    UNKNOWN_ID,
    info,
    listed,
    liveness,
    lock_service,
    locked,
    opened,
    renewed,
    started_lock_service,
)


async def test_after_a_restart_no_session_is_dead_before_the_longest_ttl_has_passed() -> None:
    async with started_lock_service() as handler:
        await asyncio.sleep(59.9)
        assert await liveness(handler, UNKNOWN_ID) == pb.LIVENESS_UNDECIDED
        await asyncio.sleep(0.2)
        assert await liveness(handler, UNKNOWN_ID) == pb.LIVENESS_DEAD


async def test_after_a_restart_a_session_is_taken_over_under_its_id_without_its_locks() -> None:
    async with started_lock_service() as handler:
        with pytest.raises(NotReady):
            await locked(handler, UNKNOWN_ID, b"a")
        assert await renewed(handler, UNKNOWN_ID)
        assert await liveness(handler, UNKNOWN_ID) == pb.LIVENESS_ALIVE
        assert [session.locks for session in await listed(handler)] == [0]
        assert not await renewed(handler, UNKNOWN_ID)
        assert await locked(handler, UNKNOWN_ID, b"a") == [True]


async def test_a_session_that_would_have_expired_anyway_is_not_taken_over() -> None:
    async with started_lock_service() as handler:
        await asyncio.sleep(3.1)
        with pytest.raises(SessionExpired):
            await renewed(handler, UNKNOWN_ID, info(3_000))
        with pytest.raises(SessionExpired):
            await renewed(handler, UNKNOWN_ID, info(10_000))
        assert await renewed(handler, b"another sessions", info(10_000))


@pytest.mark.parametrize("ended", [True, False])
async def test_a_session_that_died_after_the_restart_is_not_revived_in_the_grace_period(
    ended: bool,
) -> None:
    async with started_lock_service() as handler:
        session_id = await opened(handler, info(500))
        if ended:
            await handler.end_session(pb.EndSessionRequest(session_id=session_id))
        else:
            await asyncio.sleep(0.6)
        with pytest.raises(SessionExpired):
            await renewed(handler, session_id, info(60_000))
        assert await liveness(handler, session_id) == pb.LIVENESS_DEAD


async def test_the_end_of_a_session_that_has_not_reported_yet_is_not_promised() -> None:
    """It expires by itself. If its end were remembered, any caller could fill the memory."""
    async with started_lock_service() as handler:
        with pytest.raises(NotReady):
            await handler.end_session(pb.EndSessionRequest(session_id=UNKNOWN_ID))
        assert await renewed(handler, UNKNOWN_ID)
        await handler.end_session(pb.EndSessionRequest(session_id=UNKNOWN_ID))
        await handler.end_session(pb.EndSessionRequest(session_id=UNKNOWN_ID))
        with pytest.raises(SessionExpired):
            await renewed(handler, UNKNOWN_ID)
        assert await liveness(handler, UNKNOWN_ID) == pb.LIVENESS_DEAD


async def test_strangers_with_invented_ids_end_no_living_session() -> None:
    async with started_lock_service(LockServiceLimits(buried_max=3)) as handler:
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
    async with started_lock_service(LockServiceLimits(buried_max=1)) as handler:
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


async def test_the_dead_are_forgotten_when_no_session_can_be_taken_over_any_more() -> None:
    """Otherwise the memory used after one restart would be kept until the next."""
    async with started_lock_service() as handler:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(2_000):
            session_id = await opened(handler)
            await handler.end_session(pb.EndSessionRequest(session_id=session_id))
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
