"""Several gateways around one cluster in memory, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from percolator import errors
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.errors import Unavailable
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.services.chassis.rpc import Exposed, Gate, Quota, RpcEdge, RpcMetrics
from percolator.services.gateway.commits import Commits
from percolator.services.gateway.forwarded_call import ServerRoutes
from percolator.services.gateway.gateway_handler import GatewayHandler
from percolator.services.gateway.servers import Servers
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import cluster_pb2, master_pb2, oracle_pb2
from percolator.v1 import gateway_pb2 as pb
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.v1.cluster_pb2 import Server
from percolator.wire import methods
from percolator.wire.channels import SERVER_METADATA, GrpcNetwork
from percolator.wire.through import ThroughNetwork
from percolator.wire.timestamp_source import OracleOfCluster
from percolator.world import MachineClock, World, machine_random
from tests.simulation.virtual_time import VirtualClock
from tests.unit.connected import written_out

TABLE = "accounts"
COLUMN = b"balance"
PUT = pb.CellWrite.KIND_PUT
DELETE = pb.CellWrite.KIND_DELETE
LOCK = pb.CellWrite.KIND_LOCK
NOTIFY = pb.CellWrite.KIND_NOTIFY


TWO_PHASES = Limits(one_round_cells_max=0)


class Cluster(ClusterInMemory):
    """Calls take a millisecond. A test can make some of them slow, and lose answers."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.loses_answer: Callable[[tablets.MutateRequest], bool] = lambda _: False
        self.loses_request: Callable[[], bool] = lambda: False
        self.delay: Callable[[tablets.MutateRequest], float] = lambda _: 0.001
        self.mutations = 0
        self.looks = 0
        self.reads = 0
        self.handed_out: set[tuple[str, int]] = set()
        """Timestamps of tokens with rights to some tables only."""
        self.checks = 0
        """Questions about them."""

    async def get_timestamps(
        self, request: oracle_pb2.GetTimestampsRequest
    ) -> oracle_pb2.GetTimestampsResponse:
        response = await super().get_timestamps(request)
        if request.token:
            self.handed_out.add((request.token, response.first))
        return response

    async def check_timestamps(
        self, request: oracle_pb2.CheckTimestampsRequest
    ) -> oracle_pb2.CheckTimestampsResponse:
        self.checks += 1
        return oracle_pb2.CheckTimestampsResponse(
            handed_out=[(request.token, one) in self.handed_out for one in request.timestamps]
        )

    async def read(self, request: tablets.ReadRequest) -> tablets.ReadResponse:
        self.reads += 1
        return await super().read(request)

    async def look_for_changes(
        self, request: tablets.LookForChangesRequest
    ) -> tablets.LookForChangesResponse:
        self.looks += len(request.looks)
        return await super().look_for_changes(request)

    async def mutate(self, request: tablets.MutateRequest) -> tablets.MutateResponse:
        await asyncio.sleep(self.delay(request))
        if self.loses_request():
            raise Unavailable("connection refused")
        self.mutations += 1
        response = await super().mutate(request)
        if self.loses_answer(request):
            raise Unavailable("connection reset")
        return response


@dataclass
class Gateway:
    """One gateway, as its callers see it."""

    handler: GatewayHandler
    commits: Commits
    database: Database

    async def begin(self) -> int:
        return (await self.handler.begin(pb.BeginRequest())).start_timestamp

    async def commit(self, start: int, writes: Sequence[pb.CellWrite]) -> int:
        request = pb.CommitRequest(start_timestamp=start, writes=writes)
        return (await self.handler.commit(request)).commit_timestamp

    async def get(self, start: int, *rows: bytes) -> list[bytes | None]:
        """The values of the rows, in one column."""
        queries = [pb.RowQuery(table=TABLE, row=row, columns=[COLUMN]) for row in rows]
        told = await self.handler.get(pb.GetRequest(start_timestamp=start, rows=queries))
        return [row.cells[0].value if row.cells else None for row in told.rows]

    async def read(self, *rows: bytes) -> list[bytes | None]:
        """The current values of the rows, in one column."""
        return await self.get(await self.begin(), *rows)

    async def scan(self, request: pb.ScanTableRequest) -> list[bytes]:
        """The keys of the rows."""
        return [row.row async for page in self.handler.scan_table(request) for row in page.rows]

    async def resolve(self, start: int, *rows: bytes) -> pb.ResolveResponse:
        cells = [pb.CellName(table=TABLE, row=row, column=COLUMN) for row in rows]
        return await self.handler.resolve(pb.ResolveRequest(start_timestamp=start, cells=cells))


def write(
    row: bytes, value: bytes = b"", kind: pb.CellWrite.Kind = PUT, column: bytes = COLUMN
) -> pb.CellWrite:
    return pb.CellWrite(kind=kind, table=TABLE, row=row, column=column, value=value)


def commits_primary(request: tablets.MutateRequest) -> bool:
    """True if it holds the commit of a primary: three conditions, and no data of a prewrite."""
    return any(
        len(mutation.conditions) == 3 and len(mutation.changes) > 1
        for batch in request.batches
        for mutation in written_out(batch)
    )


class Site:
    """One cluster, and the gateways that are started around it."""

    def __init__(self, cluster: Cluster, clock: VirtualClock, stack: AsyncExitStack) -> None:
        self.cluster = cluster
        self._clock = clock
        self._stack = stack
        self._networks: dict[int, InProcessNetwork] = {}

    async def start(
        self,
        *,
        commit_seconds: float = 10.0,
        commits_max: int = 100,
        limits: Limits = TWO_PHASES,
    ) -> Gateway:
        network = InProcessNetwork({ADDRESS: self.cluster})
        world = World(self._clock, network, random.Random(len(self._networks)))
        database = await connect_to(world, [ADDRESS], limits, RetryPolicy())
        self._stack.push_async_callback(database.close)
        oracle = OracleOfCluster(world, [ADDRESS])
        self._stack.push_async_callback(oracle.close)
        commits = Commits(
            database,
            oracle,
            commit_seconds=commit_seconds,
            quota=Quota("commits", "commits_max", commits_max),
            remembered_max=1_000,
        )
        self._stack.push_async_callback(commits.close, 1.0)
        handler = GatewayHandler(database.internal.engine, commits, answer_bytes_max=1 << 20)
        started = Gateway(handler, commits, database)
        self._networks[id(started)] = network
        return started

    def kill(self, gateway: Gateway) -> None:
        """Ends it: it gets no answers, and sends nothing more. Messages under way may arrive."""
        self._networks[id(gateway)].handlers.clear()


@asynccontextmanager
async def a_site() -> AsyncIterator[Site]:
    """A cluster without a gateway."""
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = Cluster(clock)
    await cluster.create_table(master_pb2.CreateTableRequest(name=TABLE, splits=[b"m"]))
    async with AsyncExitStack() as stack:
        yield Site(cluster, clock, stack)


@asynccontextmanager
async def gateways(
    count: int = 2, *, commit_seconds: float = 10.0, commits_max: int = 100
) -> AsyncIterator[tuple[Cluster, list[Gateway]]]:
    async with a_site() as site:
        started = [
            await site.start(commit_seconds=commit_seconds, commits_max=commits_max)
            for _ in range(count)
        ]
        yield site.cluster, started


# A gateway and the servers behind it, for tests of forwarded calls.

SECONDS = 10.0
CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"]
OWN = Server(kind=cluster_pb2.SERVICE_KIND_GATEWAY, server_id="own-id", address="gateway:1")
REQUEST_BYTES_MAX = 100_000


@dataclass
class Behind(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A server behind the gateway. Each test says how it answers."""

    unary: Callable[[bytes, Any], Awaitable[bytes]] | None = None
    stream: Callable[[bytes, Any], AsyncIterator[bytes]] | None = None
    both: Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]] | None = None
    seen: list[dict[str, str | bytes]] = field(default_factory=list)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        self.seen.append(dict(details.invocation_metadata))
        if self.unary is not None:
            return grpc.unary_unary_rpc_method_handler(self.unary)
        if self.stream is not None:
            return grpc.unary_stream_rpc_method_handler(self.stream)
        if self.both is not None:
            return grpc.stream_stream_rpc_method_handler(self.both)
        return None


class Master:
    """Describes the cluster that a test has set up."""

    def __init__(self) -> None:
        self.servers: list[Server] = []
        self.asked = 0

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        self.asked += 1
        return cluster_pb2.DescribeResponse(cluster_id="c", servers=self.servers)

    async def register(self, request: cluster_pb2.RegisterRequest) -> Any:
        raise errors.NotReady("not here")


@dataclass
class ForwardingSite:
    """A gateway and the servers behind it."""

    behind: Behind
    server: Server
    master: Master
    routes: ServerRoutes
    gate: Gate
    address: str
    channel: grpc.aio.Channel
    through: ThroughNetwork
    listen: Callable[[grpc.GenericRpcHandler], Awaitable[str]]

    async def read(self, raw: bytes = b"", server: str | None = None, **extra: str) -> bytes:
        """A unary call with bytes that are not a message."""
        metadata = [*extra.items(), (SERVER_METADATA, server or self.server.server_id)]
        call = self.channel.unary_unary(methods.READ.path)
        answer: bytes = await call(raw, metadata=metadata, timeout=SECONDS)
        return answer

    def scan(self, raw: bytes = b"", path: str = methods.SCAN.path) -> Any:
        call = self.channel.unary_stream(path)
        metadata = [(SERVER_METADATA, self.server.address)]
        return call(raw, metadata=metadata, timeout=SECONDS)


@asynccontextmanager
async def site() -> AsyncIterator[ForwardingSite]:
    started: list[grpc.aio.Server] = []

    async def listen(handler: grpc.GenericRpcHandler) -> str:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", REQUEST_BYTES_MAX)])
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        started.append(server)
        return f"127.0.0.1:{port}"

    network, outside = GrpcNetwork(), GrpcNetwork()
    master, behind, gate, clock = Master(), Behind(), Gate(100, REQUEST_BYTES_MAX), MachineClock()
    master_edge = RpcEdge(Gate(100, REQUEST_BYTES_MAX), RpcMetrics(), clock)
    master_edge.expose([Exposed(CLUSTER, master)])
    master_address = await listen(master_edge)
    kind = cluster_pb2.SERVICE_KIND_TABLET_SERVER
    server = Server(kind=kind, server_id="behind-id", address=await listen(behind))
    master.servers = [server]
    servers = Servers(World(clock, network, machine_random()), [master_address], "c")
    routes = ServerRoutes(network, servers, OWN)
    edge = RpcEdge(gate, RpcMetrics(), clock)
    edge.expose([Exposed(CLUSTER, master)], routes)
    address = await listen(edge)
    channel = outside.line(address).channel
    through = ThroughNetwork(outside, [address])
    try:
        yield ForwardingSite(
            behind, server, master, routes, gate, address, channel, through, listen
        )
    finally:
        await outside.close()
        for one in started:
            await one.stop(None)
        await network.close()


@asynccontextmanager
async def another_gateway(here: ForwardingSite) -> AsyncIterator[tuple[Gate, ThroughNetwork]]:
    """A gateway before that of the site, as clients list them, and its gate."""
    gate = Gate(100, REQUEST_BYTES_MAX)
    edge = RpcEdge(gate, RpcMetrics(), MachineClock())
    edge.expose([Exposed(CLUSTER, here.master)], here.routes)
    network = GrpcNetwork()
    try:
        yield gate, ThroughNetwork(network, [await here.listen(edge), here.address])
    finally:
        await network.close()
