"""A process says what its transactions and observers do, as briefly as the lock service asks."""

from __future__ import annotations

import asyncio

import pytest

from percolator import ConflictError, Table, aio, codecs, observes
from percolator.aio.activity import ProcessActivity
from percolator.errors import CellAddress
from percolator.testing import connect_async
from percolator.v1.master_pb2 import ChangeObserversRequest
from percolator.wire.sessions import ACTIVITY_BYTES_MAX

people = Table("people")
name = people.column("name", codecs.text)
length = people.column("length", codecs.integer)


@observes(name)
async def measure(tx: aio.Transaction, row: str) -> None:
    await tx.set(row, length, len(await tx.get(row, name, default="")))


async def test_commits_and_conflicts_are_counted_with_the_cell() -> None:
    async with connect_async() as db:
        await db.create_table(people)
        async with db.transaction() as tx:
            await tx.set("a", name, "ann")
        loser = db.transaction()
        assert await loser.get("a", name) == "ann"
        async with db.transaction() as tx:
            await tx.set("a", name, "eve")
        await loser.set("a", name, "joe")
        with pytest.raises(ConflictError):
            await loser.commit()
        report = db.internal.engine.activity.report()
        assert (report.commits, report.conflicts) == (2, 1)
        [cell] = report.cells
        assert (cell.row, cell.column, cell.conflicts) == (b"a", b"name", 1)


async def test_observers_are_reported_while_they_run_and_not_after() -> None:
    async with connect_async() as db:
        await db.create_table(people)
        activity = db.internal.engine.activity
        async with db.run_observers([measure]):
            async with db.transaction() as tx:
                await tx.set("a", name, "ann")
            await db.wait_for_observers()
            [one] = activity.report().observers
            assert (one.table, one.observer, one.runs, one.commits) == ("people", "measure", 1, 1)
        assert not activity.report().observers


async def test_observers_whose_table_was_dropped_are_no_longer_reported() -> None:
    """Another table may have its name: for its changes, no worker would be missed."""
    async with connect_async() as db:
        await db.create_table(people)
        activity = db.internal.engine.activity
        async with db.run_observers([measure]):
            await db.drop_table(people)
            await db.create_table(people)
            await db.register_observers([measure])
            await asyncio.sleep(5.0)
            assert not activity.report().observers
            assert await activity.running_observers() == set()


async def test_paused_observers_are_reported() -> None:
    async with connect_async() as db:
        await db.create_table(people)
        engine = db.internal.engine
        async with db.run_observers([measure]):
            pause = ChangeObserversRequest(table="people", pause=["measure"])
            await engine.catalog.change_observers(pause, engine.now() + 10.0)
            await asyncio.sleep(5.0)
            assert [one.observer for one in engine.activity.report().observers] == ["measure"]


async def test_a_report_keeps_within_the_limit_and_leaves_out_what_matters_least() -> None:
    async with connect_async() as db:
        await db.create_table(people)
        activity = ProcessActivity()
        for number in range(100):
            activity.tally.lost_at(CellAddress(1, b"%03d" % number + b"x" * 5_000, b"c" * 3_000))
        async with db.run_observers([measure]) as worker:
            activity.workers.add(worker)
            report = activity.report()
        assert report.ByteSize() <= ACTIVITY_BYTES_MAX
        assert (report.conflicts, len(report.cells)) == (100, 0)
        assert [one.observer for one in report.observers] == ["measure"]
