"""Calls that are repeated with another token: within their time, and nothing of an answer twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import grpc
import pytest
from google.protobuf.message import Message

from percolator.bigtable import channel
from percolator.bigtable.channel import BigtableNetwork
from percolator.bigtable.methods import CHECK_AND_MUTATE_ROW, READ_ROWS
from percolator.bigtable.tokens import Metadata, Token, Tokens
from percolator.errors import Unauthenticated
from percolator.v1 import bigtable_pb2 as pb

# Tokens are fetched in a thread.
pytestmark = pytest.mark.real_time

TOOK_SECONDS = 4.0
SECONDS = 10.0


class RefusingChannel:
    """Refuses each token after some time, and notes how much time each call was given."""

    def __init__(self, messages: int = 0) -> None:
        self.given_seconds: list[float] = []
        self.took_seconds = 0.0
        self._messages = messages
        """How many of an answer come before the refusal."""

    def unary_unary(self, path: str, **_: object) -> Callable[..., Awaitable[bytes]]:
        async def call(request: Message, timeout: float, metadata: Metadata) -> bytes:
            self._refuse(timeout)
            raise AssertionError

        return call

    def unary_stream(self, path: str, **_: object) -> Callable[..., RefusedStream]:
        return lambda request, timeout, metadata: RefusedStream(self._responses(timeout))

    async def _responses(self, timeout: float) -> AsyncGenerator[Message, None]:
        for _ in range(self._messages):
            yield pb.BigtableReadRowsResponse()
        self._refuse(timeout)

    def _refuse(self, timeout: float) -> None:
        self.given_seconds.append(timeout)
        self.took_seconds += TOOK_SECONDS
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAUTHENTICATED, grpc.aio.Metadata(), grpc.aio.Metadata(), "expired"
        )

    async def close(self) -> None:
        pass


class RefusedStream:
    """A call of it that streams."""

    def __init__(self, responses: AsyncGenerator[Message, None]) -> None:
        self._responses = responses

    def __aiter__(self) -> AsyncGenerator[Message, None]:
        return self._responses

    def cancel(self) -> None:
        pass


def network(refusing: RefusingChannel, monkeypatch: pytest.MonkeyPatch) -> BigtableNetwork:
    loop = asyncio.get_running_loop()
    began = loop.time()
    monkeypatch.setattr(channel, "_now", lambda: began + refusing.took_seconds)
    monkeypatch.setattr(grpc.aio, "secure_channel", lambda *_, **__: refusing)
    return BigtableNetwork(Tokens(lambda: Token("token", 3_600.0, "")))


async def read_into(found: list[pb.BigtableReadRowsResponse], over: BigtableNetwork) -> None:
    read = over.stream("bigtable:443", READ_ROWS)
    async for message in read(pb.BigtableReadRowsRequest(table_name="t"), SECONDS):
        found += [message]


async def test_a_repeated_call_has_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = RefusingChannel()
    over = network(refusing, monkeypatch)
    change = over.unary("bigtable:443", CHECK_AND_MUTATE_ROW)
    with pytest.raises(Unauthenticated):
        await change(pb.BigtableCheckAndMutateRowRequest(table_name="t"), SECONDS)
    with pytest.raises(Unauthenticated):
        await read_into([], over)
    assert refusing.given_seconds == [SECONDS, SECONDS - TOOK_SECONDS] * 2
    await over.close()


async def test_a_stream_that_has_begun_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = RefusingChannel(messages=3)
    over = network(refusing, monkeypatch)
    found: list[pb.BigtableReadRowsResponse] = []
    with pytest.raises(Unauthenticated):
        await read_into(found, over)
    assert len(found) == 3
    await over.close()
