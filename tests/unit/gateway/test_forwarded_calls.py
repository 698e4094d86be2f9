"""Forwarded calls arrive as they were sent, and their answers as the server gave them.

Calls to masters pass a gateway without naming one: the leader answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest

from percolator import errors
from percolator.services.gateway.service import GatewaySettings
from percolator.v1 import cluster_pb2, tabletserver_pb2
from percolator.v1.cluster_pb2 import Server
from percolator.v1.master_pb2 import CreateTableRequest, CreateTableResponse
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.wire import frames, methods
from percolator.wire.channels import SERVER_METADATA, GrpcNetwork
from percolator.wire.status import failure, from_rpc_error
from percolator.wire.through import ThroughNetwork, shutting_down
from tests.unit.gateway.gateways import (
    OWN,
    REQUEST_BYTES_MAX,
    SECONDS,
    Behind,
    ForwardingSite,
    another_gateway,
    site,
)


@pytest.fixture
def here() -> AbstractAsyncContextManager[ForwardingSite]:
    """A gateway and the servers behind it."""
    return site()


pytestmark = pytest.mark.real_time

# ---------------------------------------------------------------------------- as it was sent


async def test_bytes_and_metadata_arrive_unread_and_the_answer_comes_back(
    here: ForwardingSite,
) -> None:

    async def answer(raw: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("told", "by the way"),))
        return raw[::-1]

    here.behind.unary = answer
    for name in (here.server.server_id, here.server.address):
        assert await here.read(b"\xff no message", name, authorization="Bearer x") == (
            b"egassem on \xff"
        )
    assert here.behind.seen[0]["authorization"] == "Bearer x"
    assert here.behind.seen[0][SERVER_METADATA] == "behind-id", (
        "otherwise it took the caller for a gateway"
    )
    call = here.channel.unary_unary(methods.READ.path)(
        b"", metadata=[(SERVER_METADATA, "behind-id")]
    )
    await call
    assert ("told", "by the way") in tuple(await call.trailing_metadata())
    assert here.routes.calls.finished == {(methods.READ.path, "OK"): 3}
    assert (here.routes.calls.in_flight, here.gate.in_flight) == (0, 0)


async def test_the_deadline_travels_with_the_call(here: ForwardingSite) -> None:
    left: list[float] = []

    async def answer(raw: bytes, context: Any) -> bytes:
        left.append(context.time_remaining())
        return b""

    here.behind.unary = answer
    await here.read()
    # gRPC rounds the deadline up a little on each hop.
    assert SECONDS / 2 < left[0] < SECONDS * 1.1


async def test_a_failure_comes_back_with_its_code_message_and_trailers(
    here: ForwardingSite,
) -> None:
    moved = errors.TabletMoved("it went away", tablet_id=7, epoch=3)

    async def fail(raw: bytes, context: Any) -> bytes:
        await context.abort(*failure(moved))
        return b""

    here.behind.unary = fail
    with pytest.raises(errors.TabletMoved, match="it went away") as caught:
        await here.through.unary(here.server.address, methods.READ)(
            tabletserver_pb2.ReadRequest(), SECONDS
        )
    assert (caught.value.tablet_id, caught.value.epoch) == (7, 3)


async def test_a_server_that_is_gone_looks_the_same_as_without_a_gateway(
    here: ForwardingSite,
) -> None:
    here.master.servers = [
        Server(kind=cluster_pb2.SERVICE_KIND_ORACLE, server_id="dead", address="127.0.0.1:1")
    ]
    call = here.through.unary("127.0.0.1:1", methods.GET_TIMESTAMPS)
    with pytest.raises(errors.Unavailable):
        await call(GetTimestampsRequest(count=1), SECONDS)


async def error_of(call: Awaitable[Any]) -> errors.PercolatorError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, SECONDS)
    return from_rpc_error(caught.value, "")


@pytest.mark.parametrize("name", ["stranger", "127.0.0.1:22", "gateway:2", ""])
async def test_nothing_outside_the_cluster_is_dialled(here: ForwardingSite, name: str) -> None:
    call = here.channel.unary_unary(methods.READ.path)
    error = await error_of(call(b"", metadata=[(SERVER_METADATA, name)], timeout=SECONDS))
    assert isinstance(error, errors.UnknownServer)
    assert error.server == name
    assert error.retry is errors.Retry.SAFE


async def test_a_call_that_names_two_servers_is_refused(here: ForwardingSite) -> None:
    call = here.channel.unary_unary(methods.READ.path)
    metadata = [(SERVER_METADATA, "behind-id"), (SERVER_METADATA, "other")]
    with pytest.raises(grpc.aio.AioRpcError, match="expected one server"):
        await call(b"", metadata=metadata, timeout=SECONDS)


async def test_a_server_that_has_just_come_is_asked_for_once(here: ForwardingSite) -> None:

    async def answer(raw: bytes, context: Any) -> bytes:
        return b"here"

    newcomer = Server(
        kind=cluster_pb2.SERVICE_KIND_TABLET_SERVER,
        server_id="new",
        address=await here.listen(Behind(unary=answer)),
    )
    here.behind.unary = answer
    await here.read()
    here.master.servers.append(newcomer)
    before = here.master.asked
    await asyncio.sleep(0.25)  # unknown names are asked about five times a second at most
    answers = await asyncio.gather(*(here.read(server="new") for _ in range(5)))
    assert answers == [b"here"] * 5
    assert here.master.asked == before + 1


async def test_a_call_to_the_gateway_itself_is_answered_there(here: ForwardingSite) -> None:
    describe = here.channel.unary_unary(methods.DESCRIBE.path)
    for metadata in ([], [(SERVER_METADATA, "own-id")], [(SERVER_METADATA, "gateway:1")]):
        told = await describe(b"", metadata=metadata, timeout=SECONDS)
        assert cluster_pb2.DescribeResponse.FromString(told).cluster_id == "c"
    assert here.routes.calls.finished == {}


async def test_a_call_is_forwarded_once_although_the_gateway_is_listed_with_another_id(
    here: ForwardingSite,
) -> None:
    """As for a moment after a restart. It would pass the call on to itself until the deadline."""
    here.master.servers = [
        Server(kind=OWN.kind, server_id="former-id", address=here.address),
    ]
    error = await error_of(here.read(server="former-id"))
    assert isinstance(error, errors.UnknownServer)
    assert error.server == "former-id"
    assert "reach this gateway instead" in str(error)


async def test_a_request_above_the_limit_is_refused_by_the_gateway(here: ForwardingSite) -> None:
    call = here.through.unary(here.server.address, methods.READ)
    batch = tabletserver_pb2.ReadBatch(
        reads=[tabletserver_pb2.RowRead(row=b"x" * REQUEST_BYTES_MAX)]
    )
    with pytest.raises(errors.InvalidArgument, match="request"):
        await call(tabletserver_pb2.ReadRequest(batches=[batch]), SECONDS)
    assert here.behind.seen == []


# ---------------------------------------------------------------------------- streams


async def test_a_slow_reader_slows_down_the_server(here: ForwardingSite) -> None:
    made = 0
    block = bytes(64 << 10)

    async def produce(raw: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal made
        for _ in range(2_000):
            made += 1
            yield block

    here.behind.stream = produce
    call = here.scan()
    assert await call.read() == block
    # The server sends until every buffer on the way is full, and then waits.
    before = -1
    while made != before:
        before = made
        await asyncio.sleep(0.2)
    assert made < 1_000
    received = 1
    while await call.read() is not grpc.aio.EOF:
        received += 1
    assert received == 2_000


async def begun(
    here: ForwardingSite, *, streaming: bool, path: str = methods.SCAN.path
) -> tuple[asyncio.Future[Any], asyncio.Event]:
    """A call that the server does not answer, and whether it has ended there."""
    entered, ended = asyncio.Event(), asyncio.Event()

    async def wait(raw: bytes, context: Any) -> bytes:
        entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()
        return b""

    async def produce(raw: bytes, context: Any) -> AsyncIterator[bytes]:
        yield await wait(raw, context)

    here.behind.unary, here.behind.stream = wait, produce
    reading = asyncio.ensure_future(here.scan(path=path).read() if streaming else here.read())
    await asyncio.wait_for(entered.wait(), SECONDS)
    return reading, ended


@pytest.mark.parametrize("streaming", [False, True])
async def test_when_the_caller_goes_away_its_forwarded_call_is_cancelled(
    here: ForwardingSite,
    streaming: bool,
) -> None:
    reading, ended = await begun(here, streaming=streaming)
    reading.cancel()
    await asyncio.wait_for(ended.wait(), SECONDS)
    await asyncio.wait_for(here.gate.idle.wait(), SECONDS)


async def test_a_stream_fails_as_it_failed_at_the_server(here: ForwardingSite) -> None:

    async def produce(raw: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b""
        await context.abort(*failure(errors.SnapshotTooOld("gone", timestamp=1, safe_point=2)))

    here.behind.stream = produce
    scan = here.through.stream(here.server.address, methods.SCAN)
    pages = scan(tabletserver_pb2.ScanRequest(), SECONDS)
    await anext(pages)
    with pytest.raises(errors.SnapshotTooOld, match="gone"):
        await anext(pages)


async def test_methods_unknown_to_the_gateway_are_forwarded_both_ways(here: ForwardingSite) -> None:

    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for one in requests:
            yield one.upper()

    here.behind.both = echo
    call = here.channel.stream_stream("/later.Service/Talk")(
        metadata=[(SERVER_METADATA, "behind-id")], timeout=SECONDS
    )
    for word in (b"one", b"two"):
        await call.write(word)
        assert await call.read() == word.upper()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert here.routes.calls.finished == {("other", "OK"): 1}


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_call_whose_channel_is_closed_ends_for_its_caller(
    here: ForwardingSite, streaming: bool
) -> None:
    """As when the gateway's certificate was renewed, and a call has lasted for long after that."""
    path = methods.WATCH_NOTIFICATIONS.path
    reading, _ = await begun(here, streaming=streaming, path=path)
    await here.routes.line(here.server).channel.close()
    error = await error_of(reading)
    assert "channel was closed" in error.message
    assert error.retry is errors.Retry.UNKNOWN, "the server may have executed it"


def halting(here: ForwardingSite) -> asyncio.Event:
    """Streams from the server behind halt after their first message, until this is set."""
    going_on = asyncio.Event()

    async def produce(raw: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await going_on.wait()
        yield b"last"

    here.behind.stream = produce
    return going_on


async def test_a_stream_in_progress_keeps_its_connection_however_many_servers_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "UNUSED_SECONDS", 0.0)
    async with site() as here:
        going_on = halting(here)
        scan = here.scan()
        assert await scan.read() == b"first"
        line = here.routes.line(here.server)
        for port in range(1, 5):
            here.routes.line(Server(address=f"127.0.0.1:{port}"))
        assert here.routes.line(here.server) is line
        going_on.set()
        assert await scan.read() == b"last"
        assert await scan.read() is grpc.aio.EOF
        here.routes.line(Server(address="127.0.0.1:5"))
        assert here.routes.line(here.server) is not line


async def test_at_shutdown_watches_are_told_to_come_back_and_scans_finish(
    here: ForwardingSite,
) -> None:
    going_on = halting(here)
    watch = here.scan(path=methods.WATCH_NOTIFICATIONS.path)
    scan = here.scan()
    assert [await watch.read(), await scan.read()] == [b"first", b"first"]
    await here.routes.end_watches()
    assert isinstance(await error_of(watch.read()), errors.NotReady)
    going_on.set()
    assert await scan.read() == b"last"
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
        await here.scan(path=methods.WATCH_NOTIFICATIONS.path).read()


async def test_a_gateway_that_is_full_or_closing_forwards_nothing(here: ForwardingSite) -> None:
    here.gate.close(errors.NotReady("closing"))
    with pytest.raises(grpc.aio.AioRpcError, match="closing"):
        await here.read()
    with pytest.raises(grpc.aio.AioRpcError, match="closing"):
        await here.scan().read()
    assert here.behind.seen == []


# ---------------------------------------------------------------------------- gateways


async def timestamp_5(raw: bytes, context: Any) -> bytes:
    return GetTimestampsResponse(first=5, count=1).SerializeToString()


async def test_a_client_uses_another_gateway_when_one_is_gone(here: ForwardingSite) -> None:
    here.behind.unary = timestamp_5
    network = GrpcNetwork()
    through = ThroughNetwork(network, ["127.0.0.1:1", here.address])
    call = through.unary(here.server.address, methods.GET_TIMESTAMPS)
    with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1"):
        await call(GetTimestampsRequest(count=1), SECONDS)
    assert (await call(GetTimestampsRequest(count=1), SECONDS)).first == 5
    await network.close()


async def test_a_client_uses_another_gateway_when_one_is_shutting_down() -> None:
    async with site() as here, another_gateway(here) as (gate, through):
        here.behind.unary = timestamp_5
        gate.close(shutting_down(GatewaySettings.service, 0.1))
        call = through.unary(here.server.address, methods.GET_TIMESTAMPS)
        with pytest.raises(errors.NotReady):
            await call(GetTimestampsRequest(count=1), SECONDS)
        assert (await call(GetTimestampsRequest(count=1), SECONDS)).first == 5


async def test_a_watch_goes_on_at_another_gateway_when_one_is_shutting_down() -> None:
    async with site() as here, another_gateway(here) as (gate, through):

        async def pages(raw: bytes, context: Any) -> AsyncIterator[bytes]:
            yield b""

        here.behind.stream = pages
        gate.close(shutting_down(GatewaySettings.service, 0.1))
        watch = through.stream(here.server.address, methods.WATCH_NOTIFICATIONS)
        request = tabletserver_pb2.WatchNotificationsRequest()
        with pytest.raises(errors.NotReady):
            await anext(watch(request, SECONDS))
        assert [page async for page in watch(request, SECONDS)]


async def test_a_client_stays_with_a_gateway_if_a_server_behind_it_is_not_ready() -> None:
    """The other gateway may be gone, and each attempt there would cost a second."""
    async with site() as here, another_gateway(here) as (gate, through):
        asked = 0

        async def refuse(raw: bytes, context: Any) -> bytes:
            nonlocal asked
            asked += 1
            await context.abort(*failure(shutting_down("tabletserver", 0.1)))
            raise AssertionError

        here.behind.unary = refuse
        call = through.unary(here.server.address, methods.GET_TIMESTAMPS)
        for _ in range(2):
            with pytest.raises(errors.NotReady):
                await call(GetTimestampsRequest(count=1), SECONDS)
        assert asked == 2
        gate.close(errors.NotReady("closed, so that it shows who is asked"))
        with pytest.raises(errors.NotReady, match="who is asked"):
            await call(GetTimestampsRequest(count=1), SECONDS)


async def standby_and_leader(here: ForwardingSite) -> list[str]:
    """Adds two masters. Returns which of them is asked, as it happens, by the name in the call."""
    asked: list[str] = []

    def master(answer: errors.PercolatorError | None) -> Behind:
        async def create(raw: bytes, context: Any) -> bytes:
            asked.append(dict(context.invocation_metadata())[SERVER_METADATA])
            if answer is not None:
                await context.abort(*failure(answer))
            return CreateTableResponse(created=True).SerializeToString()

        return Behind(unary=create)

    both = {"standby": master(errors.NotReady("ask the leader")), "leader": master(None)}
    here.master.servers += [
        Server(kind=cluster_pb2.SERVICE_KIND_MASTER, server_id=name, address=await here.listen(one))
        for name, one in both.items()
    ]
    return asked


async def test_calls_to_masters_need_no_server_name_and_a_standby_is_skipped(
    here: ForwardingSite,
) -> None:
    asked = await standby_and_leader(here)
    create = here.through.unary(here.address, methods.CREATE_TABLE)
    for _ in range(3):
        assert (await create(CreateTableRequest(name="t"), SECONDS)).created
    assert asked == ["standby", "leader", "leader", "leader"], "who leads is remembered"


async def test_who_leads_is_remembered_while_calls_to_other_servers_are_forwarded(
    here: ForwardingSite,
) -> None:
    async def answer(raw: bytes, context: Any) -> bytes:
        return b""

    here.behind.unary = answer
    asked = await standby_and_leader(here)
    create = here.through.unary(here.address, methods.CREATE_TABLE)
    await create(CreateTableRequest(name="t"), SECONDS)
    await here.read()
    await create(CreateTableRequest(name="t"), SECONDS)
    assert asked == ["standby", "leader", "leader"]


@pytest.mark.parametrize("gone", [["127.0.0.1:1"], ["127.0.0.1:1", "127.0.0.1:2"]], ids=len)
async def test_masters_that_are_gone_fail_one_call_each_and_do_not_hide_the_one_that_is_there(
    here: ForwardingSite, gone: list[str]
) -> None:
    async def create(raw: bytes, context: Any) -> bytes:
        return CreateTableResponse(created=True).SerializeToString()

    there = await here.listen(Behind(unary=create))
    here.master.servers += [
        Server(kind=cluster_pb2.SERVICE_KIND_MASTER, server_id=address, address=address)
        for address in (*gone, there)
    ]
    call = here.through.unary(here.address, methods.CREATE_TABLE)
    for _ in gone:
        with pytest.raises(errors.Unavailable):
            await call(CreateTableRequest(name="t"), SECONDS)
    for _ in range(3):
        assert (await call(CreateTableRequest(name="t"), SECONDS)).created
