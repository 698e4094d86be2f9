"""Tablets roll the locks of a committed job forward: its driver tells them, or who meets many."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from percolator import observes
from percolator.aio import Database
from percolator.aio.shared import SharedTransaction
from percolator.protocol.roll_forward import MANY
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.aio.shared_attempts import receipt_of, values_of
from tests.unit.connected import Cluster, balance, connected_to, written_out

ROWS = 1_500
"""In each of the two tablets."""
VALUES = {f"{task}{number:05}": number for task in "az" for number in range(ROWS)}


class Watched(Cluster):
    """Counts what it is told and sent."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.told: list[pb.RollForwardRequest] = []
        self.mutations = 0

    async def roll_forward(self, request: pb.RollForwardRequest) -> pb.RollForwardResponse:
        self.told.append(request)
        return await super().roll_forward(request)

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        self.mutations += sum(len(written_out(batch)) for batch in request.batches)
        return await super().mutate(request)

    def locks(self) -> int:
        return sum(len(tablet._state.mirror) for tablet in self.tablets.values())


async def _committed(db: Database, values: dict[str, int]) -> SharedTransaction:
    async with db.shared_transaction() as whole:
        receipts = [
            await receipt_of(
                db, whole.ticket, task, **{r: v for r, v in values.items() if r[0] == task}
            )
            for task in "az"
        ]
        await whole.commit(receipts)
    return whole


async def _settled(cluster: Watched) -> None:
    """Returns once the tablets have done what they were told."""
    for _ in range(1_000):
        if not cluster.locks():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{cluster.locks()} locks are left")


async def test_the_driver_tells_all_tablets() -> None:
    async with connected_to(Watched) as (db, cluster):
        sent_before = cluster.mutations
        whole = await _committed(db, VALUES)
        await whole.told(1.0)
        assert len(cluster.told) == 2
        await _settled(cluster)
        assert cluster.mutations - sent_before < len(VALUES) * 1.1, "more than the prewrites"
        assert await values_of(db) == VALUES


async def test_the_driver_knows_what_to_tell_from_receipts_that_can_be_read_only_once() -> None:
    async with connected_to(Watched) as (db, cluster), db.shared_transaction() as whole:
        receipts: Any = iter([await receipt_of(db, whole.ticket, "1", ann=1, zoe=2)])
        await whole.commit(receipts)
        await whole.told(1.0)
        await _settled(cluster)
        assert await values_of(db) == {"ann": 1, "zoe": 2}


async def test_a_reader_of_many_locks_tells_their_tablet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its driver died right after the commit."""
    monkeypatch.setattr(SharedTransaction, "_tell_tablets", _dead)
    async with connected_to(Watched) as (db, cluster):
        await _committed(db, VALUES)
        sent_before = cluster.mutations
        assert cluster.locks() == len(VALUES)
        assert await values_of(db) == VALUES
        await _settled(cluster)
        assert 2 <= len(cluster.told) <= 6, "one for each page would be no better than before"
        assert cluster.mutations - sent_before < len(VALUES) / 100
        assert await values_of(db) == VALUES


async def _dead(self: SharedTransaction, commit: int) -> None:
    """The process has ended."""


async def test_few_locks_are_rolled_forward_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedTransaction, "_tell_tablets", _dead)
    values = {f"{task}{number}": number for task in "az" for number in range(MANY // 2)}
    async with connected_to(Watched) as (db, cluster):
        await _committed(db, values)
        assert await values_of(db) == values
        await _settled(cluster)
        assert not cluster.told


async def test_observers_are_told_even_under_a_newer_schema() -> None:
    """One that was registered while the job wrote, by another client."""
    async with connected_to(Watched) as (db, cluster):
        async with db.shared_transaction() as whole:
            receipts = [await receipt_of(db, whole.ticket, "a", **_few("a"))]
            schema = db.internal.engine.catalog
            stale = {info: schema.get(info) for info in _tables(receipts)}
            await db.register_observers([_index])
            for table_id, known in stale.items():
                assert known is not None
                schema._by_id[table_id] = known  # as the driver's process knows it
            await whole.commit(receipts)
            await whole.told(1.0)
        await _settled(cluster)
        written = sum(
            tablet.statistics().notifications_written for tablet in cluster.tablets.values()
        )
        assert written == MANY


def _few(task: str) -> dict[str, int]:
    return {f"{task}{number:05}": number for number in range(MANY)}


def _tables(receipts: Iterable[object]) -> set[int]:
    return {table for one in receipts for table in one.tables}  # type: ignore[attr-defined]


@observes(balance)
def _index(tx: object, row: str) -> None:
    """Is only registered."""
