"""The cluster of models, with history: what is raised, resolved and collected, and in which order.

A tablet here remembers the orders that it got, and the locks that a test puts into it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from percolator.errors import CellAddress, Unavailable
from percolator.formats.records import LockRecord, RecordKind
from percolator.services.master.collection import Collection, CollectionTimes
from percolator.services.master.leader import Leader
from percolator.v1 import cells_pb2, cluster_pb2
from percolator.v1 import lockservice_pb2 as locks
from percolator.v1 import master_pb2 as pb
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.wire import methods
from tests.unit.master.cluster_world import ModelCluster, cluster
from tests.unit.master.model_oracle import SECOND

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
        """Creates a table; returns the ids of its tablets."""
        options = pb.TableOptions(retention_milliseconds=round(retention_seconds * 1000))
        request = pb.CreateTableRequest(name=name, splits=splits or [], options=options)
        table = (await self.models.ask(methods.CREATE_TABLE, request)).table
        return [one.tablet_id for one in await self.models.locate(table.table_id)]

    async def describe(self) -> pb.DescribeCollectionResponse:
        request = pb.DescribeCollectionRequest()
        return await self.models.ask(methods.DESCRIBE_COLLECTION, request)

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
