"""A leading master that dies at any of its system calls, pauses, and disks that fail.

A standby that cannot read its store sends callers to another master, as one that cannot lead.

A master that begins to lead lists from its first answer on what the leader before has listed.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from random import Random

import pytest

from percolator.errors import NotReady, PercolatorError, SchemaError
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from tests.unit.master.cluster_world import ModelCluster, cluster
from tests.unit.master.tables_of_rows import create

SERVERS = ("a:1", "b:1", "c:1")
STRIDE = 6
"""Every sixth system call: trying all of them takes a minute, and finds the same."""


class Acknowledged:
    """What was acknowledged to a client, and must therefore never be lost."""

    def __init__(self) -> None:
        self.tables: dict[str, int] = {}
        self.deleted: set[str] = set()
        self.rows: dict[tuple[int, bytes], bytes] = {}

    async def create(self, world: ModelCluster, name: str, splits: list[bytes]) -> None:
        request = pb.CreateTableRequest(name=name, splits=splits, exist_ok=True)
        self.tables[name] = (await world.ask(methods.CREATE_TABLE, request, 2)).table.table_id

    async def write(self, world: ModelCluster, name: str) -> None:
        table = self.tables[name]
        for letter in b"abcdefghij":
            row = bytes([letter])
            await world.write(table, row, b"1")
            self.rows[table, row] = b"1"

    async def delete(self, world: ModelCluster, name: str) -> None:
        # With or without an answer, nothing is known about the table from here on.
        table = self.tables.pop(name)
        self.rows = {key: value for key, value in self.rows.items() if key[0] != table}
        await world.ask(methods.DELETE_TABLE, pb.DeleteTableRequest(name=name), 2)
        self.deleted.add(name)

    async def check(self, world: ModelCluster) -> bool:
        for name, table in self.tables.items():
            found = await world.ask(methods.DESCRIBE_TABLE, pb.DescribeTableRequest(name=name))
            assert found.table.table_id == table, "an acknowledged table is another one"
        for name in self.deleted:
            with pytest.raises(SchemaError):
                await world.ask(methods.DESCRIBE_TABLE, pb.DescribeTableRequest(name=name))
        for (table, row), value in self.rows.items():
            assert await world.read(table, row) == value, f"row {row!r} of table {table} is lost"
        listed = (await world.ask(methods.LIST_TABLETS, pb.ListTabletsRequest())).tablets
        return all(one.serving for one in listed)


async def history(world: ModelCluster, known: Acknowledged) -> None:
    """Makes the master do everything that it can do. Ends when it dies."""
    await known.create(world, "t", [b"e"])
    await known.write(world, "t")
    await known.create(world, "gone", [])
    first = (await world.locate(known.tables["t"]))[0]
    await world.ask(methods.SPLIT_TABLET, pb.SplitTabletRequest(tablet_id=first.tablet_id), 2)
    last = (await world.locate(known.tables["t"]))[-1]
    await world.ask(methods.MOVE_TABLET, pb.MoveTabletRequest(tablet_id=last.tablet_id), 2)
    world.kill_server("b:1")
    await known.create(world, "u", [])
    observer = pb.Observer(name="index", columns=[b"body"])
    await world.ask(
        methods.CHANGE_OBSERVERS, pb.ChangeObserversRequest(table="t", add=[observer]), 4
    )
    await known.write(world, "u")
    await known.delete(world, "gone")
    await asyncio.sleep(3)


async def calls_of_a_history() -> int:
    async with cluster(*SERVERS) as world:
        (process,) = world.masters
        await history(world, Acknowledged())
        return process.files.faults.calls


async def run_with_crash(call: int, power: str) -> bool:
    """Checks that nothing acknowledged is lost. Returns whether the crash occurred."""
    async with cluster(*SERVERS, seed=call) as world:
        known = Acknowledged()
        (process,) = world.masters
        if call < process.files.faults.calls:
            return False
        process.files.faults.kill_at(call)
        try:
            await history(world, known)
        except PercolatorError:
            await asyncio.sleep(0)
        occurred = process.files.killed.is_set()
        world.kill_master(process)
        if power != "stays":
            world.disk.cut_power(Random(call) if power == "fails and some survives" else None)
        world.start_master()
        # Rarely: waiting until the killed server is given up is most of the cost of a run.
        await world.until(lambda: known.check(world), every=0.5)
        return occurred


@pytest.mark.parametrize("power", ["stays", "fails", "fails and some survives"])
async def test_wherever_a_master_dies_nothing_that_it_acknowledged_is_lost(
    power: str,
) -> None:
    """The model of the tablet servers also checks that no epoch is given to two of them."""
    calls = await calls_of_a_history()
    offset = ["stays", "fails", "fails and some survives"].index(power)
    occurred = [await run_with_crash(call, power) for call in range(offset, calls, STRIDE)]
    assert sum(occurred) > len(occurred) / 3


async def test_a_paused_master_that_wakes_gives_no_answers_and_no_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(*SERVERS) as world:
        known = Acknowledged()
        await known.create(world, "t", [b"e"])
        await known.write(world, "t")
        (paused,) = world.masters
        # Its system calls stop, and so does its beat: to the others it is silent.
        running = asyncio.Event()
        step = paused.files.step

        async def stopped(operation: str, path: Path) -> None:
            await running.wait()
            await step(operation, path)

        monkeypatch.setattr(paused.files, "step", stopped)

        async def create_late() -> pb.CreateTableResponse:
            call = world.network.unary(paused.address, methods.CREATE_TABLE)
            return await call(pb.CreateTableRequest(name="late"), 60)

        late = asyncio.create_task(create_late())
        world.start_master()
        await asyncio.sleep(6)
        world.kill_server("b:1")
        await world.until(lambda: known.check(world))
        running.set()
        with pytest.raises(PercolatorError):
            await late
        await asyncio.sleep(1)
        assert paused.master.leader is None
        with pytest.raises(SchemaError):
            await world.ask(methods.DESCRIBE_TABLE, pb.DescribeTableRequest(name="late"))
        await world.until(lambda: known.check(world))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_while_the_disk_fails_nothing_changes_and_afterwards_work_continues(
    number: int,
) -> None:
    async with cluster(*SERVERS) as world:
        known = Acknowledged()
        await known.create(world, "t", [b"e"])
        await known.write(world, "t")
        (process,) = world.masters
        process.files.faults.fail("append", times=5, number=number)
        with pytest.raises(PercolatorError):
            await Acknowledged().create(world, "u", [])
        assert await known.check(world)
        await asyncio.sleep(5)
        await known.create(world, "u", [])
        assert await known.check(world)


@pytest.mark.parametrize("operation", ["append", "create", "rename", "fsync", "list"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
async def test_a_disk_that_fails_while_a_master_starts_ends_none_of_its_work(
    operation: str, nth: int
) -> None:
    """A master that was restarted on a full disk ended by itself, instead of leading later."""
    async with cluster(*SERVERS) as world:
        known = Acknowledged()
        await known.create(world, "t", [b"e"])
        (first,) = world.masters
        world.kill_master(first)
        second = world.start_master()
        faults = second.files.faults
        faults.fail(operation, nth=nth, times=2, number=errno.ENOSPC)
        await asyncio.sleep(10)
        assert faults.hits, "nothing failed"
        faults.heal()
        for task in second.tasks:
            assert not task.done(), task
        await known.create(world, "u", [])
        assert await known.check(world)
        assert second.address in {one.address for one in second.master.masters}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
async def test_a_standby_that_cannot_read_what_the_leader_recorded_says_so(number: int) -> None:
    """The caller was told that an invariant is violated, and so was whoever is on call."""
    async with cluster("a:1") as world:
        table = await create(world)
        standby = world.start_master()
        await asyncio.sleep(1)
        standby.files.faults.fail("list", times=10**9, number=number)
        locate = world.network.unary(standby.address, methods.LOCATE_TABLETS)
        with pytest.raises(NotReady, match="cannot read what the leader has recorded"):
            await locate(pb.LocateTabletsRequest(table_id=table), 1.0)
        with pytest.raises(NotReady):
            await standby.master.servers()
        world.masters.reverse()
        assert await world.locate(table), "the leader answers"
        standby.files.faults.heal()
        assert (await locate(pb.LocateTabletsRequest(table_id=table), 1.0)).locations


TURNS = 1_000


async def test_no_answer_of_a_master_that_begins_to_lead_lists_no_servers() -> None:
    """Programs would believe that there are none, until they ask again seconds later."""
    async with cluster("a:1") as world:
        standby = world.start_master()
        await asyncio.sleep(2)

        async def listed() -> list[str]:
            return [one.address for one in await standby.master.servers()]

        before = await listed()
        assert "a:1" in before
        world.kill_master(world.masters[0])
        while standby.master.leader is None:
            assert await listed() == before
            await asyncio.sleep(0 if standby.master.candidacy.leader_address else 0.01)
        for _ in range(TURNS):
            assert set(before) <= set(await listed())
            await asyncio.sleep(0)
