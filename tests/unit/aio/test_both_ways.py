"""Transactions that commit in one round leave the same history as those in two phases."""

from __future__ import annotations

import random

import pytest

from percolator import Limits, Outcome, observes
from percolator.aio import Database, Transaction
from percolator.aio.observing import worker_context
from percolator.errors import ConflictError
from percolator.formats.records import WriteRecord
from percolator.observers.registration import register
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_NOTIFY, SPACE_WRITE, Space
from tests.simulation.virtual_time import run_virtually
from tests.unit.connected import Cluster, balance, connected


@observes(balance, name="watching")
async def watching(tx: Transaction, row: str) -> None:
    """Never runs: only its notifications count."""


_ROWS = ("a", "b", "z")
_STEPS = 60


class _Program:
    """Transactions that overlap, the same ones for the same seed."""

    def __init__(self, db: Database, seed: int) -> None:
        self._db = db
        self._chance = random.Random(seed)
        self.course: list[object] = []
        self.numbers: dict[int, int] = {}
        """The transactions in the order in which they began, by start timestamp."""

    async def run(self) -> None:
        open_ones: list[Transaction] = []
        for number in range(_STEPS):
            if len(open_ones) < 3:
                tx = self._db.transaction()
                self.numbers[await tx.timestamp()] = number
                open_ones.append(tx)
            tx = self._chance.choice(open_ones)
            await self._step(tx, number)
            if self._chance.random() < 0.4:
                open_ones.remove(tx)
                await self._end(tx)
        for tx in open_ones:
            await self._end(tx)

    async def _step(self, tx: Transaction, number: int) -> None:
        row = self._chance.choice(_ROWS)
        match self._chance.randrange(5):
            case 0 | 1:
                await tx.set(row, balance, number)
            case 2:
                await tx.delete(row, balance)
            case 3:
                await tx.lock(row, balance)
            case _:
                self.course.append(await tx.get(row, balance))

    async def _end(self, tx: Transaction) -> None:
        try:
            await tx.commit()
        except ConflictError:
            self.course.append("conflict")  # at any of its cells that another has written
        else:
            self.course.append(tx.outcome)
        await self._db.internal.engine.env.background.drain(1.0)


async def _stored(cluster: Cluster, space: Space) -> list[tuple[bytes, int, bytes]]:
    found = []
    for tablet in cluster.tablets.values():
        target = pb.TabletTarget(
            tablet_id=tablet.identity.tablet_id,
            epoch=tablet.identity.epoch,
            schema_version=tablet.schema_version,
        )
        request = pb.ScanCellsRequest(target=target, space=space)
        async for page in tablet.scan_cells(request):
            found += [(cell.row, cell.timestamp, cell.value) for cell in page.cells]
    return sorted(found)


async def _history(limits: Limits, seed: int) -> tuple[object, ...]:
    async with connected(limits) as (db, cluster):
        await register(worker_context(db.internal.engine), [watching])
        program = _Program(db, seed)
        await program.run()
        assert not await _stored(cluster, SPACE_LOCK)
        records = []
        notified = [(row, at) for row, at, _ in await _stored(cluster, SPACE_NOTIFY)]
        order = {at: place for place, at in enumerate(
            sorted({at for _, at, _ in await _stored(cluster, SPACE_WRITE)})
        )}  # fmt: skip
        for row, at, value in await _stored(cluster, SPACE_WRITE):
            record = WriteRecord.decode(value)
            if record.start_timestamp in program.numbers:
                number = program.numbers[record.start_timestamp]
                is_notified = (row, at) in notified
                records.append((row, order[at], number, record.kind, record.value, is_notified))
        assert Outcome.COMMITTED in program.course
        return program.course, records


@pytest.mark.parametrize("seed", range(10))
def test_both_ways_take_the_same_course_and_leave_the_same_records(seed: int) -> None:
    in_one_round = run_virtually(_history(Limits(), seed))
    in_two_phases = run_virtually(_history(Limits(one_round_cells_max=0), seed))
    assert in_one_round == in_two_phases
