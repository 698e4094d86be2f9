"""The cluster of models, with history: who raises, settles and collects what, and in which order.

A tablet here remembers what it was told, and the locks that a test puts into it. The oracle's time
is the virtual clock's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from percolator.errors import CellAddress, Unavailable
from percolator.protocol.records import LockRecord, RecordKind
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import cells_pb2, cluster_pb2
from percolator.v1 import lockservice_pb2 as locks
from percolator.v1 import master_pb2 as wire
from percolator.v1 import oracle_pb2 as oracle
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.wire import methods
from services.master.collection import Collection, CollectionTimes
from services.master.leader import Leader
from tests.unit.master.cluster_world import ModelCluster, cluster

ORACLE = "oracle:1"
LOCK_SERVICE = "locks:1"
RETENTION_SECONDS = 100.0
TIMES = CollectionTimes(1e9, RETENTION_SECONDS, retention_min_seconds=10.0)
TTL_SECONDS_MAX = 20.0
"""Of sessions."""
_SECOND = 1000 << SEQUENCE_BITS


class ModelOracle:
    """Tells the virtual time."""

    def __init__(self, world: ModelCluster) -> None:
        self._world = world

    def now(self) -> int:
        # Long after the beginning: nothing in these tests lies before it.
        return 1_000 * _SECOND + round(self._world.clock.monotonic_seconds() * _SECOND)

    async def get_timestamps(
        self, request: oracle.GetTimestampsRequest
    ) -> oracle.GetTimestampsResponse:
        return oracle.GetTimestampsResponse(first=self.now(), count=request.count)


@dataclass
class ModelLockService:
    """Lists the sessions that a test says there are."""

    log: list[str]
    sessions: list[locks.Session] = field(default_factory=list)
    settling: bool = False
    before_answer: Callable[[], None] = lambda: None

    async def list_sessions(self, _: locks.ListSessionsRequest) -> locks.ListSessionsResponse:
        self.log.append("sessions")
        self.before_answer()
        return locks.ListSessionsResponse(
            sessions=self.sessions,
            settling=self.settling,
            ttl_milliseconds_max=round(TTL_SECONDS_MAX * 1000),
        )

    async def check_sessions(
        self, asked: locks.CheckSessionsRequest
    ) -> locks.CheckSessionsResponse:
        alive = {one.session_id for one in self.sessions}
        return locks.CheckSessionsResponse(
            liveness=[
                locks.LIVENESS_ALIVE if one in alive else locks.LIVENESS_DEAD
                for one in asked.session_ids
            ]
        )

    def need(self, oldest: int, description: str) -> None:
        info = locks.SessionInfo(
            description=description, ttl_milliseconds=3_000, oldest_start_timestamp=oldest
        )
        self.sessions.append(locks.Session(session_id=description.encode(), info=info))


@dataclass
class ModelHistory:
    """The part of all tablet servers that has to do with history."""

    log: list[str]
    reads: dict[int, int] = field(default_factory=dict)
    transactions: dict[int, int] = field(default_factory=dict)
    collected: dict[int, int] = field(default_factory=dict)
    locks: dict[int, list[tuple[bytes, LockRecord]]] = field(default_factory=dict)
    failing: set[int] = field(default_factory=set)
    """Tablets that answer nothing but `Unavailable`."""
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
        self.log.append(f"settle {tablet}")
        yield tablets.ScanCellsResponse(
            cells=[
                cells_pb2.Cell(row=row, column=b"c", value=lock.encode())
                for row, lock in self.locks.get(tablet, [])
                if lock.start_timestamp < request.until_timestamp
            ]
        )

    async def mutate(self, request: tablets.MutateRequest) -> tablets.MutateResponse:
        """Whoever changes a locked cell here rolls its lock back."""
        answer = tablets.MutateResponse()
        for batch in request.batches:
            rows = {one.row for one in batch.mutations}
            held = self.locks.get(batch.target.tablet_id, [])
            held[:] = [(row, lock) for row, lock in held if row not in rows]
            applied = tablets.MutationResult(outcome=tablets.OUTCOME_APPLIED)
            answer.batches.add(results=[applied] * len(batch.mutations))
        return answer


class HistoryWorld:
    """A cluster whose leader collects when a test says so."""

    def __init__(self, models: ModelCluster) -> None:
        self.models = models
        self.log: list[str] = []
        self.oracle = ModelOracle(models)
        self.lock_service = ModelLockService(self.log)
        self.history = ModelHistory(self.log)

    def attach(self) -> None:
        network = self.models.network
        for address, server in self.models.servers.items():
            network.handlers[address] = (server, self.history)
        network.handlers[ORACLE] = (self.oracle,)
        network.handlers[LOCK_SERVICE] = (self.lock_service,)
        for address, kind in (
            (ORACLE, cluster_pb2.SERVICE_KIND_ORACLE),
            (LOCK_SERVICE, cluster_pb2.SERVICE_KIND_LOCK_SERVICE),
        ):
            self.models.parts.append(
                cluster_pb2.Server(kind=kind, server_id=address, address=address, version="0.1.0")
            )

    @property
    def leader(self) -> Leader:
        found = [one.master.leader for one in self.models.masters if one.master.leader is not None]
        assert found
        return found[0]

    @property
    def collection(self) -> Collection:
        return self.leader.collection

    async def collect(self) -> None:
        self.log.clear()
        await self.collection.collect()

    async def create(
        self, name: str, splits: list[bytes] | None = None, retention_seconds: float = 0
    ) -> list[int]:
        """Its tablets."""
        options = wire.TableOptions(retention_milliseconds=round(retention_seconds * 1000))
        request = wire.CreateTableRequest(name=name, splits=splits or [], options=options)
        table = (await self.models.ask(methods.CREATE_TABLE, request)).table
        return [one.tablet_id for one in await self.models.locate(table.table_id)]

    async def describe(self) -> wire.DescribeCollectionResponse:
        request = wire.DescribeCollectionRequest()
        return await self.models.ask(methods.DESCRIBE_COLLECTION, request)

    def ago(self, seconds: float) -> int:
        return self.oracle.now() - round(seconds * _SECOND)

    def lock(
        self, tablet: int, table_id: int, start: int, session: bytes, ttl_milliseconds: int = 1_000
    ) -> None:
        """Of a transaction that has its primary here."""
        primary = CellAddress(table_id, b"row", b"c")
        record = LockRecord(start, 0, ttl_milliseconds, RecordKind.PUT, session, primary)
        self.history.locks.setdefault(tablet, []).append((b"row", record))


@asynccontextmanager
async def history_cluster(*servers: str) -> AsyncIterator[HistoryWorld]:
    """One master, which begins no round by itself, and tablet servers at these addresses."""
    async with cluster(*(servers or ("a:1", "b:1")), times=TIMES) as models:
        world = HistoryWorld(models)
        world.attach()

        async def heard_of_all() -> bool:
            known = {one.address for one in models.masters[0].master.registry.servers()}
            return known >= {ORACLE, LOCK_SERVICE}

        await models.until(heard_of_all)
        # Now it knows of all sessions that it might have missed before it led.
        await asyncio.sleep(TTL_SECONDS_MAX)
        yield world
