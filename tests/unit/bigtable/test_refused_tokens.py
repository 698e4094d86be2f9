"""Calls that are repeated with another token: within their time, and nothing of an answer twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from percolator.bigtable import channel
from percolator.bigtable.channel import BigtableNetwork
from percolator.bigtable.http2.headers import Metadata
from percolator.bigtable.http2.status import CallFailed, Code
from percolator.bigtable.methods import CHECK_AND_MUTATE_ROW, READ_ROWS
from percolator.bigtable.tokens import Token, Tokens
from percolator.errors import Unauthenticated
from percolator.v1 import bigtable_pb2 as pb

# Tokens are fetched in a thread.
pytestmark = pytest.mark.real_time

TOOK_SECONDS = 4.0
SECONDS = 10.0


class RefusingLane:
    """Refuses each token after some time, of which it says how much it was given."""

    calls_max = 100

    def __init__(self, messages: int = 0) -> None:
        self.in_flight = 0
        self.given_seconds: list[float] = []
        self.messages = messages
        """So many of an answer come before the refusal."""
        self.took_seconds = 0.0

    async def unary(self, path: str, request: bytes, timeout: float, metadata: Metadata) -> bytes:
        self.refuse(timeout)
        raise AssertionError

    async def stream(
        self, path: str, request: bytes, timeout: float, metadata: Metadata
    ) -> AsyncGenerator[bytes, None]:
        for _ in range(self.messages):
            yield pb.BigtableReadRowsResponse().SerializeToString()
        self.refuse(timeout)

    def refuse(self, timeout: float) -> None:
        self.given_seconds.append(timeout)
        self.took_seconds += TOOK_SECONDS
        raise CallFailed(Code.UNAUTHENTICATED, "expired")

    async def close(self) -> None:
        assert not self.in_flight


def network(lane: RefusingLane, monkeypatch: pytest.MonkeyPatch) -> BigtableNetwork:
    loop = asyncio.get_running_loop()
    began = loop.time()
    monkeypatch.setattr(channel, "_now", lambda: began + lane.took_seconds)
    monkeypatch.setattr(channel, "HttpLane", lambda address, tls: lane)
    return BigtableNetwork(Tokens(lambda: Token("token", 3_600.0, "")))


async def read_into(found: list[pb.BigtableReadRowsResponse], over: BigtableNetwork) -> None:
    read = over.stream("bigtable", READ_ROWS)
    async for message in read(pb.BigtableReadRowsRequest(table_name="t"), SECONDS):
        found += [message]


async def test_a_repeated_call_has_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = RefusingLane()
    over = network(lane, monkeypatch)
    change = over.unary("bigtable", CHECK_AND_MUTATE_ROW)
    with pytest.raises(Unauthenticated):
        await change(pb.BigtableCheckAndMutateRowRequest(table_name="t"), SECONDS)
    with pytest.raises(Unauthenticated):
        await read_into([], over)
    assert lane.given_seconds == [SECONDS, SECONDS - TOOK_SECONDS] * 2
    await over.close()


async def test_a_stream_that_has_begun_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = RefusingLane(messages=3)
    over = network(lane, monkeypatch)
    found: list[pb.BigtableReadRowsResponse] = []
    with pytest.raises(Unauthenticated):
        await read_into(found, over)
    assert len(found) == 3
    await over.close()
