"""The leading master's map: a change is durable before it takes effect, even if its caller left.

A map that is missing, or comes from an older copy, is not taken for that of the tables.

The map of tables and tablets, as a value.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.errors import (
    InvariantViolation,
    NotReady,
    PercolatorError,
    SchemaError,
    StoreFault,
    StoreUnusable,
)
from percolator.services.chassis.coordinator import Leadership
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.master import cluster_map
from percolator.services.master.cluster_map import ClusterMap, Observer, Table, Tablet
from percolator.services.master.leader import begin_tablet_term
from percolator.services.master.map_store import MapStore
from percolator.services.master.tablet_changes import BalanceLimits, next_move
from percolator.services.master.tablet_data import DirectoryTablets
from percolator.v1 import master_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.wire import methods
from percolator.world import World
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.simulation.virtual_time import VirtualClock
from tests.unit.master.cluster_world import (
    ROOT,
    ModelCluster,
    cluster,
    create,
    described,
    on_three_servers,
    served,
)
from tests.unit.refusals import refused


class SlowLeadership(Leadership):
    """Takes a second to write, and then may fail."""

    def __init__(self) -> None:
        self.failure: StoreUnusable | None = None
        self.values: dict[str, bytes] = {}

    async def put(self, key: str, value: bytes) -> None:
        await asyncio.sleep(1.0)
        if self.failure is not None:
            raise self.failure
        self.values[key] = value


def new_table(current: ClusterMap) -> tuple[ClusterMap, int]:
    changed, table = current.with_new_table(f"t{len(current.tables)}", [], 0, 0)
    return changed, table.table_id


@pytest.mark.parametrize("fails", [False, True])
async def test_a_change_whose_caller_leaves_takes_effect_if_it_is_durable_and_only_then(
    fails: bool,
) -> None:
    """A write that fails then reports to no caller: conftest.py fails on what the loop logs."""
    leadership = SlowLeadership()  # type: ignore[abstract]
    store = MapStore(leadership, ClusterMap())
    if fails:
        leadership.failure = StoreUnusable("disk full", fault=StoreFault.DISK_FULL)
    changing = asyncio.create_task(store.change(new_table))
    await asyncio.sleep(0.5)
    changing.cancel()
    await asyncio.wait([changing])
    await asyncio.sleep(1.0)
    assert len(store.current.tables) == store.changes == len(leadership.values) == (not fails)


async def test_no_master_leads_with_a_map_that_is_older_than_the_tables(
    world: ModelCluster,
) -> None:
    """Otherwise it would give their ids to new tables, which would have the cells of the old."""
    table = await create(world, splits=[])
    world.kill_master(world.masters[0])
    world.disk.make_durable_directory(ROOT / str(table) / "2")
    files, roles = MemoryFiles(world.disk), ROOT / "coordinator"
    await files.rename(roles / "master", roles / "lost")
    process = world.start_master()
    await asyncio.sleep(10)
    assert process.master.leader is None
    world.kill_master(process)
    await files.rename(roles / "master", roles / "empty")
    await files.rename(roles / "lost", roles / "master")
    world.start_master()
    await world.until(lambda: served(world, table))


@pytest.mark.parametrize(
    ("is_deposed", "error"), [(False, StoreUnusable), (True, NotReady)], ids=["leads", "deposed"]
)
async def test_a_former_leader_does_not_ask_for_its_successors_tables_to_be_moved_away(
    *, is_deposed: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was paused before its term began finds tables that are not in its map."""
    disk, clock = MemoryDisk(), VirtualClock(asyncio.get_running_loop())
    disk.make_durable_directory(ROOT)
    files, anything = MemoryFiles(disk), cast("Any", None)
    leadership = await DirectoryCoordinator(files, clock, ROOT).campaign("master", "a:1")
    correct, directory = leadership.get, ROOT / "coordinator/master/e1"

    async def get(key: str) -> bytes | None:
        found = await correct(key)
        if is_deposed:
            await files.rename(directory, directory.with_name("e1.sealed"))
        disk.make_durable_directory(ROOT / "10" / "11")
        return found

    monkeypatch.setattr(leadership, "get", get)
    world = World(clock, anything, Random(1))
    with pytest.raises(error):
        await begin_tablet_term(world, DirectoryTablets(files, ROOT), anything, leadership)
    await leadership.resign()


rows = st.binary(min_size=1, max_size=3)


def with_table(*splits: bytes) -> tuple[ClusterMap, int]:
    changed, table = ClusterMap().with_new_table("t", splits, 0, 0)
    return changed, table.table_id


@given(st.lists(rows, unique=True, max_size=8), st.lists(rows, max_size=8))
def test_however_it_is_split_every_row_is_in_exactly_one_tablet(
    splits: list[bytes], more: list[bytes]
) -> None:
    current, table = with_table(*sorted(splits))
    for row in more:
        (tablet,) = [one for one in current.tablets.values() if one.holds(row)]
        if row > tablet.start:
            current, _, _ = current.with_split(tablet, row)
    for row in [*splits, *more, b"", b"\xff" * 4]:
        assert len([one for one in current.tablets.values() if one.holds(row)]) == 1
        found = current.overlapping(table, row, row + b"\0")
        assert [one.holds(row) for one in found] == [True]
    assert cluster_map.decode(cluster_map.encode(current)) == current


@given(st.lists(rows, unique=True, max_size=8), rows, rows, st.integers(1, 4))
def test_pages_of_locations_are_the_tablets_of_the_range(
    splits: list[bytes], one: bytes, other: bytes, limit: int
) -> None:
    current, table = with_table(*sorted(splits))
    start, end = min(one, other), max(one, other) + b"\0"
    found: list[int] = []
    request = pb.LocateTabletsRequest(
        table_id=table, range=RowRange(start=start, end=end), limit=limit
    )
    while True:
        page = cluster_map.locate_tablets(current, request, lambda _: True)
        found += [location.tablet_id for location in page.locations]
        assert len(page.locations) <= limit
        if not page.HasField("rest"):
            break
        request.range.CopyFrom(page.rest)
    expected = [
        t for t in current.of_tables[table] if t.start < end and (not t.end or start < t.end)
    ]
    assert found == [tablet.tablet_id for tablet in expected]


def test_a_parent_is_kept_until_both_halves_have_been_served() -> None:
    current, table = with_table()
    (parent,) = current.tablets.values()
    current, lower, upper = current.with_split(parent, b"m")
    assert (lower.origin_tablet_id, upper.origin_tablet_id) == (parent.tablet_id,) * 2
    both = {lower.tablet_id, upper.tablet_id}
    assert current.named_tablets == both | {parent.tablet_id}
    current = current.with_existing([current.tablets[lower.tablet_id]])
    assert current.retired == ()
    assert current.named_tablets == both | {parent.tablet_id}
    assert current.tablets[upper.tablet_id].origin_tablet_id == parent.tablet_id
    current = current.with_existing([current.tablets[upper.tablet_id]])
    assert current.retired == ((table, parent.tablet_id),)
    assert current.named_tablets == both


def test_the_directories_of_a_dropped_table_and_of_parents_are_left_to_be_removed() -> None:
    current, table = with_table()
    (parent,) = current.tablets.values()
    current, lower, upper = current.with_split(parent, b"m")
    current = current.without_table(table)
    assert {tablet for _, tablet in current.retired} == {
        parent.tablet_id,
        lower.tablet_id,
        upper.tablet_id,
    }
    assert not current.tables
    assert not current.tablets


def test_a_stored_map_is_read_back_in_full() -> None:
    observers = (
        Observer("index", (b"a", b"\xff"), paused=True),
        Observer("weak", (b"b",), weak=True),
    )
    table = Table(1, "t", 7, 1000, 1 << 20, observers, deleting=True)
    tablet = Tablet(2, 1, b"", b"", 9, "id", "host:1", True, 0, 0, 8)
    current = ClusterMap(5, {1: table}, {2: tablet}, frozenset({"x"}), ((3, 4),))
    assert cluster_map.decode(cluster_map.encode(current)) == current


def test_a_damaged_map_is_refused() -> None:
    with pytest.raises(StoreUnusable):
        cluster_map.decode(b"\xff\xff")


@pytest.mark.parametrize(
    "tablets",
    [
        [],
        [(b"", b"m")],
        [(b"m", b"")],
        [(b"", b"m"), (b"k", b"")],
        [(b"", b"k"), (b"m", b"")],
        [(b"", b""), (b"", b"")],
    ],
)
def test_a_map_with_gaps_or_overlaps_violates_the_invariant(
    tablets: list[tuple[bytes, bytes]],
) -> None:
    made = {number: Tablet(number, 1, start, end) for number, (start, end) in enumerate(tablets, 2)}
    with pytest.raises(InvariantViolation):
        ClusterMap(9, {1: Table(1, "t")}, made)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.DescribeTableRequest(), "name"),
        (pb.DescribeTableRequest(name="t", table_id=1), "table_id"),
    ],
)
def test_a_table_is_described_by_name_or_by_id(
    request_: pb.DescribeTableRequest, field: str
) -> None:
    current, _ = with_table()
    with refused(field):
        cluster_map.describe_table(current, request_)


def test_an_unknown_table_is_a_schema_error() -> None:
    current, _ = with_table()
    for unknown in (pb.DescribeTableRequest(name="u"), pb.DescribeTableRequest(table_id=99)):
        with pytest.raises(SchemaError):
            cluster_map.describe_table(current, unknown)
    with pytest.raises(SchemaError):
        cluster_map.locate_tablets(current, pb.LocateTabletsRequest(table_id=99), lambda _: True)


def loads(**counts: int) -> list[Tablet]:
    return [
        Tablet(number, 1, b"", b"", server_id=server)
        for server, count in counts.items()
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("tablets", "usable", "expected"),
    [
        (loads(a=5, b=5), "ab", None),
        (loads(a=6, b=5), "ab", None),
        (loads(a=7, b=5), "ab", "b"),
        (loads(a=100, b=92), "ab", None),
        (loads(a=100, b=80), "ab", "b"),
        (loads(a=2, b=0, c=1), "abc", "b"),
        (loads(a=1, gone=1), "ab", "b"),
        (loads(a=1), "", None),
    ],
)
def test_tablets_are_moved_only_for_differences_that_are_worth_a_move(
    tablets: list[Tablet], usable: str, expected: str | None
) -> None:
    move = next_move(tablets, list(usable), BalanceLimits())
    assert (move and move[1]) == expected


# A leading master that dies at any of its system calls, pauses, and disks that fail.
#
# A standby that cannot read its store sends callers to another master, as one that cannot lead.
#
# A master that begins to lead lists from its first answer on what the leader before has listed.

SERVERS = ("a:1", "b:1", "c:1")
STRIDE = 6
"""Every sixth system call: trying all of them takes a minute, and finds the same."""


class Acknowledged:
    """Changes that were acknowledged to a client, and must therefore never be lost."""

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
        await world.call(methods.DELETE_TABLE, name=name, seconds=2)
        self.deleted.add(name)

    async def check(self, world: ModelCluster) -> bool:
        for name, table in self.tables.items():
            found = await described(world, name)
            assert found.table_id == table, "an acknowledged table is another one"
        for name in self.deleted:
            with pytest.raises(SchemaError):
                await described(world, name)
        for (table, row), value in self.rows.items():
            assert await world.read(table, row) == value, f"row {row!r} of table {table} is lost"
        listed = (await world.call(methods.LIST_TABLETS)).tablets
        return all(one.serving for one in listed)


async def with_a_table(world: ModelCluster) -> Acknowledged:
    known = Acknowledged()
    await known.create(world, "t", [b"e"])
    await known.write(world, "t")
    return known


async def history(world: ModelCluster, known: Acknowledged) -> None:
    """Makes the master do everything that it can do. Ends when it dies."""
    await known.create(world, "t", [b"e"])
    await known.write(world, "t")
    await known.create(world, "gone", [])
    first = (await world.locate(known.tables["t"]))[0]
    await world.call(methods.SPLIT_TABLET, tablet_id=first.tablet_id, seconds=2)
    last = (await world.locate(known.tables["t"]))[-1]
    await world.call(methods.MOVE_TABLET, tablet_id=last.tablet_id, seconds=2)
    world.kill_server("b:1")
    await known.create(world, "u", [])
    observer = pb.Observer(name="index", columns=[b"body"])
    await world.call(methods.CHANGE_OBSERVERS, table="t", add=[observer], seconds=4)
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


@on_three_servers
async def test_a_paused_master_that_wakes_gives_no_answers_and_no_orders(
    world: ModelCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = await with_a_table(world)
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
        await described(world, "late")
    await world.until(lambda: known.check(world))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@on_three_servers
async def test_while_the_disk_fails_nothing_changes_and_afterwards_work_continues(
    world: ModelCluster,
    number: int,
) -> None:
    known = await with_a_table(world)
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
@on_three_servers
async def test_a_disk_that_fails_while_a_master_starts_ends_none_of_its_work(
    world: ModelCluster,
    operation: str,
    nth: int,
) -> None:
    """A master that was restarted on a full disk ended by itself, instead of leading later."""
    known = await with_a_table(world)
    second = world.replace_master()
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
async def test_a_standby_that_cannot_read_what_the_leader_recorded_says_so(
    world: ModelCluster, number: int
) -> None:
    """The caller was told that an invariant is violated, and so was whoever is on call."""
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


async def test_no_answer_of_a_master_that_begins_to_lead_lists_no_servers(
    world: ModelCluster,
) -> None:
    """Programs would believe that there are none, until they ask again seconds later."""
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
