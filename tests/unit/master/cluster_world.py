"""A cluster in one process: real masters on a disk in memory, and models of everything else.

The duty of the masters is checked at every step: no epoch of a tablet is ever given to two servers
(`model_servers.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    Overloaded,
    PercolatorError,
    StoreFault,
    StoreUnusable,
    TabletMoved,
    Unavailable,
    WrongCluster,
)
from percolator.formats.records import LockRecord, RecordKind
from percolator.services.chassis.cluster_store import establish_identity
from percolator.services.chassis.coordinator import LivedTime
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.master.cluster_map import ClusterMap
from percolator.services.master.collection import Collection, CollectionTimes
from percolator.services.master.handlers import MasterHandler
from percolator.services.master.leader import Leader, MasterTimes, begin_tablet_term
from percolator.services.master.map_store import decoded
from percolator.services.master.master import Master
from percolator.services.master.registry import Registry
from percolator.services.master.tablet_changes import BalanceLimits
from percolator.services.master.tablet_data import DirectoryTablets
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import cells_pb2, cluster_pb2
from percolator.v1 import lockservice_pb2 as locks
from percolator.v1 import master_pb2 as pb
from percolator.v1 import oracle_pb2 as oracle
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.v1.errors_pb2 import TabletLocation
from percolator.wire import methods
from percolator.wire.methods import method_name
from percolator.wire.status import to_detail
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
        self.parts = [SERVER]
        """Servers of other kinds that register with the masters."""
        self.collection_times = CollectionTimes()
        self.limits = BalanceLimits(round_seconds=1.0, quiet_seconds=2.0, split_bytes=1 << 40)
        self._count = 0
        self._tasks_before = asyncio.all_tasks()
        self._tasks_of_the_killed: set[asyncio.Task[Any]] = set()
        """Tasks that wait for dead files wait forever. Without a reference they would be collected
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
            partial(
                begin_tablet_term, self.world, DirectoryTablets(files, ROOT), registry, times=times
            ),
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

    @property
    def leader(self) -> Leader:
        """The term of the leading master."""
        found = [one.master.leader for one in self.masters if one.master.leader is not None]
        assert found
        return found[0]

    def replace_master(self) -> MasterProcess:
        """Kills the first master, and starts another one."""
        self.kill_master(self.masters[0])
        return self.start_master()

    def open_tablets(self) -> list[tablets.OpenTabletRequest]:
        """The tablets that are open, as the servers were told of them."""
        return [one for server in self.servers.values() for one in server.open.values()]

    async def call(
        self, method: UnaryMethod[Any, ResponseT], seconds: float = 5.0, **fields: Any
    ) -> ResponseT:
        """Asks with a request that has these fields."""
        return await self.ask(method, method.request(**fields), seconds)

    async def locate(self, table_id: int, row: bytes = b"") -> list[TabletLocation]:
        rows = cells_pb2.RowRange(start=row)
        found = await self.call(
            methods.LOCATE_TABLETS, table_id=table_id, range=rows, knows_indexes=True
        )
        return list(found.locations)

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


# The cluster of models, with history: what is raised, resolved and collected, and in which order.
#
# A tablet here remembers the orders that it got, and the locks that a test puts into it.

LOCK_SERVICE = "locks:1"
RETENTION_SECONDS = 100.0
TIMES = CollectionTimes(1e9, RETENTION_SECONDS, retention_min_seconds=10.0)
TTL_SECONDS_MAX = 20.0
"""The longest time to live of a session."""


@dataclass
class ModelLockService:
    """Lists the sessions that a test has set."""

    log: list[str]
    sessions: list[locks.Session] = field(default_factory=list)
    settling: bool = False
    of_admins: set[bytes] = field(default_factory=set)
    """The ids of sessions that administrators have opened."""
    before_answer: Callable[[], None] = lambda: None

    async def list_sessions(self, asked: locks.ListSessionsRequest) -> locks.ListSessionsResponse:
        self.log.append("sessions")
        self.before_answer()
        for one in self.sessions:
            is_admin = one.session_id in self.of_admins
            since = asked.limits.admins_since if is_admin else asked.limits.clients_since
            one.too_old = 0 < one.info.oldest_start_timestamp < since
        return locks.ListSessionsResponse(
            sessions=self.sessions,
            settling=self.settling,
            ttl_milliseconds_max=round(TTL_SECONDS_MAX * 1000),
        )

    def need(self, oldest: int, description: str) -> None:
        info = locks.SessionInfo(
            description=description, ttl_milliseconds=3_000, oldest_start_timestamp=oldest
        )
        self.sessions.append(locks.Session(session_id=description.encode(), info=info))


@dataclass
class ModelHistory:
    """The part of all tablet servers that deals with history."""

    log: list[str]
    reads: dict[int, int] = field(default_factory=dict)
    transactions: dict[int, int] = field(default_factory=dict)
    collected: dict[int, int] = field(default_factory=dict)
    locks: dict[int, list[tuple[bytes, LockRecord]]] = field(default_factory=dict)
    failing: set[int] = field(default_factory=set)
    """Tablets that answer only with `Unavailable`."""
    after_raise: Callable[[], None] = lambda: None

    async def raise_safe_points(
        self, request: tablets.RaiseSafePointsRequest
    ) -> tablets.RaiseSafePointsResponse:
        said = []
        for order in request.safe_points:
            tablet = order.tablet_id
            if tablet in self.failing:
                raise Unavailable(f"tablet {tablet} does not answer")
            if order.collect_below:
                assert order.collect_below <= self.reads.get(tablet, 0)
                left = [lock.start_timestamp for _, lock in self.locks.get(tablet, [])]
                assert all(start >= order.collect_below for start in left)
                self.log.append(f"collect {tablet}")
                self.collected[tablet] = max(order.collect_below, self.collected.get(tablet, 0))
            else:
                self.log.append(f"raise {tablet}")
            self.reads[tablet] = max(order.reads, self.reads.get(tablet, 0))
            self.transactions[tablet] = max(order.transactions, self.transactions.get(tablet, 0))
            said.append(
                tablets.RaisedSafePoint(
                    reads=self.reads[tablet],
                    transactions=self.transactions[tablet],
                    collected_below=self.collected.get(tablet, 0),
                )
            )
        self.after_raise()
        return tablets.RaiseSafePointsResponse(safe_points=said)

    async def scan_cells(
        self, request: tablets.ScanCellsRequest
    ) -> AsyncIterator[tablets.ScanCellsResponse]:
        tablet = request.target.tablet_id
        self.log.append(f"resolve {tablet}")
        yield tablets.ScanCellsResponse(
            cells=[
                cells_pb2.Cell(row=row, column=b"c", value=lock.encode())
                for row, lock in self.locks.get(tablet, [])
                if lock.start_timestamp < request.until_timestamp
            ]
        )

    async def mutate(self, request: tablets.MutateRequest) -> tablets.MutateResponse:
        """Any change of a locked cell is taken for a roll-back of its lock."""
        answer = tablets.MutateResponse()
        for batch in request.batches:
            rows = {one.row for one in batch.mutations}
            held = self.locks.get(batch.target.tablet_id, [])
            held[:] = [(row, lock) for row, lock in held if row not in rows]
            answer.batches.add(mutations=len(batch.mutations))
        return answer


class HistoryWorld:
    """A cluster whose leader collects only when a test says so."""

    def __init__(self, models: ModelCluster) -> None:
        self.models = models
        self.log: list[str] = []
        self.oracle = models.oracle
        self.lock_service = ModelLockService(self.log)
        self.history = ModelHistory(self.log)

    def attach(self) -> None:
        network = self.models.network
        for address, server in self.models.servers.items():
            network.handlers[address] = (server, self.history)
        network.handlers[LOCK_SERVICE] = (self.lock_service,)
        self.models.parts.append(
            cluster_pb2.Server(
                kind=cluster_pb2.SERVICE_KIND_LOCK_SERVICE,
                server_id=LOCK_SERVICE,
                address=LOCK_SERVICE,
                version="0.1.0",
            )
        )

    @property
    def collection(self) -> Collection:
        return self.models.leader.collection

    async def collect(self) -> None:
        self.log.clear()
        await self.collection.collect()

    async def create(
        self, name: str, splits: list[bytes] | None = None, retention_seconds: float = 0
    ) -> list[int]:
        """Creates a table; returns the ids of its tablets."""
        options = pb.TableOptions(retention_milliseconds=round(retention_seconds * 1000))
        table_id = await create(self.models, name, splits or [], options)
        return [one.tablet_id for one in await self.models.locate(table_id)]

    async def describe(self) -> pb.DescribeCollectionResponse:
        return await self.models.call(methods.DESCRIBE_COLLECTION)

    def ago(self, seconds: float) -> int:
        return self.oracle.now() - round(seconds * SECOND)

    def lock(
        self, tablet: int, table_id: int, start: int, session: bytes, ttl_milliseconds: int = 1_000
    ) -> None:
        """Adds a lock of a transaction that has its primary here."""
        primary = CellAddress(table_id, b"row", b"c")
        record = LockRecord(start, 0, ttl_milliseconds, RecordKind.PUT, session, primary)
        self.history.locks.setdefault(tablet, []).append((b"row", record))


@asynccontextmanager
async def history_cluster(
    *servers: str, times: CollectionTimes = TIMES
) -> AsyncIterator[HistoryWorld]:
    """One master, which starts no round by itself, and tablet servers at these addresses."""
    async with cluster(*(servers or ("a:1", "b:1")), times=times) as models:
        world = HistoryWorld(models)
        world.attach()

        async def heard_of_all() -> bool:
            known = {one.address for one in models.masters[0].master.registry.servers()}
            return LOCK_SERVICE in known

        await models.until(heard_of_all)
        # From now on it may collect: sessions of lost lock services have had time to report.
        await asyncio.sleep(TTL_SECONDS_MAX)
        yield world


# A model of the oracle, whose time is the virtual clock.

ORACLE = "oracle:1"
SECOND = 1000 << SEQUENCE_BITS
SERVER = cluster_pb2.Server(
    kind=cluster_pb2.SERVICE_KIND_ORACLE,
    server_id=ORACLE,
    address=ORACLE,
    version="0.1.0",
)


class ModelOracle:
    """Hands out timestamps from the virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.epoch = 0
        self.refusals = 0
        """How many calls it refuses, as a standby."""

    def now(self) -> int:
        # Long after the epoch, so that retention never reaches back to 0.
        return 1_000 * SECOND + round(self._clock.monotonic_seconds() * SECOND)

    async def get_timestamps(
        self, request: oracle.GetTimestampsRequest
    ) -> oracle.GetTimestampsResponse:
        return oracle.GetTimestampsResponse(
            first=self.now(), count=request.count, catalogue_epoch=self.epoch
        )

    async def advance_epoch(
        self, request: oracle.AdvanceEpochRequest
    ) -> oracle.AdvanceEpochResponse:
        if self.refusals:
            self.refusals -= 1
            raise NotReady("another oracle leads")
        self.epoch = max(self.epoch, request.catalogue_epoch)
        return oracle.AdvanceEpochResponse(catalogue_epoch=self.epoch)


# Models of tablet servers, as the masters see them.
#
# They show what the epoch directories guarantee, which have tests of their own: the server that
# opens a tablet at the highest epoch has all acknowledged writes, and from then on no other server
# acknowledges any.

_UNREADABLE = StoreUnusable("unreadable", fault=StoreFault.DAMAGED)


@dataclass
class Stored:
    """The contents of one tablet's directory."""

    highest: int = 0
    rows: dict[bytes, bytes] = field(default_factory=dict)
    existed: bool = False
    sealed: bool = False
    damaged: bool = False
    unreadable: bool = False
    """True if it can be taken over, but not opened."""


class ModelStore:
    """All tablets' directories."""

    def __init__(self) -> None:
        self.tablets: dict[int, Stored] = {}
        self.told: dict[tuple[int, int], str] = {}

    def take_over(self, order: tablets.OpenTabletRequest, server_id: str) -> None:
        first = self.told.setdefault((order.tablet_id, order.epoch), server_id)
        assert first == server_id, f"epoch {order.epoch} of {order.tablet_id} given to two servers"
        stored = self.tablets.setdefault(order.tablet_id, Stored())
        if order.epoch <= stored.highest or stored.sealed:
            raise TabletMoved(
                "used",
                tablet_id=order.tablet_id,
                epoch=order.epoch,
                highest_epoch=stored.highest,
            )
        if stored.damaged or (order.must_exist and not stored.existed):
            raise StoreUnusable("nothing there", fault=StoreFault.DAMAGED)
        if stored.highest < order.served_epoch:
            raise StoreUnusable("only older epochs are there", fault=StoreFault.DAMAGED)
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
        self.opens_nothing = False
        self._store = store

    async def report(self, request: tablets.ReportRequest) -> tablets.ReportResponse:
        reported = [
            tablets.ReportedTablet(
                tablet_id=one.tablet_id,
                epoch=one.epoch,
                schema_version=one.schema_version,
                error=to_detail(_UNREADABLE) if self._is_unreadable(one) else None,
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
        elif present.schema_version < request.schema_version:
            present.schema_version = request.schema_version
            present.change_feed = request.change_feed
            del present.ttls[:]
            present.ttls.extend(request.ttls)
        now = self.open[request.tablet_id]
        if self._is_unreadable(now):
            raise _UNREADABLE
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
        """Returns when the write is acknowledged."""
        self._serving(location)
        self._store.tablets[location.tablet_id].rows[row] = value

    def read(self, location: TabletLocation, row: bytes) -> bytes | None:
        self._serving(location)
        return self._store.tablets[location.tablet_id].rows.get(row)

    def _is_unreadable(self, order: tablets.OpenTabletRequest) -> bool:
        return self.opens_nothing or self._store.tablets[order.tablet_id].unreadable

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


# Tests that need another number of servers than one.

on_no_server = pytest.mark.parametrize("world", [[]], indirect=True)
on_two_servers = pytest.mark.parametrize("world", [["a:1", "b:1"]], indirect=True)
on_three_servers = pytest.mark.parametrize("world", [["a:1", "b:1", "c:1"]], indirect=True)

# Tables with rows in several tablets, for the tests of who serves them.

SPLITS = [b"c", b"f", b"i", b"l", b"o"]
LEASE_SECONDS = 3.0


async def create(
    world: ModelCluster,
    name: str = "t",
    splits: list[bytes] = SPLITS,
    options: pb.TableOptions | None = None,
) -> int:
    created = await world.call(methods.CREATE_TABLE, name=name, splits=splits, options=options)
    return created.table.table_id


async def described(world: ModelCluster, name: str = "t") -> pb.Table:
    return (await world.call(methods.DESCRIBE_TABLE, name=name, knows_indexes=True)).table


async def created_and_filled(world: ModelCluster, splits: list[bytes] = SPLITS) -> int:
    table = await create(world, splits=splits)
    await fill(world, table)
    return table


async def has_tablets(world: ModelCluster, table: int, address: str, count: int) -> bool:
    """True if this server has at least so many tablets of the table."""
    return (await addresses(world, table))[address] >= count


async def is_only_at(world: ModelCluster, table: int, address: str) -> bool:
    """True if this server has all tablets of the table."""
    return set(await addresses(world, table)) == {address}


async def addresses(world: ModelCluster, table: int) -> Counter[str]:
    return Counter(one.address for one in await world.locate(table))


async def fill(world: ModelCluster, table: int) -> None:
    for letter in b"abcdefghijklmnopq":
        await world.write(table, bytes([letter]), b"value")


async def is_complete(world: ModelCluster, table: int) -> bool:
    rows = [bytes([letter]) for letter in b"abcdefghijklmnopq"]
    return all([await world.read(table, row) == b"value" for row in rows])


def forget_that_it_is_served(world: ModelCluster, tablet_id: int) -> None:
    """As if the tablet had just been opened, and the map did not know that yet."""
    store = world.leader.store
    unnoted = replace(store.current.tablets[tablet_id], exists=False, served_epoch=0)
    store.current = store.current.with_tablets([unnoted])


async def served(at: ModelCluster, table: int) -> bool:
    for one in await at.locate(table):
        await at.read(table, one.range.start)
    return True
