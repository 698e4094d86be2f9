"""Calls to masters, and how long they may take."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from google.protobuf.message import Message

from percolator.codecs.indexes import IndexDefinition
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    NotReady,
    PercolatorError,
    PermissionDenied,
    Retry,
    SchemaError,
    Unavailable,
)
from percolator.routing.catalog import NO_OBSERVERS, Catalog, Masters, TableInfo, TabletMap
from percolator.routing.contents import TabletContents
from percolator.routing.lanes import SchemaVersions
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import master_pb2 as pb
from percolator.v1.cells_pb2 import RowRange, Space
from percolator.v1.errors_pb2 import TabletLocation
from percolator.wire.methods import LIST_TABLES
from percolator.world import (
    Network,
    UnaryMethod,
    World,
)
from tests.simulation.virtual_time import VirtualClock
from tests.unit.routing.tablet_servers import Cluster
from tests.unit.unary_network import UnaryNetwork


class SlowMaster(UnaryNetwork):
    """A network with a master that takes a while to answer."""

    def __init__(self, seconds: float, answer: Message) -> None:
        self.seconds = seconds
        self.found = answer
        self.calls = 0
        self.requests: list[Any] = []
        self.lost = 0
        """So many answers get lost."""
        self.missing = 0
        """At the first so many calls, there is no such table yet."""
        self.error: ExecutionUnknown | None = None
        """The answer that it gives instead."""

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> Any:
        self.calls += 1
        self.requests.append(request)
        if self.calls <= self.lost:
            raise Unavailable("the connection broke")
        await asyncio.sleep(min(self.seconds, timeout))
        if timeout < self.seconds:
            raise DeadlineExceeded("no answer in time")
        if self.error is not None:
            raise self.error
        if self.calls <= self.missing:
            raise SchemaError("there is no such table")
        return self.found


def _catalog(network: Network, *addresses: str) -> tuple[Catalog, VirtualClock]:
    clock = VirtualClock(asyncio.get_running_loop())
    world = World(clock, network, random.Random(1))
    return Catalog(world, addresses or ["m:1"], TabletMap(), SchemaVersions()), clock


async def test_a_table_that_takes_long_to_create_is_requested_once() -> None:
    """Otherwise, the second attempt would find the table, and report that it exists."""
    answer = pb.CreateTableResponse(table=pb.Table(table_id=7, name="large"), created=True)
    master = SlowMaster(8.0, answer)
    catalog, clock = _catalog(master)
    deadline = clock.monotonic_seconds() + 10.0
    table = await catalog.create("large", [], pb.TableOptions(), exist_ok=False, deadline=deadline)
    assert (table.table_id, master.calls) == (7, 1)


def _first_uses(
    catalog: Catalog, clock: VirtualClock, *seconds: float
) -> list[asyncio.Task[TableInfo]]:
    """Each by a caller with so much time."""
    now = clock.monotonic_seconds()
    return [asyncio.create_task(catalog.table("t", now + one)) for one in seconds]


async def test_a_master_is_asked_once_when_a_thousand_callers_begin_with_one_table() -> None:
    master = SlowMaster(1.0, pb.DescribeTableResponse(table=pb.Table(table_id=7, name="t")))
    catalog, clock = _catalog(master)
    impatient, *others = _first_uses(catalog, clock, 0.5, *[10.0] * 1_000)
    (second,) = _first_uses(catalog, clock, 0.2)
    with pytest.raises(DeadlineExceeded, match="table 't'") as caught:
        await second
    assert caught.value.retry is Retry.SAFE
    with pytest.raises(DeadlineExceeded):
        await impatient
    assert {table.table_id for table in await asyncio.gather(*others)} == {7}
    assert master.calls == 2, "one of the impatient caller"


async def test_each_caller_asks_again_for_a_table_that_did_not_exist_for_another_one() -> None:
    master = SlowMaster(1.0, pb.DescribeTableResponse(table=pb.Table(table_id=7, name="t")))
    master.missing = 1
    catalog, clock = _catalog(master)
    first, second, third = _first_uses(catalog, clock, 10.0, 10.0, 10.0)
    with pytest.raises(SchemaError):
        await first
    assert (await second).table_id == (await third).table_id == 7
    assert master.calls == 2


class _Master:
    """Knows a table with a feed, and lets nobody create one."""

    async def create_table(self, _: object) -> pb.CreateTableResponse:
        raise PermissionDenied("the caller has the role CLIENT, but it needs ADMIN")

    async def describe_table(self, request: pb.DescribeTableRequest) -> object:
        if request.name != "there":
            raise SchemaError(f"there is no table {request.name!r}")
        options = pb.TableOptions(change_feed=True)
        columns = [pb.ColumnCodec(column=b"v", codec="text")]
        indexes = [pb.Index(name="there", columns=columns, table_id=8)]
        table = pb.Table(table_id=7, name=request.name, options=options, indexes=indexes)
        return pb.DescribeTableResponse(table=table)


async def test_who_may_not_create_tables_may_use_one_that_exists_with_exist_ok() -> None:
    catalog, clock = _catalog(InProcessNetwork({"m:1": _Master()}))
    create = partial(catalog.create, splits=[], deadline=clock.monotonic_seconds() + 10.0)
    fed, kept = pb.TableOptions(change_feed=True), pb.TableOptions(retention_milliseconds=9)
    for options in (fed, pb.TableOptions()):
        assert (await create("there", options=options, exist_ok=True)).table_id == 7
    with pytest.raises(InvalidArgument, match="'there' exists with the cluster's default"):
        await create("there", options=kept, exist_ok=True)
    index = IndexDefinition("there", ((b"v", "text"),))
    info = await create("there", options=fed, exist_ok=True, indexes=[index])
    assert info.schema.indexes == (replace(index, table_id=8),)
    missing = [replace(index, name="missing")]
    with pytest.raises(SchemaError, match="'there' exists without the index 'missing'"):
        await create("there", options=fed, exist_ok=True, indexes=missing)
    for name, exist_ok in (("there", False), ("missing", True)):
        with pytest.raises(PermissionDenied):
            await create(name, options=fed, exist_ok=exist_ok)


async def test_a_table_that_takes_long_to_drop_is_dropped_once() -> None:
    """Otherwise, the second attempt would find no table, and report that there is none."""
    master = SlowMaster(3.0, pb.DeleteTableResponse(deleted=True))
    catalog, clock = _catalog(master)
    deadline = clock.monotonic_seconds() + 10.0
    assert await catalog.delete("large", missing_ok=False, deadline=deadline)
    assert master.calls == 1


async def test_attempts_to_create_or_drop_a_table_have_one_id_and_calls_have_different_ones() -> (
    None
):
    """By it, the next master recognises what was done although the answer was lost."""
    created = SlowMaster(0.0, pb.CreateTableResponse(table=pb.Table(table_id=7, name="t")))
    dropped = SlowMaster(0.0, pb.DeleteTableResponse(deleted=True))
    for master in (created, dropped):
        master.lost = 1
        catalog, clock = _catalog(master, "m:1", "n:1")
        deadline = clock.monotonic_seconds() + 10.0
        for _ in range(2):
            if master is created:
                options = pb.TableOptions()
                await catalog.create("t", [], options, exist_ok=False, deadline=deadline)
            else:
                await catalog.delete("t", missing_ok=False, deadline=deadline)
        first, again, other = master.requests
        assert (first, len(first.request_id)) == (again, 16)
        assert first.request_id != other.request_id


async def test_a_table_that_was_created_too_late_is_not_requested_again() -> None:
    """The error of the first attempt says that it was created. As of any call that has run out of
    time, it is `DeadlineExceeded`, which the network cannot tell from others of its base class."""
    master = SlowMaster(0.8, pb.CreateTableResponse())
    catalog, clock = _catalog(master)
    master.error = ExecutionUnknown("table 'large' was created, but cannot be used yet")
    with pytest.raises(DeadlineExceeded, match="was created"):
        await catalog.create(
            "large", [], pb.TableOptions(), exist_ok=False, deadline=clock.monotonic_seconds() + 1
        )
    assert master.calls == 1


# Calls go to the master that leads, whichever others are silent.


class _SomeMasters(SlowMaster):
    """Masters of which those at some addresses do not lead, or do not answer at all."""

    def __init__(self, **problems: PercolatorError) -> None:
        super().__init__(0.01, pb.ListTablesResponse())
        self.problems = problems
        self.asked: list[str] = []

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> Any:
        self.asked.append(address)
        problem = self.problems.get(address)
        if isinstance(problem, DeadlineExceeded):
            await asyncio.sleep(timeout)
        if problem is not None:
            raise problem
        return await super().answer(address, method, request, timeout)


def _masters(network: _SomeMasters, *addresses: str) -> tuple[Masters, VirtualClock]:
    clock = VirtualClock(asyncio.get_running_loop())
    return Masters(World(clock, network, random.Random(1)), addresses), clock


def _listings(masters: Masters, clock: VirtualClock, count: int) -> list[Awaitable[object]]:
    request, deadline = pb.ListTablesRequest(), clock.monotonic_seconds() + 5.0
    return [masters.call(LIST_TABLES, request, deadline) for _ in range(count)]


@pytest.mark.parametrize("callers", [1, 2, 3, 4, 8])
async def test_a_silent_master_costs_one_attempt_however_many_call_at_a_time(callers: int) -> None:
    network = _SomeMasters(a=DeadlineExceeded("no answer in time"))
    masters, clock = _masters(network, "a", "b")
    await asyncio.gather(*_listings(masters, clock, callers))
    assert clock.monotonic_seconds() == pytest.approx(2.0, abs=0.1)
    await asyncio.gather(*_listings(masters, clock, 1))
    assert network.asked == ["a"] * callers + ["b"] * (callers + 1)


async def test_callers_pause_when_they_have_asked_all_masters() -> None:
    network = _SomeMasters(a=NotReady("starting"), b=NotReady("starting"))
    masters, clock = _masters(network, "a", "b")
    answers = await asyncio.gather(*_listings(masters, clock, 10), return_exceptions=True)
    assert {type(answer) for answer in answers} == {DeadlineExceeded}
    assert clock.monotonic_seconds() == pytest.approx(5.0, abs=0.1)
    assert len(network.asked) < 10 * 2 * 25


# What is stored, for operators, who look while something is wrong.


class _MasterWithoutServers:
    """It has found no server for the only tablet yet."""

    async def locate_tablets(self, request: pb.LocateTabletsRequest) -> pb.LocateTabletsResponse:
        location = TabletLocation(table_id=1, tablet_id=2, epoch=3, range=RowRange(start=b"m"))
        return pb.LocateTabletsResponse(locations=[location])


async def test_a_tablet_without_a_server_is_named() -> None:
    cluster = Cluster({})
    network = cluster.world.network
    assert isinstance(network, InProcessNetwork)
    network.handlers["m:1"] = _MasterWithoutServers()
    versions = cluster.router.schema_versions
    catalog = Catalog(cluster.world, ["m:1"], cluster.tablets, versions)
    contents = TabletContents(cluster.world, catalog)
    table = TableInfo(1, "accounts", NO_OBSERVERS)
    with pytest.raises(NotReady, match=r"tablet 2 of table 'accounts', from row 'm' on"):
        [cell async for cell in contents.cells(table, Space.SPACE_LOCK, b"", b"", 5.0)]
