"""Short names for the calls that the tests of the lock service make."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from percolator.services.chassis import rpc
from percolator.services.chassis.access import CallerIdentity
from percolator.services.lockservice.handler import LockServiceHandler
from percolator.services.lockservice.sessions import LockServiceLimits
from percolator.v1 import lockservice_pb2 as pb
from tests.simulation.virtual_time import VirtualClock

UNKNOWN_ID = b"sixteen bytes id"


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


@asynccontextmanager
async def lock_service(
    limits: LockServiceLimits | None = None,
) -> AsyncIterator[LockServiceHandler]:
    """A lock service whose grace period after the start is over."""
    async with started_lock_service(limits) as handler:
        await asyncio.sleep(61)
        yield handler


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
