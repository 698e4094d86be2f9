"""Connections to servers that are no longer called are closed, and opened again when needed."""

from __future__ import annotations

import asyncio
import socket

import pytest

from percolator.errors import Unavailable
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.wire import by_address
from percolator.wire.methods import GET_TIMESTAMPS
from tests.unit.chassis.framed_edge import SECONDS, Framed, echo, framed
from tests.unit.chassis.test_frames import Held

pytestmark = pytest.mark.real_time


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever no call uses at the moment counts as long unused."""
    monkeypatch.setattr(by_address, "UNUSED_SECONDS", 0.0)


async def _call_another_server(edge: Framed) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        call = edge.network.unary(f"127.0.0.1:{unused.getsockname()[1]}", GET_TIMESTAMPS)
        with pytest.raises(Unavailable):
            await call(GetTimestampsRequest(count=1), SECONDS)


async def test_an_unused_connection_for_frames_ends_and_the_same_call_connects_again() -> None:
    async with framed(echo) as edge:
        kept_call = edge.network.unary(edge.address, GET_TIMESTAMPS)
        await edge.until_connected()
        connection = edge.network._frames._peers.get(edge.address).connection
        assert connection is not None
        await _call_another_server(edge)
        await asyncio.wait_for(connection.ended, SECONDS)
        assert (await kept_call(GetTimestampsRequest(count=3), SECONDS)).count == 3
        await edge.until_connected()
        assert (await kept_call(GetTimestampsRequest(count=4), SECONDS)).count == 4


async def test_an_unused_channel_is_closed_and_the_same_call_opens_another() -> None:
    async with framed(echo, offers=False) as edge:
        kept_call = edge.network.unary(edge.address, GET_TIMESTAMPS)
        assert (await kept_call(GetTimestampsRequest(count=3), SECONDS)).count == 3
        former = edge.network.line(edge.address)
        await _call_another_server(edge)
        assert edge.network.line(edge.address) is not former
        assert (await kept_call(GetTimestampsRequest(count=4), SECONDS)).count == 4
        with pytest.raises(Exception, match="closed"):
            await former.channel.unary_unary(GET_TIMESTAMPS.path)(b"")


@pytest.mark.parametrize("in_frames", [True, False])
async def test_a_call_in_progress_keeps_its_connection(in_frames: bool) -> None:
    held = Held()
    async with framed(held.answer, offers=in_frames) as edge:
        if in_frames:
            await edge.until_connected()
        connection = edge.network._frames._peers.get(edge.address).connection
        line = edge.network.line(edge.address)
        held.hold = True
        calling = asyncio.create_task(edge.timestamps(3))
        await asyncio.wait_for(held.asked.wait(), SECONDS)
        await _call_another_server(edge)
        if in_frames:
            assert edge.network._frames._peers.get(edge.address).connection is connection
        else:
            assert edge.network.line(edge.address) is line
        held.let_go.set()
        assert (await calling).count == 3


async def test_a_connection_is_in_use_as_long_as_its_server_is_heard() -> None:
    async with framed(echo) as edge:
        connection = await edge.connected()
        began = connection.unused_since()
        await connection.call(
            GET_TIMESTAMPS.path, GetTimestampsRequest().SerializeToString(), SECONDS
        )
        assert connection._look is not None
        connection._look.cancel()
        connection._look_after()
        last = connection.unused_since()
        assert began is not None
        assert last is not None
        assert last > began
        connection._look.cancel()
        connection._look_after()
        assert connection.unused_since() == last, "nothing was heard since"
        connection.close()
