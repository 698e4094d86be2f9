"""Gateways as processes: killed in the middle of commits, and called by generic clients."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import percolator
from percolator import Table, codecs
from percolator.errors import (
    ConflictError,
    ExecutionUnknown,
    NotExecuted,
    OutcomeUnknown,
    PercolatorError,
    Unavailable,
    UsageError,
)
from percolator.services.chassis.server import ServerTls
from percolator.services.local.cluster import LocalCluster
from percolator.v1 import cells_pb2, cluster_pb2
from percolator.v1 import gateway_pb2 as pb
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.v1.cluster_pb2 import DescribeRequest
from percolator.v1.master_pb2 import CreateTableRequest, SetChangeFeedRequest
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.v1.tabletserver_pb2 import ScanRequest
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.credentials import PLAIN_TEXT, Credentials
from percolator.wire.methods import GET_TIMESTAMPS, SCAN
from percolator.wire.tls import Tls, TlsMaterial
from percolator.world import RequestT, ResponseT, UnaryMethod
from tests.documents.commands import blocks
from tests.integration.command_line import CommandLine
from tests.integration.networks import grpc_network
from tests.unit.wire.certificates import Certificates, made

ROOT = Path(__file__).parents[2]
TABLE = "bank"
COLUMN = b"balance"
ACCOUNTS = 12
OPENING_BALANCE = 100
CALL_SECONDS = 5.0
PATIENCE_SECONDS = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    data = tmp_path_factory.mktemp("cluster")
    with LocalCluster(data, tablet_servers=2, gateways=2) as started:
        yield started


def account(number: int) -> bytes:
    return b"account-%02d" % number


def put(row: bytes, balance: int) -> pb.CellWrite:
    return pb.CellWrite(
        kind=pb.CellWrite.KIND_PUT,
        table=TABLE,
        row=row,
        column=COLUMN,
        value=balance.to_bytes(8, "big", signed=True),
    )


class Teller:
    """Transfers money with bare messages, as a client in any language would."""

    def __init__(self, network: GrpcNetwork, addresses: list[str], seed: int) -> None:
        self._network = network
        self._addresses = addresses
        self._turn = seed
        self._chance = random.Random(seed)
        self.committed: dict[int, tuple[pb.CommitRequest, int]] = {}
        """By start timestamp: the acknowledged transfer and its commit timestamp."""
        self.has_committed = asyncio.Event()
        self.repeats = 0

    async def transfer(self) -> None:
        while True:
            start = (await self.anywhere(methods.BEGIN, pb.BeginRequest())).start_timestamp
            source, target = self._chance.sample(range(ACCOUNTS), 2)
            queries = [
                pb.RowQuery(table=TABLE, row=account(number), columns=[COLUMN])
                for number in (source, target)
            ]
            found = await self.anywhere(
                methods.GET, pb.GetRequest(start_timestamp=start, rows=queries)
            )
            has, gets = (
                int.from_bytes(row.cells[0].value, "big", signed=True) for row in found.rows
            )
            writes = [put(account(source), has - 1), put(account(target), gets + 1)]
            request = pb.CommitRequest(start_timestamp=start, writes=writes)
            try:
                told = await self.anywhere(methods.COMMIT, request)
            except ConflictError:
                continue
            self.committed[start] = request, told.commit_timestamp
            self.has_committed.set()
            self.has_committed = asyncio.Event()
            return

    async def anywhere(
        self, method: UnaryMethod[RequestT, ResponseT], request: RequestT
    ) -> ResponseT:
        """Makes the same call to one gateway after another until one answers."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                address = self._addresses[self._turn % len(self._addresses)]
                try:
                    return await self._network.unary(address, method)(request, CALL_SECONDS)
                except (OutcomeUnknown, ExecutionUnknown, NotExecuted):
                    self.repeats += 1
                    self._turn += 1
                    await asyncio.sleep(0.02)


async def total(network: GrpcNetwork, address: str) -> int:
    start = (
        await network.unary(address, methods.BEGIN)(pb.BeginRequest(), CALL_SECONDS)
    ).start_timestamp
    scan = network.stream(address, methods.SCAN_TABLE)
    request = pb.ScanTableRequest(start_timestamp=start, table=TABLE, columns=[COLUMN])
    return sum(
        [
            int.from_bytes(row.cells[0].value, "big", signed=True)
            async for page in scan(request, CALL_SECONDS)
            for row in page.rows
        ]
    )


@pytest.mark.chaos
@pytest.mark.timeout(10 * PATIENCE_SECONDS)
async def test_whatever_is_killed_no_commit_is_lost_and_another_gateway_knows_the_outcome(
    network: GrpcNetwork,
    cluster: LocalCluster,
) -> None:
    addresses = cluster.gateway_address.split(",")
    opening = Teller(network, addresses, 0)
    await network.unary(addresses[0], methods.CREATE_TABLE)(
        CreateTableRequest(name=TABLE, splits=[account(ACCOUNTS // 2)]), CALL_SECONDS
    )
    start = (await opening.anywhere(methods.BEGIN, pb.BeginRequest())).start_timestamp
    writes = [put(account(number), OPENING_BALANCE) for number in range(ACCOUNTS)]
    await opening.anywhere(methods.COMMIT, pb.CommitRequest(start_timestamp=start, writes=writes))
    stopped = False
    tellers = [Teller(network, addresses, seed) for seed in range(6)]

    async def work(teller: Teller) -> None:
        while not stopped:
            await teller.transfer()

    working = [asyncio.ensure_future(work(teller)) for teller in tellers]
    for name in ("gateway", "tabletserver-1", "gateway-2"):
        await _until_all_commit(tellers)
        # In the middle of commits: six tellers never pause.
        await asyncio.to_thread(cluster.processes[name].kill)
        await _until_all_commit(tellers)
        await asyncio.to_thread(cluster.restart, name)
    await _until_all_commit(tellers)
    stopped = True
    await asyncio.gather(*working)
    assert sum(teller.repeats for teller in tellers) > 0, (
        "no teller noticed that anything was killed"
    )
    assert await total(network, addresses[0]) == ACCOUNTS * OPENING_BALANCE

    # A repeated request gets the same answer from gateways that have forgotten everything.
    for teller in tellers:
        for request, commit in list(teller.committed.values())[-4:]:
            for address in addresses:
                again = await network.unary(address, methods.COMMIT)(request, CALL_SECONDS)
                assert again.commit_timestamp == commit
    assert await total(network, addresses[1]) == ACCOUNTS * OPENING_BALANCE


async def _until_all_commit(tellers: list[Teller]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        for teller in tellers:
            had = len(teller.committed)
            while len(teller.committed) < had + 3:
                await teller.has_committed.wait()


def test_a_program_using_the_library_continues_when_its_gateway_is_killed(
    cluster: LocalCluster,
) -> None:
    table = Table("through")
    number = table.column("number", codecs.integer)
    with percolator.connect(cluster.gateway_address) as db:
        db.create_table(table, exist_ok=True)
        with db.transaction() as tx:
            tx.set("a", number, 1)
        cluster.processes["gateway"].kill()
        try:
            for _ in range(10):
                with db.transaction(timeout=PATIENCE_SECONDS) as tx:
                    tx.set("a", number, tx.get("a", number, default=0) + 1)
            with db.snapshot() as snapshot:
                assert snapshot.get("a", number) == 11
        finally:
            cluster.restart("gateway")


def test_describing_the_cluster_lists_its_gateways_and_the_route_through_them(
    cluster: LocalCluster,
) -> None:
    async def described(address: str) -> cluster_pb2.DescribeResponse:
        async with grpc_network() as network:
            call = network.unary(address, methods.DESCRIBE)
            return await call(DescribeRequest(), CALL_SECONDS)

    near, far = (
        asyncio.run(described(address))
        for address in (cluster.address, cluster.gateway_address.split(",")[0])
    )
    assert (near.route, far.route) == (cluster_pb2.ROUTE_DIRECT, cluster_pb2.ROUTE_THROUGH)
    assert near.cluster_id == far.cluster_id
    listed = [one.address for one in far.servers if one.kind == cluster_pb2.SERVICE_KIND_GATEWAY]
    assert listed == sorted(cluster.gateway_address.split(","))


def test_commands_work_through_a_gateway(cluster: LocalCluster) -> None:
    command = CommandLine(cluster.gateway_address)
    command.run("tables", "create", "by-hand")
    assert "by-hand" in command.text("tables", "list")
    assert int(command.text("timestamp")) > 0
    assert "gateway" in command.text("sessions"), (
        "the gateway's own session, which its locks carry, is not listed"
    )
    assert command.text("status").count("gateway") >= 2


def test_reflection_is_all_that_a_generic_client_needs(cluster: LocalCluster) -> None:
    """Does what grpcurl does: discovers services, methods and messages through reflection."""
    with grpc.insecure_channel(cluster.gateway_address.split(",")[1]) as channel:
        asked = reflection_pb2_grpc.ServerReflectionStub(channel)

        def ask(**request: str) -> reflection_pb2.ServerReflectionResponse:
            message = reflection_pb2.ServerReflectionRequest(**request)
            (answer,) = asked.ServerReflectionInfo(iter([message]), timeout=CALL_SECONDS)
            return answer

        services = [one.name for one in ask(list_services="").list_services_response.service]
        assert "percolator.v1.GatewayService" in services
        assert "percolator.v1.MasterService" in services
        pool = descriptor_pool.DescriptorPool()

        def learn(name: str) -> None:
            for raw in ask(file_by_filename=name).file_descriptor_response.file_descriptor_proto:
                proto = descriptor_pb2.FileDescriptorProto.FromString(raw)
                for needed in proto.dependency:
                    learn(needed)
                pool.Add(proto)

        learn("percolator/v1/gateway.proto")
        service = pool.FindServiceByName("percolator.v1.GatewayService")
        begin = service.FindMethodByName("Begin")
        request = message_factory.GetMessageClass(begin.input_type)()
        response = message_factory.GetMessageClass(begin.output_type)
        call = channel.unary_unary(
            f"/{service.full_name}/Begin", lambda one: one.SerializeToString(), response.FromString
        )
        assert call(request, timeout=CALL_SECONDS).start_timestamp > 0


def test_a_gateway_drains_is_healthy_and_counts_what_it_does(cluster: LocalCluster) -> None:
    process = cluster.processes["gateway"]
    ready = process.ready
    assert ready is not None
    with grpc.insecure_channel(ready.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        name = "percolator.v1.GatewayService"
        told = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=CALL_SECONDS)
        assert told.status == health_pb2.HealthCheckResponse.SERVING
        begin = channel.unary_unary(methods.BEGIN.path)
        begin(b"", timeout=CALL_SECONDS)
        with urllib.request.urlopen(f"http://{ready.metrics_address}/metrics") as page:
            text = page.read().decode()
        assert "percolator_gateway_commits_in_progress 0.0" in text
        assert 'percolator_rpc_finished_total{code="OK",method="Begin"' in text
        # A client keeps a watch open through the gateway and never ends it.
        oracle = cluster.processes["oracle"].ready
        assert oracle is not None
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(
            b"", metadata=[("percolator-server", oracle.server_id)]
        )
        next(watch)
        follow = _follower(channel)
        next(follow)
        process.send_signal(signal.SIGTERM)
        for endless in (watch, follow):
            with pytest.raises(grpc.RpcError, match="the gateway is shutting down") as caught:
                for _ in endless:
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert process.wait_stopped() == 0
    last = json.loads(process.last_words())
    assert last["event"] == "stopped"
    cluster.restart("gateway")


def _follower(channel: grpc.Channel) -> Iterator[bytes]:
    """The changes of a new table from now on."""
    table = CreateTableRequest(name="followed")
    feed = SetChangeFeedRequest(table=table.name, change_feed=True)
    for method, message in ((methods.CREATE_TABLE, table), (methods.SET_CHANGE_FEED, feed)):
        channel.unary_unary(method.path)(message.SerializeToString(), timeout=CALL_SECONDS)
    began = channel.unary_unary(methods.BEGIN.path)(b"", timeout=CALL_SECONDS)
    after = pb.BeginResponse.FromString(began).start_timestamp
    request = pb.FollowChangesRequest(table=table.name, after=after)
    changes: Iterator[bytes] = channel.unary_stream(methods.FOLLOW_CHANGES.path)(
        request.SerializeToString()
    )
    return changes


def test_the_commands_shown_in_the_guide_do_what_it_says(cluster: LocalCluster) -> None:
    guide = blocks(ROOT / "docs/gateway.md")
    shown = [block.text for block in guide if block.told("run by")]
    script = "\n".join(["set -euo pipefail", *shown])
    address = cluster.gateway_address.split(",")[0]
    assert "localhost:7110" in script
    tools = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", script.replace("localhost:7110", address)],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (0, "")
    committed = re.findall(r'"commitTimestamp": "(\d+)"\n}', done.stdout)
    first, again, _, followed = committed
    assert first == again, "the repeated commit got a different answer"
    *_, changes = done.stdout.split('"commitTimestamp": "' + followed + '"\n}')
    assert followed in changes, "the stream of changes lacks the last commit"
    assert base64.b64encode(b"Bergen").decode() in changes
    assert '"counted": "1"' in done.stdout
    scanned, found = done.stdout.split('"rows"')[-2:]
    assert base64.b64encode(b"ann").decode() in found
    for text in ("bob", "Oslo", "joe", "Rome"):
        assert base64.b64encode(text.encode()).decode() in scanned


# The real network with servers that answer nonsense, and after it has been closed.

__all__ = ["made"]


GARBAGE = b"\xff\xff\xff"


class _Liar(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method == SCAN.path:
            return grpc.unary_stream_rpc_method_handler(_lie_in_a_stream)
        return grpc.unary_unary_rpc_method_handler(_lie)


async def _lie(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return GARBAGE


async def _lie_in_a_stream(raw: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    yield GARBAGE


@asynccontextmanager
async def served(handler: grpc.GenericRpcHandler) -> AsyncIterator[str]:
    """The address of a server that answers with this handler."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_response_that_cannot_be_decoded_is_an_error(network: GrpcNetwork) -> None:
    async with served(_Liar()) as address:
        with pytest.raises(ExecutionUnknown, match="not a message of its type"):
            await network.unary(address, GET_TIMESTAMPS)(GetTimestampsRequest(count=1), 10.0)
        with pytest.raises(ExecutionUnknown, match="not a message of its type"):
            async for _ in network.stream(address, SCAN)(ScanRequest(), 10.0):
                pass


async def test_a_call_on_a_closed_network_raises_a_typed_error(network: GrpcNetwork) -> None:
    unary = network.unary("127.0.0.1:1", GET_TIMESTAMPS)
    stream = network.stream("127.0.0.1:1", SCAN)
    await network.close()
    with pytest.raises(UsageError, match="closed"):
        await unary(GetTimestampsRequest(count=1), 10.0)
    with pytest.raises(UsageError, match="closed"):
        async for _ in stream(ScanRequest(), 10.0):
            pass


def untried(files: Tls) -> Credentials:
    """Credentials from these files, as used by a program that does not validate them."""
    ca, certificate, key = (
        Path(name).read_bytes() for name in (files.ca, files.certificate, files.key)
    )
    return Credentials(TlsMaterial(files, ca, certificate, key))


async def met(address: str, credentials: Credentials) -> PercolatorError:
    async with grpc_network(credentials) as network:
        with pytest.raises(PercolatorError) as caught:
            await network.unary(address, GET_TIMESTAMPS)(GetTimestampsRequest(count=1), 10.0)
    return caught.value


async def test_a_server_answers_only_good_certificates_and_a_client_only_good_servers(
    certificates: Certificates,
) -> None:
    server, plain = grpc.aio.server(), grpc.aio.server()
    for one in (server, plain):
        one.add_generic_rpc_handlers((_Liar(),))
    secure = ServerTls(certificates.cluster).grpc_credentials()
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', secure)}"
    in_plain_text = f"127.0.0.1:{plain.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await plain.start()
    expired, _, _ = certificates.bad["expired"]
    try:
        # The call got as far as the invalid response.
        assert isinstance(await met(address, untried(certificates.client)), ExecutionUnknown)
        assert isinstance(await met(address, untried(expired)), Unavailable)
        assert isinstance(await met(address, untried(certificates.foreign)), Unavailable)
        assert isinstance(await met(address, PLAIN_TEXT), Unavailable)
        assert isinstance(await met(in_plain_text, untried(certificates.client)), Unavailable)
    finally:
        await server.stop(0)
        await plain.stop(0)


# How a call over a real channel ends, depending on what cancelled it.


@asynccontextmanager
async def silent_server() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Accepts calls and never answers them."""
    asked = asyncio.Event()

    async def never(request: bytes, context: object) -> bytes:
        asked.set()
        await asyncio.get_running_loop().create_future()
        return request

    async def never_any(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield await never(request, context)

    class Silent(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            if details.method == methods.SCAN.path:
                return grpc.unary_stream_rpc_method_handler(never_any)
            return grpc.unary_unary_rpc_method_handler(never)

    async with served(Silent()) as address:
        yield address, asked


async def _unary(network: GrpcNetwork, address: str) -> None:
    await network.unary(address, methods.READ)(tablets.ReadRequest(), 60.0)


async def _stream(network: GrpcNetwork, address: str) -> None:
    request = tablets.ScanRequest(range=cells_pb2.RowRange())
    async for _ in network.stream(address, methods.SCAN)(request, 60.0):
        pass


CALLS = {"unary": _unary, "stream": _stream}


@asynccontextmanager
async def endless_server() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Answers scans without an end. The event is set once one of them has ended."""
    ended = asyncio.Event()

    async def endless(request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b""
        finally:
            ended.set()

    class Endless(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_stream_rpc_method_handler(endless)

    async with served(Endless()) as address:
        yield address, ended


def test_a_stream_that_is_left_ends_at_once_without_the_garbage_collector() -> None:
    """A server would go on reading for it, and what has arrived would fill the memory."""

    async def leave() -> None:
        async with endless_server() as (address, ended):
            network = GrpcNetwork()
            pages = network.stream(address, methods.SCAN)(tablets.ScanRequest(), 60.0)
            await anext(pages)
            await pages.aclose()
            await asyncio.wait_for(ended.wait(), 20.0)
            left = [one for one in gc.get_objects() if isinstance(one, grpc.aio.UnaryStreamCall)]
            assert not left
            await network.close()

    gc.collect()
    gc.disable()
    try:
        asyncio.run(leave())
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_whose_channel_is_closed_raises_an_error_not_a_cancellation(kind: str) -> None:
    """The task that awaits the call was not cancelled, and must not end as if it had been."""

    async def close_meanwhile() -> None:
        async with silent_server() as (address, asked):
            network = GrpcNetwork()
            call = asyncio.create_task(CALLS[kind](network, address))
            await asked.wait()
            await network.close()
            with pytest.raises(Unavailable, match="channel was closed") as caught:
                await call
            assert address in caught.value.where

    asyncio.run(close_meanwhile())


@pytest.mark.parametrize("kind", CALLS)
def test_a_task_cancelled_while_the_channel_closes_stays_cancelled(kind: str) -> None:
    async def cancel_and_close() -> None:
        async with silent_server() as (address, asked):
            network = GrpcNetwork()
            call = asyncio.create_task(CALLS[kind](network, address))
            await asked.wait()
            call.cancel()
            await network.close()
            await asyncio.wait([call])
            assert call.cancelled()

    asyncio.run(cancel_and_close())
