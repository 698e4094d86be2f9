"""A cluster in one process: real masters on a disk in memory, and models of everything else.

A tablet server here is a model of what the epoch directories guarantee (which is checked by
itself): whoever opens a tablet at the highest epoch has everything that was acknowledged, and from
then on nobody else acknowledges anything. What the masters must see to is checked all the time: no
epoch of a tablet is ever told to two servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    PercolatorError,
    StoreFault,
    StoreUnusable,
    TabletMoved,
    Unavailable,
)
from percolator.testing.virtual_time import VirtualClock
from percolator.v1 import cells_pb2, cluster_pb2
from percolator.v1 import master_pb2 as wire
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.v1.errors_pb2 import TabletLocation
from percolator.wire import methods
from percolator.wire.methods import method_name
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
    World,
)
from services.chassis.coordinator.directory import DirectoryCoordinator
from services.chassis.lived_time import LivedTime
from services.chassis.memory_disk import MemoryDisk
from services.chassis.memory_files import MemoryFiles
from services.master.balance import BalanceLimits
from services.master.collection import CollectionTimes
from services.master.leader import MasterTimes
from services.master.master import Master, Site
from services.master.master_handler import MasterHandler
from services.master.registry import Registry

ROOT = Path("/store")
T = TypeVar("T")


@dataclass
class Stored:
    """The directory of one tablet."""

    highest: int = 0
    rows: dict[bytes, bytes] = field(default_factory=dict)
    existed: bool = False
    sealed: bool = False
    damaged: bool = False


class ModelStore:
    """All tablets' directories."""

    def __init__(self) -> None:
        self.tablets: dict[int, Stored] = {}
        self.told: dict[tuple[int, int], str] = {}

    def take_over(self, order: tablets.OpenTabletRequest, server_id: str) -> None:
        first = self.told.setdefault((order.tablet_id, order.epoch), server_id)
        assert first == server_id, f"epoch {order.epoch} of {order.tablet_id} told to two servers"
        stored = self.tablets.setdefault(order.tablet_id, Stored())
        if order.epoch <= stored.highest or stored.sealed:
            raise TabletMoved("used", tablet_id=order.tablet_id, epoch=order.epoch)
        if stored.damaged or (order.must_exist and not stored.existed):
            raise StoreUnusable("nothing there", fault=StoreFault.DAMAGED)
        if order.origin_tablet_id and not stored.existed:
            origin = self.tablets[order.origin_tablet_id]
            assert origin.highest == order.origin_epoch, "cloned from a tablet that went on"
            origin.sealed = True
            stored.rows = dict(origin.rows)
        stored.highest, stored.existed = order.epoch, True

    def stands(self, tablet_id: int, epoch: int) -> bool:
        stored = self.tablets[tablet_id]
        return stored.highest == epoch and not stored.sealed


class ModelServer:
    """A tablet server as the masters see it."""

    def __init__(self, store: ModelStore, server_id: str) -> None:
        self.server_id = server_id
        self.open: dict[int, tablets.OpenTabletRequest] = {}
        self._store = store

    async def report(self, request: tablets.ReportRequest) -> tablets.ReportResponse:
        reported = [
            tablets.ReportedTablet(
                tablet_id=one.tablet_id, epoch=one.epoch, schema_version=one.schema_version
            )
            for one in self.open.values()
        ]
        return tablets.ReportResponse(server_id=self.server_id, tablets=reported)

    async def open_tablet(self, request: tablets.OpenTabletRequest) -> tablets.OpenTabletResponse:
        present = self.open.get(request.tablet_id)
        if present is None or present.epoch < request.epoch:
            await asyncio.sleep(0.005)
            self._store.take_over(request, self.server_id)
            self.open[request.tablet_id] = request
        elif present.epoch > request.epoch:
            raise TabletMoved("old", tablet_id=request.tablet_id, epoch=request.epoch)
        else:
            present.schema_version = max(present.schema_version, request.schema_version)
        now = self.open[request.tablet_id]
        return tablets.OpenTabletResponse(
            tablet=tablets.TabletDescription(
                tablet_id=now.tablet_id, epoch=now.epoch, schema_version=now.schema_version
            )
        )

    async def close_tablet(
        self, request: tablets.CloseTabletRequest
    ) -> tablets.CloseTabletResponse:
        present = self.open.get(request.tablet_id)
        if present is not None and present.epoch == request.epoch:
            del self.open[request.tablet_id]
        return tablets.CloseTabletResponse()

    async def describe_tablets(
        self, request: tablets.DescribeTabletsRequest
    ) -> tablets.DescribeTabletsResponse:
        described = [
            tablets.TabletDescription(
                tablet_id=key,
                epoch=one.epoch,
                statistics=tablets.TabletStatistics(bytes=sum(map(len, self._rows(one).values()))),
            )
            for key, one in self.open.items()
        ]
        return tablets.DescribeTabletsResponse(tablets=described)

    async def propose_split(
        self, request: tablets.ProposeSplitRequest
    ) -> tablets.ProposeSplitResponse:
        rows = sorted(self._rows(self.open[request.target.tablet_id]))
        return tablets.ProposeSplitResponse(row=rows[len(rows) // 2] if len(rows) > 1 else None)

    def write(self, location: TabletLocation, row: bytes, value: bytes) -> None:
        """Returns when it is acknowledged."""
        self._serving(location)
        self._store.tablets[location.tablet_id].rows[row] = value

    def read(self, location: TabletLocation, row: bytes) -> bytes | None:
        self._serving(location)
        return self._store.tablets[location.tablet_id].rows.get(row)

    def _rows(self, order: tablets.OpenTabletRequest) -> dict[bytes, bytes]:
        rows, bounds = self._store.tablets[order.tablet_id].rows, order.range
        return {
            row: value
            for row, value in rows.items()
            if bounds.start <= row and (not bounds.end or row < bounds.end)
        }

    def _serving(self, location: TabletLocation) -> None:
        present = self.open.get(location.tablet_id)
        if (
            present is None
            or present.epoch != location.epoch
            or not self._store.stands(location.tablet_id, location.epoch)
        ):
            raise TabletMoved("moved", tablet_id=location.tablet_id, epoch=location.epoch)


class ModelNetwork:
    """Calls handlers in this process. Nobody listens where a process was killed."""

    def __init__(self) -> None:
        self.handlers: dict[str, tuple[object, ...]] = {}
        self.silent: set[str] = set()
        self.dial_out: set[str] = set()
        """Of the silent ones, those that register all the same."""
        self.pauses: Callable[[], float] = lambda: 0.001

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        name = method_name(method.path.rsplit("/", 1)[1])

        async def call(request: RequestT, timeout: float) -> ResponseT:
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.sleep(self.pauses())
                    if address in self.silent:
                        await asyncio.get_running_loop().create_future()
                    handlers = self.handlers.get(address)
                    if handlers is None:
                        raise Unavailable(f"nobody listens at {address}")
                    answer: Any = next(getattr(one, name) for one in handlers if hasattr(one, name))
                    sent = method.request.FromString(request.SerializeToString())
                    response: ResponseT = await answer(sent)
                    await asyncio.sleep(self.pauses())
                    if address in self.silent or self.handlers.get(address) is not handlers:
                        raise Unavailable(f"the connection to {address} broke")
                    return method.response.FromString(response.SerializeToString())
            except TimeoutError:
                raise DeadlineExceeded(f"{address} does not answer") from None

        return call

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        async def call(request: RequestT, timeout: float) -> AsyncIterator[ResponseT]:
            await asyncio.sleep(self.pauses())
            if address not in self.handlers or address in self.silent:
                raise Unavailable(f"nobody listens at {address}")
            name = method_name(method.path.rsplit("/", 1)[1])
            for one in self.handlers[address]:
                if hasattr(one, name):
                    answers: Any = getattr(one, name)(request)
                    async for answer in answers:
                        yield answer

        return call

    async def close(self) -> None:
        """Nothing is open."""


@dataclass
class MasterProcess:
    """One master, until it is killed."""

    address: str
    files: MemoryFiles
    master: Master
    tasks: list[asyncio.Task[Any]]


class ModelCluster:
    """Starts, kills and silences processes, and is a client of them."""

    def __init__(self, seed: int = 0, disk: MemoryDisk | None = None) -> None:
        self.random = Random(seed)
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.network = ModelNetwork()
        self.world = World(self.clock, self.network, self.random)
        self.disk = disk or MemoryDisk()
        self.disk.make_durable_directory(ROOT)
        self.store = ModelStore()
        self.servers: dict[str, ModelServer] = {}
        self.masters: list[MasterProcess] = []
        self.parts: list[cluster_pb2.Server] = []
        """Others than tablet servers that register with the masters."""
        self.collection_times = CollectionTimes()
        self.limits = BalanceLimits(round_seconds=1.0, quiet_seconds=2.0, split_bytes=1 << 40)
        self._count = 0
        self._registering = asyncio.create_task(self._register_forever())

    # ------------------------------------------------------------------------- processes

    def start_master(self) -> MasterProcess:
        self._count += 1
        address = f"master-{self._count}:7100"
        own = cluster_pb2.Server(
            kind=cluster_pb2.SERVICE_KIND_MASTER, server_id=f"{self._count:04x}", address=address
        )
        files = MemoryFiles(self.disk)
        registry = Registry(LivedTime(self.clock), silence_milliseconds=5_000, servers_max=100)
        coordinator = DirectoryCoordinator(files, self.clock, ROOT)
        times = MasterTimes(
            balance=self.limits, collection=self.collection_times, gather_seconds=0.2
        )
        master = Master(Site(self.world, files, ROOT, own, times), coordinator, registry)
        tasks = [asyncio.create_task(master.run()), asyncio.create_task(master.keep_listed())]
        process = MasterProcess(address, files, master, tasks)
        self.masters.append(process)
        self.network.handlers[address] = (MasterHandler(self.clock, master),)
        tasks.append(asyncio.create_task(self._follow(process)))
        return process

    async def _follow(self, process: MasterProcess) -> None:
        """A process whose files are dead is dead."""
        await process.files.killed.wait()
        self.kill_master(process)

    def kill_master(self, process: MasterProcess) -> None:
        self.network.handlers.pop(process.address, None)
        process.files.kill()
        for task in process.tasks:
            task.cancel()
        leader = process.master.leader
        if leader is not None:
            for task in asyncio.all_tasks():
                if task in leader._tasks:
                    task.cancel()
        if process in self.masters:
            self.masters.remove(process)

    def start_server(self, address: str) -> ModelServer:
        self._count += 1
        server = ModelServer(self.store, f"server-{self._count}")
        self.servers[address] = server
        self.network.handlers[address] = (server,)
        return server

    def kill_server(self, address: str) -> None:
        del self.servers[address], self.network.handlers[address]

    async def _register_forever(self) -> None:
        while True:
            tablet_servers = [
                cluster_pb2.Server(
                    kind=cluster_pb2.SERVICE_KIND_TABLET_SERVER,
                    server_id=server.server_id,
                    address=address,
                    version="0.1.0",
                )
                for address, server in self.servers.items()
            ]
            for announced in [*tablet_servers, *self.parts]:
                if announced.address in self.network.silent - self.network.dial_out:
                    continue
                for process in self.masters:
                    try:
                        process.master.registered(announced)
                    except NotReady:
                        continue
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        self._registering.cancel()
        for process in list(self.masters):
            self.kill_master(process)

    # ------------------------------------------------------------------------- a client

    async def ask(
        self,
        method: UnaryMethod[RequestT, ResponseT],
        request: RequestT,
        seconds: float = 5.0,
    ) -> ResponseT:
        """The first master that does not send us on."""
        problem: PercolatorError = Unavailable("no master")
        for process in list(self.masters):
            try:
                return await self.network.unary(process.address, method)(request, seconds)
            except (NotReady, Unavailable, DeadlineExceeded) as error:
                problem = error
        raise problem

    async def locate(self, table_id: int, row: bytes = b"") -> list[TabletLocation]:
        request = wire.LocateTabletsRequest(table_id=table_id, range=cells_pb2.RowRange(start=row))
        return list((await self.ask(methods.LOCATE_TABLETS, request)).locations)

    async def write(self, table_id: int, row: bytes, value: bytes) -> None:
        location = (await self.locate(table_id, row))[0]
        self._at(location).write(location, row, value)

    async def read(self, table_id: int, row: bytes) -> bytes | None:
        location = (await self.locate(table_id, row))[0]
        return self._at(location).read(location, row)

    def _at(self, location: TabletLocation) -> ModelServer:
        server = self.servers.get(location.address)
        if server is None:
            raise Unavailable(f"nobody listens at {location.address!r}")
        return server

    async def until(
        self, condition: Callable[[], Any], seconds: float = 30.0, *, every: float = 0.05
    ) -> float:
        """Virtual seconds that it took. Errors on the way are those of a change in progress."""
        started = self.clock.monotonic_seconds()
        problem: object = None
        while self.clock.monotonic_seconds() - started < seconds:
            try:
                if await condition():
                    return self.clock.monotonic_seconds() - started
            except InvalidArgument:
                raise
            except PercolatorError as error:
                problem = error
            await asyncio.sleep(every)
        raise AssertionError(f"it did not happen within {seconds} s; last: {problem}")


@asynccontextmanager
async def cluster(
    *servers: str, seed: int = 0, times: CollectionTimes | None = None
) -> AsyncIterator[ModelCluster]:
    """With one master, and tablet servers at these addresses."""
    started = ModelCluster(seed)
    started.collection_times = times or CollectionTimes()
    started.start_master()
    for address in servers:
        started.start_server(address)
    await started.until(lambda: _leads(started))
    yield started
    await started.close()


async def _leads(started: ModelCluster) -> bool:
    return any(
        process.master.leader is not None
        and len(process.master.leader.watch.alive()) == len(started.servers)
        for process in started.masters
    )
