"""A `TabletStore` in memory, in which everything can be made to fail."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from percolator.errors import NotReady, SchemaError, StoreFault, StoreUnusable, TabletMoved
from percolator.formats.records import RecordKind, WriteRecord
from percolator.services.chassis.rpc import Quota
from percolator.services.tabletserver.history_collector import HistoryCollector
from percolator.services.tabletserver.own_steps import OwnSteps
from percolator.services.tabletserver.rights import RowRights
from percolator.services.tabletserver.settings import RequestLimits
from percolator.services.tabletserver.storage import Ancestry, DiskSpace
from percolator.services.tabletserver.tablets import Tablets, TabletServerHandler
from percolator.tablet.state import Ownership, TabletIdentity, TabletLimits, TimestampGuard
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.v1.master_pb2 import Table
from tests.simulation.virtual_time import VirtualClock
from tests.unit.tablet.tablets import results_of

COLUMN = b"c"
NO_ANCESTRY = Ancestry()
START = 1_700_000_000_000 << 18
COMMIT = START + 1


@dataclass
class MemoryOwnership:
    """Stands until `lost`. While the store is `silent`, it does not say."""

    identity: TabletIdentity
    lost: bool = False
    silent: bool = False

    def is_held_blocking(self) -> bool:
        return not self.lost

    async def is_held(self) -> bool:
        if self.silent:
            raise NotReady("the store does not answer")
        return self.is_held_blocking()


@dataclass
class FailingDisk(DurableMemory):
    """A disk whose next writes fail, or take as long as they are told."""

    failures: int = 0
    gate: asyncio.Event | None = None

    def __post_init__(self) -> None:
        super().__init__()

    async def sync(self) -> None:
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.failures > 0:
            self.failures -= 1
            raise OSError("the disk failed")


class MemoryStore:
    """The disks of all tablets, and their owners."""

    def __init__(self) -> None:
        self.disks: defaultdict[int, FailingDisk] = defaultdict(FailingDisk)
        self.owners: dict[int, MemoryOwnership] = {}
        self.open_fails: StoreUnusable | None = None
        self.opened = 0
        self.cleared: list[int] = []

    async def take_over(
        self, tablet: TabletIdentity, ancestry: Ancestry = NO_ANCESTRY
    ) -> MemoryOwnership:
        former = self.owners.get(tablet.tablet_id)
        if former is not None:
            if former.identity.epoch >= tablet.epoch:
                raise TabletMoved("used", tablet_id=tablet.tablet_id, epoch=tablet.epoch)
            former.lost = True
        self.owners[tablet.tablet_id] = MemoryOwnership(tablet)
        return self.owners[tablet.tablet_id]

    async def open(self, ownership: Ownership, *, open_tablets: int) -> MemoryStorage:
        assert isinstance(ownership, MemoryOwnership)
        await asyncio.sleep(0)
        if self.open_fails is not None:
            raise self.open_fails
        self.opened += 1
        disk = self.disks[ownership.identity.tablet_id]
        disk.settle(kept=True)
        return MemoryStorage(disk)

    async def remove_superseded(self, tablet: TabletIdentity) -> None:
        self.cleared.append(tablet.tablet_id)


@dataclass
class Machine:
    """A tablet server without its process: the handler, and everything below it."""

    limits: RequestLimits = field(default_factory=RequestLimits)
    tablet_limits: TabletLimits = field(default_factory=TabletLimits)
    free_bytes: int = 1 << 40
    store_trouble: str = ""
    store: MemoryStore = field(default_factory=MemoryStore)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    described: dict[int, Table] = field(default_factory=dict)
    """The tables by id, as a master knows them."""
    handed_out: set[tuple[str, int]] | None = None
    """The timestamps that the oracle has given to tokens, by the tokens' names. None: it does not
    answer."""

    def __post_init__(self) -> None:
        self.clock = VirtualClock(
            asyncio.get_running_loop(), wall_milliseconds=(START >> 18) + 60_000
        )
        log = structlog.stdlib.get_logger("test")
        self.disk = DiskSpace(
            self._free_bytes,
            self.clock,
            log,
            reserve_bytes=1000,
            store_trouble=lambda: self.store_trouble,
        )
        self.tablets = Tablets(
            self.store,
            self.clock,
            random.Random(1),
            self.tablet_limits,
            self._background,
            log,
            guard=TimestampGuard.by_own_clock(self.clock),
            tablets_warn=100,
        )
        self.collector = HistoryCollector(self.tablets, self._background, log)
        self.rights = RowRights(self._described)
        self.handler = TabletServerHandler(
            self.tablets,
            self.collector.raise_all,
            self.disk,
            self.clock,
            log,
            self.limits,
            server_id="server",
            watches=Quota("watches", "watches_max", 1_000),
            rights=self.rights,
            own_steps=OwnSteps(self.rights, self._handed_out),
            resolve_locks=None,
        )

    async def _described(self, table_id: int) -> Table:
        if table_id not in self.described:
            raise SchemaError(f"there is no table with the id {table_id}")
        return self.described[table_id]

    async def _handed_out(self, token: str, timestamps: Sequence[int]) -> Sequence[bool]:
        if self.handed_out is None:
            raise NotReady("the oracle does not answer")
        return [(token, one) in self.handed_out for one in timestamps]

    async def _free_bytes(self) -> int:
        return self.free_bytes

    def _background(self, name: str, work: Coroutine[Any, Any, object], /) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self.tasks.append(task)
        return task

    async def refusal(self, mutations: pb.MutationBatch) -> ErrorDetail:
        """Why a tablet has executed nothing of this batch."""
        (result,) = await self.mutate(mutations)
        return result.error

    async def open(
        self,
        tablet: int,
        epoch: int = 1,
        start: bytes = b"",
        end: bytes = b"",
        schema: int = 1,
        *,
        change_feed: bool = False,
    ) -> pb.TabletDescription:
        request = pb.OpenTabletRequest(
            table_id=3,
            tablet_id=tablet,
            epoch=epoch,
            schema_version=schema,
            range=cells_pb2.RowRange(start=start, end=end),
            change_feed=change_feed,
        )
        return (await self.handler.open_tablet(request)).tablet

    async def mutate(self, *batches: pb.MutationBatch) -> list[pb.MutationBatchResult]:
        return list((await self.handler.mutate(pb.MutateRequest(batches=batches))).batches)

    async def disk_has(self, free_bytes: int) -> None:
        """The server finds so much of its disk free."""
        self.free_bytes = free_bytes
        await self.disk.check()

    async def lose_disk(self) -> None:
        """A write of tablet 1 fails, and then the disk is too full to open the tablet again."""
        self.store.disks[1].failures = 1
        self.store.open_fails = disk_full()
        await self.mutate(put(1, b"row"))

    async def value(self, tablet: int, row: bytes, epoch: int = 1) -> bytes | None:
        read = pb.RowRead(row=row, columns=[COLUMN], timestamp=COMMIT)
        batch = pb.ReadBatch(target=target(tablet, epoch), reads=[read])
        (result,) = (await self.handler.read(pb.ReadRequest(batches=[batch]))).batches
        assert not result.HasField("error"), result.error
        return result.found.values[0] if result.found.values else None


def target(tablet: int, epoch: int = 1, schema: int = 1) -> pb.TabletTarget:
    return pb.TabletTarget(tablet_id=tablet, epoch=epoch, schema_version=schema)


def put(tablet: int, *rows: bytes, epoch: int = 1, value: bytes = b"v") -> pb.MutationBatch:
    """Unconditional commits."""
    record = WriteRecord(START, RecordKind.PUT, value).encode()
    change = pb.Change(
        kind=pb.Change.KIND_PUT, space=cells_pb2.SPACE_WRITE, timestamp=COMMIT, value=record
    )
    return pb.MutationBatch(
        target=target(tablet, epoch),
        mutations=[pb.Mutation(row=row, column=COLUMN, changes=[change]) for row in rows],
    )


def outcomes(result: pb.MutationBatchResult) -> list[str]:
    return [pb.Outcome.Name(one.outcome).removeprefix("OUTCOME_") for one in results_of(result)]


def disk_full() -> StoreUnusable:
    return StoreUnusable("full", fault=StoreFault.DISK_FULL)
