"""A database over the model of a row store, and whoever collects it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from percolator import Table, Timestamp, aio, codecs
from percolator.aio.connecting import connect_to
from percolator.aio.engine import Rows
from percolator.bigtable.store import BigtableStore
from percolator.errors import CellAddress, InvariantViolation
from percolator.formats.records import LockRecord, RecordKind
from percolator.history.rows import Decided, RowHistory
from percolator.limits import Limits
from percolator.protocol import steps
from percolator.retries import RetryPolicy
from percolator.routing.catalog import TableSchema
from percolator.routing.cells import APPLIED, Answer, CellMutation
from percolator.rowstore.adapter import stored_cells
from percolator.rowstore.collection import Bounds, Collected, RowCollector
from percolator.rowstore.intents import Intent, Intents
from percolator.rowstore.layout import Times
from percolator.rowstore.port import Change, Check
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.cluster_in_memory import ADDRESS
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL, ClusterOverRows
from percolator.v1 import master_pb2
from percolator.world import Clock, MachineClock, World

ONE, OTHER = Table("one"), Table("other")
VALUE, REST = ONE.column("value", codecs.integer), OTHER.column("value", codecs.integer)
SECONDS = 10.0


class Store(BigtableStore):
    """Fails when told to."""

    changes_until_failure: int | None = None
    before_change: Callable[[], Awaitable[None]] | None = None

    async def check_and_mutate(
        self,
        table_id: int,
        key: bytes,
        check: Check,
        changes: Sequence[Change],
        timeout_seconds: float,
    ) -> bool:
        if self.before_change is not None:
            await self.before_change()
        if self.changes_until_failure is not None:
            if not self.changes_until_failure:
                raise InvariantViolation("told to fail")
            self.changes_until_failure -= 1
        return await super().check_and_mutate(table_id, key, check, changes, timeout_seconds)


class Site:
    """A database over the model, and whoever collects it."""

    def __init__(
        self,
        database: aio.Database,
        rows: Rows,
        cluster: ClusterOverRows,
        network: InProcessNetwork,
    ) -> None:
        self.database = database
        self.cluster = cluster
        self.network = network
        self.store: Any = rows.store
        self.times = rows.times
        engine = database.internal.engine
        self.env = engine.env
        self.history = RowHistory(
            engine.env, rows.store, rows.times, engine.world, self._registered, share=1.0
        )
        self.asked: list[Callable[[], Awaitable[object]]] = []
        """The first of them is called, and goes, before it is looked up what is registered."""

    async def _registered(self) -> dict[int, TableSchema]:
        if self.asked:
            await self.asked.pop(0)()
        engine = self.database.internal.engine
        tables = await engine.catalog.describe_all(engine.now() + SECONDS)
        return {one.table_id: TableSchema.of(one.schema_version, one.observers) for one in tables}

    async def change_observers(self, *, add: str = "", remove: str = "") -> None:
        """Registers observers of the first table's only column."""
        engine = self.database.internal.engine
        request = master_pb2.ChangeObserversRequest(table=ONE.name)
        if add:
            request.add.add(name=add, columns=[VALUE.name])
        if remove:
            request.remove.append(remove)
        await engine.catalog.change_observers(request, engine.now() + SECONDS)

    @property
    def intents(self) -> Intents:
        found = self.database.internal.engine.intents
        assert found is not None
        return found

    async def all_intents(self) -> list[Intent]:
        found, _ = await self.intents.page(b"\1", b"", [(b"", b"")], self.env.now() + SECONDS)
        return found

    async def now(self) -> int:
        return await self.env.timestamps.get()

    async def cells(self, table: Table[Any], space: int) -> int:
        table_id = await self.table_id(table)
        cells = stored_cells(self.store, table_id, self.times, SECONDS)
        return sum([cell.space == space async for cell in cells])

    async def table_id(self, table: Table[Any]) -> int:
        engine = self.database.internal.engine
        return (await engine.catalog.table(table.name, engine.now() + SECONDS)).table_id

    async def decided(self, below: int, *, keeping: Sequence[Table[Any]] = ()) -> Decided:
        kept = [await self.table_id(table) for table in keeping]
        tables = [await self.table_id(table) for table in (ONE, OTHER)]
        return Decided({one: 0 if one in kept else below for one in tables}, below)

    async def lock(self, row: bytes, *, ttl_milliseconds: int, start: int = 0) -> int:
        """Locks a cell in each table; returns the start of the transaction."""
        start = start or await self.now()
        primary = CellAddress(await self.table_id(ONE), row, VALUE.name)
        lock = LockRecord(start, start + 1, ttl_milliseconds, RecordKind.PUT, b"", primary, b"3")
        for cell in (primary, CellAddress(await self.table_id(OTHER), row, REST.name)):
            step = steps.prewrite(cell.row, cell.column, start, lock.encode(), None)
            assert await self.answer(CellMutation(cell.table_id, step)) is APPLIED
        return start

    async def answer(self, mutation: CellMutation) -> Answer:
        (answer,) = await self.env.cells.mutate([mutation], self.env.now() + SECONDS)
        return answer

    async def set(self, row: str, *values: int) -> None:
        """Gives a row of each table these values, one after another."""
        for value in values:
            async with self.database.transaction() as tx:
                await tx.set(row, VALUE, value)
                await tx.set(row, REST, value)

    async def delete(self, row: str) -> None:
        """Deletes it from the first table."""
        async with self.database.transaction() as tx:
            await tx.delete(row, VALUE)

    async def seen(self, row: str, at: int | None = None) -> int | None:
        async with self.database.snapshot(at=None if at is None else Timestamp(at)) as snapshot:
            return await snapshot.get(row, VALUE)

    def lock_before_a_change(self, row: bytes, start: int) -> None:
        """The lock comes when the store is about to change the next row for somebody else."""

        async def late() -> None:
            self.store.before_change = None
            await self.lock(row, ttl_milliseconds=600_000, start=start)

        self.store.before_change = late

    async def collect_one(self) -> Collected:
        """Collects the first table, without looking for locks before."""
        bounds, done = Bounds(await self.now(), await self.now()), Collected()
        engine = self.database.internal.engine
        alone = RowCollector(self.store, self.times, engine.world, engine.limits, share=1.0)
        assert await alone.collect(await self.table_id(ONE), bounds, done) is None
        return done


@asynccontextmanager
async def site(clock: Clock | None = None) -> AsyncIterator[Site]:
    """By the machine's clock, or another one."""
    clock = clock or MachineClock()
    there = InProcessNetwork({MODEL.address: BigtableInMemory()})
    cluster = ClusterOverRows(clock, there, MODEL)
    here = InProcessNetwork({ADDRESS: cluster})
    world = World(clock=clock, network=here, random=random.Random(1))
    rows = Rows(Store(there, MODEL), Times(clock.wall_milliseconds() - 86_400_000))
    limits = Limits(lock_ttl_seconds=0.5, heartbeat_seconds=0.1)
    async with await connect_to(world, [ADDRESS], limits, RetryPolicy(), rows=rows) as database:
        for table in (ONE, OTHER):
            await database.create_table(table)
        yield Site(database, rows, cluster, there)
