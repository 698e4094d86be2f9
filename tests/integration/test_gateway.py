"""Gateways as processes: killed in the middle of commits, and called by generic clients."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import percolator
from percolator import Table, codecs
from percolator.errors import ConflictError, ExecutionUnknown, NotExecuted, OutcomeUnknown
from percolator.services.local.cluster import LocalCluster
from percolator.v1 import cluster_pb2
from percolator.v1 import gateway_pb2 as pb
from percolator.v1.cluster_pb2 import DescribeRequest
from percolator.v1.master_pb2 import CreateTableRequest, SetChangeFeedRequest
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.world import RequestT, ResponseT, UnaryMethod
from tests.documents.blocks import blocks
from tests.integration.command_line import CommandLine

pytestmark = pytest.mark.integration

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
    cluster: LocalCluster,
) -> None:
    addresses = cluster.gateway_address.split(",")
    network = GrpcNetwork()
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
    await network.close()


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
        network = GrpcNetwork()
        try:
            call = network.unary(address, methods.DESCRIBE)
            return await call(DescribeRequest(), CALL_SECONDS)
        finally:
            await network.close()

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
    assert done.stderr == ""
    assert done.returncode == 0
    committed = re.findall(r'"commitTimestamp": "(\d+)"\n}', done.stdout)
    first, again, followed = committed
    assert first == again, "the repeated commit got a different answer"
    *_, changes = done.stdout.split('"commitTimestamp": "' + followed + '"\n}')
    assert followed in changes, "the stream of changes lacks the last commit"
    assert base64.b64encode(b"Bergen").decode() in changes
    scanned = done.stdout[done.stdout.rindex('"rows"') :]
    for text in ("bob", "Oslo", "joe", "Rome"):
        assert base64.b64encode(text.encode()).decode() in scanned
