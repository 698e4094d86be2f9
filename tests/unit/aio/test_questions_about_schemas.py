"""A client that meets a newer schema asks for it once, however many cells it writes."""

from __future__ import annotations

import asyncio

import pytest

from percolator import observes
from percolator.aio import Transaction
from percolator.aio.shared import SharedTransaction
from percolator.errors import SchemaChanged
from percolator.protocol.roll_forward import MANY
from percolator.v1 import master_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail
from tests.simulation.virtual_time import VirtualClock
from tests.unit.aio.shared_attempts import receipt_of, values_of
from tests.unit.connected import Cluster, balance, connected_to, written_out


class Asked(Cluster):
    """Counts descriptions, each of which takes a while."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.described = 0
        self.lag_until = 0.0
        """Until then, tablets have not heard of any schema but the first."""
        self.registers_after_a_commit = ""

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        self.described += 1
        await asyncio.sleep(0.01)
        return await super().describe_table(request)

    async def register(self, name: str, *, weak: bool = False) -> None:
        """By another client."""
        observer = master_pb2.Observer(name=name, columns=[balance.name], weak=weak)
        request = master_pb2.ChangeObserversRequest(table="accounts", add=[observer])
        await self.change_observers(request)

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        response = await super().mutate(request)
        if self._clock.monotonic_seconds() < self.lag_until:
            for batch, result in zip(request.batches, response.batches, strict=True):
                if batch.target.schema_version > 1:
                    result.Clear()
                    lags = SchemaChanged("not that one", table_id=1, schema_version=1)
                    result.error.CopyFrom(to_detail(lags))
        elif (
            self.registers_after_a_commit and sum(len(written_out(b)) for b in request.batches) == 1
        ):
            name, self.registers_after_a_commit = self.registers_after_a_commit, ""
            await self.register(name)
        return response


async def test_many_weak_notifications_ask_once() -> None:
    async with connected_to(Asked) as (db, cluster):
        await cluster.register("first", weak=True)
        engine = db.internal.engine
        info = await engine.catalog.table("accounts", engine.now() + 1.0)
        await engine.catalog.refresh(info.table_id, engine.now() + 1.0)
        tx = db.transaction()
        for number in range(2_000):
            await tx.notify(f"{number}", balance)
        await cluster.register("second", weak=True)
        cluster.described = 0
        await tx.commit()
        assert cluster.described == 1


async def test_the_other_cells_of_a_large_commit_ask_once_or_twice() -> None:
    async with connected_to(Asked) as (db, cluster):
        tx = db.transaction()
        for number in range(2_000):
            await tx.set(f"{number}", balance, number)
        cluster.described = 0
        cluster.registers_after_a_commit = "first"
        await tx.commit()
        await asyncio.sleep(3.0)
        assert cluster.described <= 2
        assert not any(len(tablet._state.mirror) for tablet in cluster.tablets.values())


async def _dead(self: SharedTransaction, commit: int) -> None:
    """The process has ended."""


async def test_a_reader_that_knows_a_newer_schema_than_a_tablet_asks_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tablet hears of a schema after the master has recorded it."""
    monkeypatch.setattr(SharedTransaction, "_tell_tablets", _dead)
    values = {f"a{number}": number for number in range(MANY // 2)}
    async with connected_to(Asked) as (db, cluster):
        async with db.shared_transaction() as whole:
            await whole.commit([await receipt_of(db, whole.ticket, "a", **values)])
        await cluster.register("first")
        engine = db.internal.engine
        info = await engine.catalog.table("accounts", engine.now() + 1.0)
        await engine.catalog.refresh(info.table_id, engine.now() + 1.0)
        cluster.described = 0
        cluster.lag_until = engine.now() + 2.0
        assert await values_of(db) == values
        await asyncio.sleep(3.0)
        assert cluster.described < 20
        assert not any(len(tablet._state.mirror) for tablet in cluster.tablets.values())


async def test_a_backfill_that_is_ahead_of_a_tablet_asks_now_and_then() -> None:
    async with connected_to(Asked) as (db, cluster):

        @observes(balance)
        async def first(tx: Transaction, row: str) -> None:
            """Is never run."""

        async with db.transaction() as tx:
            await tx.set("a", balance, 1)
        await db.register_observers([first])
        cluster.described = 0
        cluster.lag_until = db.internal.engine.now() + 2.0
        assert await db.backfill(first) == 1
        assert 2 < cluster.described < 60
