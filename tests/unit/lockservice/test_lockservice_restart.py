"""What the lock service does not know after a restart, and what it slept through."""

from __future__ import annotations

import asyncio
import random

import pytest

from percolator.errors import NotReady, SessionExpired
from percolator.testing.virtual_time import VirtualClock
from percolator.v1 import lockservice_pb2 as wire
from services.lockservice.handler import LockServiceHandler
from services.lockservice.limits import Limits
from tests.unit.lockservice.lock_calls import (
    NOBODY,
    info,
    listed,
    liveness,
    lock_service,
    locked,
    opened,
    renewed,
    started_lock_service,
)


async def test_after_a_restart_nobody_is_dead_before_the_longest_ttl_has_passed() -> None:
    async with started_lock_service() as handler:
        await asyncio.sleep(59.9)
        assert await liveness(handler, NOBODY) == wire.LIVENESS_UNDECIDED
        await asyncio.sleep(0.2)
        assert await liveness(handler, NOBODY) == wire.LIVENESS_DEAD


async def test_after_a_restart_a_session_is_taken_over_under_its_id_without_its_locks() -> None:
    async with started_lock_service() as handler:
        with pytest.raises(NotReady):
            await locked(handler, NOBODY, b"a")
        assert await renewed(handler, NOBODY)
        assert await liveness(handler, NOBODY) == wire.LIVENESS_ALIVE
        assert [session.locks for session in await listed(handler)] == [0]
        assert not await renewed(handler, NOBODY)
        assert await locked(handler, NOBODY, b"a") == [True]


async def test_a_session_that_would_have_expired_anyway_is_not_taken_over() -> None:
    async with started_lock_service() as handler:
        await asyncio.sleep(3.1)
        with pytest.raises(SessionExpired):
            await renewed(handler, NOBODY, info(3_000))
        with pytest.raises(SessionExpired):
            await renewed(handler, NOBODY, info(10_000))
        assert await renewed(handler, b"another sessions", info(10_000))


@pytest.mark.parametrize("ended", [True, False])
async def test_who_died_after_the_restart_is_not_revived_by_its_grace(ended: bool) -> None:
    async with started_lock_service() as handler:
        session_id = await opened(handler, info(500))
        if ended:
            await handler.end_session(wire.EndSessionRequest(session_id=session_id))
        else:
            await asyncio.sleep(0.6)
        with pytest.raises(SessionExpired):
            await renewed(handler, session_id, info(60_000))
        assert await liveness(handler, session_id) == wire.LIVENESS_DEAD


async def test_who_ended_before_it_was_taken_over_is_not_revived() -> None:
    async with started_lock_service() as handler:
        await handler.end_session(wire.EndSessionRequest(session_id=NOBODY))
        with pytest.raises(SessionExpired):
            await renewed(handler, NOBODY)
        assert await liveness(handler, NOBODY) == wire.LIVENESS_DEAD


async def test_when_the_dead_cannot_all_be_remembered_nobody_is_taken_over() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    handler = LockServiceHandler(clock, random.Random(3), Limits(buried_max=1))
    for session_id in [await opened(handler), await opened(handler)]:
        await handler.end_session(wire.EndSessionRequest(session_id=session_id))
        with pytest.raises(SessionExpired):
            await renewed(handler, session_id)
    with pytest.raises(SessionExpired):
        await renewed(handler, NOBODY)


async def test_what_the_process_slept_through_counts_against_nobody() -> None:
    async with lock_service() as handler:
        session_id = await opened(handler)
        await asyncio.sleep(1)

    # Nothing of the service runs for an hour: that is how it feels to be stopped.
    await asyncio.sleep(3_600)
    living = asyncio.create_task(handler.expire_forever())
    assert await liveness(handler, session_id) == wire.LIVENESS_ALIVE
    await asyncio.sleep(1.7)
    assert await liveness(handler, session_id) == wire.LIVENESS_ALIVE
    await asyncio.sleep(0.2)
    assert await liveness(handler, session_id) == wire.LIVENESS_DEAD
    living.cancel()
