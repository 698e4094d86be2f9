"""Streams in progress when the token of their caller is withdrawn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from percolator.errors import NotReady, Unauthenticated, UsageError
from percolator.services.chassis.frames import Caller, FrameCallContext, FrameCallFailed
from percolator.services.chassis.gate import Access, Gate, Tokens
from percolator.services.chassis.metrics import RpcMetrics
from percolator.services.chassis.rpc import Exposed, RpcEdge
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.credentials import SCHEME
from percolator.wire.methods import WATCH_NOTIFICATIONS
from percolator.wire.roles import Role
from percolator.wire.status import from_status
from percolator.wire.tokens import token_entry
from tests.simulation.virtual_time import VirtualClock

SHOP, BOSS = token_entry("shop", Role.CLIENT, "s3cret"), token_entry("boss", Role.ADMIN, "b0ss")
SERVICE = pb.DESCRIPTOR.services_by_name["TabletServerService"]


class EndlessHandler:
    """Streams an answer each second; the other methods are not called."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.is_closed = False

    async def watch_notifications(
        self, request: pb.WatchNotificationsRequest
    ) -> AsyncIterator[pb.WatchNotificationsResponse]:
        try:
            while True:
                await self._clock.sleep(1)
                yield pb.WatchNotificationsResponse()
        finally:
            self.is_closed = True

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return lambda _: UsageError(name)


class Details(NamedTuple):
    """A `grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = ()


class StreamContext(FrameCallContext):
    """A call over gRPC, as far as its edge looks at it."""

    def peer(self) -> str:
        return "the watcher"

    async def read(self) -> bytes:
        return b""


class Watcher:
    """A caller who watches over the edge of a server with tokens."""

    def __init__(self, tokens: Path) -> None:
        loop = asyncio.get_running_loop()
        clock = VirtualClock(loop)
        self.handler = EndlessHandler(clock)
        known = Tokens(tokens)
        self._following = asyncio.create_task(known.follow(clock))
        self._edge = RpcEdge(Gate(10, 1024), RpcMetrics(), clock, Access(known))
        self._edge.expose([Exposed(SERVICE, self.handler)])
        self._caller = Caller(SCHEME + "s3cret", (), "ipv4:192.0.2.1:5000")
        self._loop = loop

    async def answers(self) -> AsyncIterator[bytes]:
        context = StreamContext(self._caller, self._loop.time() + 3600, self._loop.time)
        handler = self._edge.service(Details(WATCH_NOTIFICATIONS.path))
        assert handler is not None
        try:
            async for answer in handler.stream_stream(None, context):
                yield answer
        except FrameCallFailed as failed:
            raise from_status(failed.status) from None

    def leave(self) -> None:
        self._following.cancel()


async def several(answers: AsyncIterator[bytes]) -> None:
    """Takes the answers of ten seconds."""
    for _ in range(10):
        await anext(answers)


async def test_a_stream_ends_within_seconds_once_its_token_is_withdrawn(tmp_path: Path) -> None:
    """Otherwise its owner could go on reading for as long as the server runs."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(SHOP + BOSS)
    watcher = Watcher(tokens)
    answers = watcher.answers()
    await several(answers)
    tokens.write_text(BOSS)
    # Not `Unauthenticated`: programs take that for a call of which nothing was answered.
    with pytest.raises(NotReady, match="token"):
        await several(answers)
    assert watcher.handler.is_closed
    with pytest.raises(Unauthenticated):
        await anext(watcher.answers())
    watcher.leave()


async def test_a_stream_goes_on_when_tokens_of_others_are_withdrawn(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(SHOP + BOSS)
    watcher = Watcher(tokens)
    answers = watcher.answers()
    await anext(answers)
    tokens.write_text(SHOP)
    await several(answers)
    watcher.leave()
