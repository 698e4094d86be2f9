"""A cluster in one process: real masters on a disk in memory, and models of everything else.

The duty of the masters is checked at every step: no epoch of a tablet is ever given to two servers
(`model_servers.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    Overloaded,
    PercolatorError,
    Unavailable,
    WrongCluster,
)
from percolator.services.chassis.cluster_store import establish_identity
from percolator.services.chassis.coordinator import LivedTime
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.master.cluster_map import ClusterMap
from percolator.services.master.collection import CollectionTimes
from percolator.services.master.handlers import MasterHandler
from percolator.services.master.leader import Leader, MasterTimes, begin_tablet_term
from percolator.services.master.map_store import decoded
from percolator.services.master.master import Master
from percolator.services.master.registry import Registry
from percolator.services.master.tablet_changes import BalanceLimits
from percolator.v1 import cells_pb2, cluster_pb2
from percolator.v1 import master_pb2 as pb
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
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.simulation.virtual_time import VirtualClock
from tests.unit.master import model_oracle
from tests.unit.master.model_oracle import ORACLE, ModelOracle
from tests.unit.master.model_servers import ModelServer, ModelStore

ROOT = Path("/store")
T = TypeVar("T")

_REGISTER_SECONDS = 0.5


class ModelNetwork:
    """Calls handlers in this process. Connections to a killed process are refused."""

    def __init__(self) -> None:
        self.handlers: dict[str, tuple[object, ...]] = {}
        self.silent: set[str] = set()
        self.dial_out: set[str] = set()
        """Silent addresses whose processes still register."""
        self.losses: Counter[str] = Counter()
        """How many of the next requests are lost, by method."""
        self.pauses: Callable[[], float] = lambda: 0.001

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        name = method_name(method.path.rsplit("/", 1)[1])

        async def call(request: RequestT, timeout: float) -> ResponseT:
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.sleep(self.pauses())
                    if address in self.silent or self._loses(name):
                        await asyncio.get_running_loop().create_future()
                    handlers = self.handlers.get(address)
                    if handlers is None:
                        raise Unavailable(f"nothing listens at {address}")
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

    def _loses(self, method: str) -> bool:
        if not self.losses[method]:
            return False
        self.losses[method] -= 1
        return True

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        async def call(request: RequestT, timeout: float) -> AsyncGenerator[ResponseT, None]:
            await asyncio.sleep(self.pauses())
            if address not in self.handlers or address in self.silent:
                raise Unavailable(f"nothing listens at {address}")
            name = method_name(method.path.rsplit("/", 1)[1])
            for one in self.handlers[address]:
                if hasattr(one, name):
                    answers: Any = getattr(one, name)(request)
                    async for answer in answers:
                        yield answer

        return call

    async def close(self) -> None:
        """There is nothing to close."""


_CANCELLATIONS_MAX = 20


@dataclass
class MasterProcess:
    """One master, until it is killed."""

    address: str
    files: MemoryFiles
    master: Master[ClusterMap, Leader]
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
        self.oracle = ModelOracle(self.clock)
        self.network.handlers[ORACLE] = (self.oracle,)
        self.parts = [model_oracle.SERVER]
        """Servers of other kinds that register with the masters."""
        self.collection_times = CollectionTimes()
        self.limits = BalanceLimits(round_seconds=1.0, quiet_seconds=2.0, split_bytes=1 << 40)
        self._count = 0
        self._tasks_before = asyncio.all_tasks()
        self._tasks_of_the_killed: set[asyncio.Task[Any]] = set()
        """Those that wait for dead files wait forever. Without a reference they would be collected
        in the middle, which a real process does not live to see."""
        self._registering = asyncio.create_task(self._register_forever())

    # ------------------------------------------------------------------------- processes

    def start_master(self, *, servers_max: int = 100) -> MasterProcess:
        self._count += 1
        address = f"master-{self._count}:7100"
        own = cluster_pb2.Server(
            kind=cluster_pb2.SERVICE_KIND_MASTER, server_id=f"{self._count:04x}", address=address
        )
        files = MemoryFiles(self.disk)
        registry = Registry(
            self.clock, LivedTime(self.clock), silence_milliseconds=5_000, servers_max=servers_max
        )
        coordinator = DirectoryCoordinator(files, self.clock, ROOT)
        times = MasterTimes(
            balance=self.limits, collection=self.collection_times, gather_seconds=0.2
        )
        master = Master(
            self.world,
            own,
            coordinator,
            registry,
            partial(begin_tablet_term, self.world, files, ROOT, registry, times=times),
            decoded,
        )
        tasks = [asyncio.create_task(master.run()), asyncio.create_task(master.keep_listed())]
        process = MasterProcess(address, files, master, tasks)
        self.masters.append(process)
        self.network.handlers[address] = (MasterHandler(self.clock, master),)
        tasks.append(asyncio.create_task(self._follow(process)))
        return process

    async def _follow(self, process: MasterProcess) -> None:
        """Ends the process when its files are killed."""
        await process.files.killed.wait()
        self.kill_master(process)

    def kill_master(self, process: MasterProcess) -> None:
        self.network.handlers.pop(process.address, None)
        process.files.kill()
        self._tasks_of_the_killed |= self._tasks()
        for task in process.tasks:
            task.cancel()
        leader = process.master.leader
        if leader is not None:
            for task in leader._tasks._tasks:
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
                        # A dead master's look at its directory never returns.
                        async with asyncio.timeout(_REGISTER_SECONDS):
                            await process.master.registered(announced, 0)
                    except (NotReady, Overloaded, TimeoutError, WrongCluster):
                        continue
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        self._registering.cancel()
        for process in list(self.masters):
            self.kill_master(process)
        # Clean-up code may wait for dead files again.
        for _ in range(_CANCELLATIONS_MAX):
            for task in self._tasks():
                task.cancel()
            await asyncio.sleep(0)
        assert not self._tasks()

    def _tasks(self) -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - self._tasks_before

    # ------------------------------------------------------------------------- a client

    async def ask(
        self,
        method: UnaryMethod[RequestT, ResponseT],
        request: RequestT,
        seconds: float = 5.0,
    ) -> ResponseT:
        """The answer of the first master that does not refer the call to another one."""
        problem: PercolatorError = Unavailable("no master")
        for process in list(self.masters):
            try:
                return await self.network.unary(process.address, method)(request, seconds)
            except (NotReady, Unavailable, DeadlineExceeded) as error:
                problem = error
        raise problem

    async def locate(self, table_id: int, row: bytes = b"") -> list[TabletLocation]:
        request = pb.LocateTabletsRequest(table_id=table_id, range=cells_pb2.RowRange(start=row))
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
            raise Unavailable(f"nothing listens at {location.address!r}")
        return server

    async def until(
        self, condition: Callable[[], Any], seconds: float = 30.0, *, every: float = 0.05
    ) -> float:
        """Waits; returns the virtual seconds it took. Ignores errors of a change in progress."""
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
    """A cluster with one master, and with tablet servers at these addresses."""
    started = ModelCluster(seed)
    started.collection_times = times or CollectionTimes()
    await establish_identity(MemoryFiles(started.disk), ROOT, Random(seed))
    started.start_master()
    for address in servers:
        started.start_server(address)
    await started.until(lambda: _leads(started))
    yield started
    await started.close()


async def _leads(started: ModelCluster) -> bool:
    return any(
        process.master.leader is not None
        and process.master.leader.oracle_time.newest
        and len(process.master.leader.watch.alive()) == len(started.servers)
        for process in started.masters
    )
