"""Real lock services behind a network that can be cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from percolator.errors import PercolatorError, Unavailable
from percolator.services.lockservice.handler import LockServiceHandler
from percolator.services.lockservice.sessions import LockServiceLimits
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire.sessions import Sessions, SessionSettings
from percolator.world import (
    RequestT,
    ResponseT,
    UnaryCall,
    UnaryMethod,
    World,
)
from tests.simulation.virtual_time import VirtualClock
from tests.unit.unary_network import UnaryNetwork

A, B = "lock-a:7102", "lock-b:7102"
ROUND_TRIP_SECONDS = 0.01
HANDLERS = {
    "OpenSession": "open_session",
    "RenewSession": "renew_session",
    "EndSession": "end_session",
    "CheckSessions": "check_sessions",
    "ListSessions": "list_sessions",
    "TryLock": "try_lock",
    "RenewLocks": "renew_locks",
    "Unlock": "unlock",
}


class LockServices(UnaryNetwork):
    """A network with lock services at some addresses, which can be cut off and restarted."""

    def __init__(self) -> None:
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.handlers: dict[str, LockServiceHandler] = {}
        self.refusing: set[str] = set()
        self.silent: set[str] = set()
        self.answer_seconds = ROUND_TRIP_SECONDS / 2
        self.calls: list[tuple[str, str, Any]] = []
        self.dialled: list[str] = []
        self.clients: list[Sessions] = []
        """They are closed at the end, after those that a test closes itself."""
        self._living: dict[str, asyncio.Task[None]] = {}
        self._starts = 0

    def start(self, address: str) -> None:
        """Starts a service, also again: a restarted one knows no sessions."""
        self.stop(address)
        self._starts += 1
        handler = LockServiceHandler(self.clock, random.Random(self._starts), LockServiceLimits())
        self.handlers[address] = handler
        self._living[address] = asyncio.create_task(handler.expire_forever())
        self.refusing.discard(address)

    def stop(self, address: str) -> None:
        self.refusing.add(address)
        if address in self._living:
            self._living.pop(address).cancel()

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        self.dialled.append(f"{address} {method.path.rpartition('/')[2]}")
        return super().unary(address, method)

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> Any:
        name = method.path.rpartition("/")[2]
        self.calls.append((address, name, request))
        if address in self.refusing:
            raise Unavailable("connection refused", where=address)
        if address in self.silent:
            await asyncio.sleep(timeout)
            raise Unavailable("no answer", where=address)
        await asyncio.sleep(ROUND_TRIP_SECONDS / 2)
        answer = await getattr(self.handlers[address], HANDLERS[name])(request)
        await asyncio.sleep(self.answer_seconds)
        return answer

    async def close(self) -> None:
        for sessions in self.clients:
            await sessions.close()
        for address in list(self._living):
            self.stop(address)

    def alive(self, address: str) -> list[pb.Session]:
        """The sessions that this service knows."""
        handler = self.handlers[address]
        sessions, _ = handler.sessions.page(0, 100)
        return [handler.describe(session) for session in sessions]

    async def seconds_of(self, work: Awaitable[object]) -> float:
        before = self.clock.monotonic_seconds()
        await work
        return self.clock.monotonic_seconds() - before

    def count(self, name: str) -> int:
        return sum(called == name for _, called, _ in self.calls)


@asynccontextmanager
async def lock_services(*addresses: str) -> AsyncIterator[LockServices]:
    services = LockServices()
    for address in addresses:
        services.start(address)
    try:
        yield services
    finally:
        await services.close()


def client(
    services: LockServices,
    *addresses: str,
    all_of: Sequence[str] = (A,),
    seed: int = 9,
    **more: Any,
) -> Sessions:
    """A client that knows these addresses, or those of a list that may change."""
    world = World(services.clock, services, random.Random(seed))
    settings = more.pop("settings", SessionSettings(description="a test"))
    sessions = Sessions(world, addresses or all_of, settings, **more)
    services.clients.append(sessions)
    return sessions


def held(sessions: Sessions) -> bytes | None:
    """Reads it through a function: the type checker must not assume that it stays the same."""
    return sessions.session_id


def problem(sessions: Sessions) -> PercolatorError | None:
    return sessions.last_error
