"""Registering with a master, and asking it to describe the cluster.

A server that registers at an address where another kind of server is listed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    Overloaded,
    PercolatorError,
    SchemaError,
    WrongCluster,
)
from percolator.services.chassis.cluster_store import ClusterIdentity
from percolator.services.chassis.coordinator import LivedTime
from percolator.services.chassis.server import Health
from percolator.services.master import cluster_map
from percolator.services.master.handlers import ClusterHandler
from percolator.services.master.map_store import decoded
from percolator.services.master.master import Master
from percolator.services.master.registry import SERVICE_OF, KindCheck, Registry
from percolator.v1 import cluster_pb2 as pb
from percolator.v1 import master_pb2
from percolator.v1.cluster_pb2 import SERVICE_KIND_GATEWAY, Server, ServiceKind
from percolator.wire import methods
from percolator.world import Random, UnaryMethod, World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.master.cluster_world import ModelCluster, ModelNetwork, on_two_servers
from tests.unit.refusals import refused

HOUR = 3_600_000
CLUSTER = "c0ffee"


def server(
    kind: pb.ServiceKind = pb.SERVICE_KIND_ORACLE,
    address: str = "host:7101",
    server_id: str = "s1",
    version: str = "1.4.2",
    metrics_address: str = "",
) -> pb.Server:
    return pb.Server(
        kind=kind,
        address=address,
        server_id=server_id,
        version=version,
        metrics_address=metrics_address,
    )


def server_of_a_newer_release() -> pb.Server:
    """A server of a kind that does not exist yet."""
    return pb.Server.FromString(server().SerializeToString() + b"\x08\x63")  # kind, once more: 99


class Alone:
    """A master that leads, because there is no other."""

    def __init__(self, registry: Registry) -> None:
        self.masters: list[pb.Server] = []
        self.timestamp_lead_milliseconds: int | None = None
        self.registry = registry

    async def servers(self) -> list[pb.Server]:
        return self.registry.servers()

    async def registered(self, server: pb.Server, wall_milliseconds: int) -> None:
        self.registry.report(server, wall_milliseconds=wall_milliseconds)


@asynccontextmanager
async def master(servers_max: int = 100) -> AsyncIterator[ClusterHandler]:
    clock = VirtualClock(asyncio.get_running_loop())
    registry = Registry(
        clock, LivedTime(clock), silence_milliseconds=5_000, servers_max=servers_max
    )
    handler = ClusterHandler(
        clock,
        ClusterIdentity(CLUSTER, 1),
        server(pb.SERVICE_KIND_MASTER, "host:7100", "m1"),
        registry,
        cast("Any", Alone(registry)),
    )
    watching = asyncio.create_task(handler.watch_forever())
    try:
        yield handler
    finally:
        watching.cancel()


@pytest.fixture
def handler() -> AbstractAsyncContextManager[ClusterHandler]:
    """A master that accepts as many servers as any test has."""
    return master()


async def register(
    handler: ClusterHandler,
    announced: pb.Server,
    cluster_id: str = CLUSTER,
    wall_milliseconds: int = 0,
) -> pb.RegisterResponse:
    request = pb.RegisterRequest(
        cluster_id=cluster_id, server=announced, wall_milliseconds=wall_milliseconds
    )
    return await handler.register(request)


async def describe(handler: ClusterHandler) -> pb.DescribeResponse:
    return await handler.describe(pb.DescribeRequest())


async def listed(handler: ClusterHandler) -> list[str]:
    return [server.server_id for server in (await describe(handler)).servers]


async def test_a_master_describes_itself_and_all_registered_servers(
    handler: ClusterHandler,
) -> None:
    await asyncio.sleep(7)
    answer = await register(handler, server(metrics_address="host:8101"), cluster_id="")
    assert (answer.cluster_id, answer.format) == (CLUSTER, 1)
    assert answer.interval_milliseconds == 1_000
    await asyncio.sleep(2)
    described = await describe(handler)
    assert (described.cluster_id, described.version, described.format) == (CLUSTER, "1.4.2", 1)
    assert described.route == pb.ROUTE_DIRECT
    own, oracle = described.servers
    assert own.server_id == "m1"
    assert abs(own.uptime_milliseconds - 9_000) <= 10
    assert abs(oracle.silence_milliseconds - 2_000) <= 10
    oracle.silence_milliseconds = 0
    assert oracle == server(metrics_address="host:8101")


async def test_servers_are_ordered_by_kind_and_address(handler: ClusterHandler) -> None:
    for kind, address in (
        (pb.SERVICE_KIND_TABLET_SERVER, "b:1"),
        (pb.SERVICE_KIND_LOCK_SERVICE, "z:1"),
        (pb.SERVICE_KIND_TABLET_SERVER, "a:1"),
    ):
        await register(handler, server(kind, address, server_id=address))
    assert await listed(handler) == ["m1", "z:1", "a:1", "b:1"]


async def test_servers_that_fall_silent_are_forgotten_and_those_that_report_stay(
    handler: ClusterHandler,
) -> None:
    await register(handler, server(address="silent:1", server_id="silent"))
    for _ in range(10):
        await register(handler, server(address="well:1", server_id="well"))
        await asyncio.sleep(1)
    assert await listed(handler) == ["m1", "well"]


async def missed(handler: ClusterHandler) -> list[str]:
    return [one.server_id for one in (await describe(handler)).gone]


async def test_a_server_that_is_gone_is_missed_for_a_while_or_until_it_is_back(
    handler: ClusterHandler,
) -> None:
    await register(handler, server(address="one:1", server_id="one"))
    await register(handler, server(address="two:1", server_id="two"))
    assert await missed(handler) == []
    await asyncio.sleep(60)
    for _ in range(2):
        assert await missed(handler) == ["one", "two"]
    (_, gone) = (await describe(handler)).gone
    assert abs(gone.silence_milliseconds - 60_000) <= 1_000
    await register(handler, server(address="one:1", server_id="again"))
    assert await missed(handler) == ["two"]
    await asyncio.sleep(900)
    assert await missed(handler) == ["again"]


async def test_a_server_that_was_stopped_on_purpose_is_not_missed(handler: ClusterHandler) -> None:
    stopped = server(address="one:1")
    stopped.leaving = True
    await register(handler, stopped)
    await asyncio.sleep(60)
    assert (await listed(handler), await missed(handler)) == (["m1"], [])


async def test_at_most_a_hundred_servers_are_missed() -> None:
    async with master(servers_max=500) as handler:
        for number in range(300):
            await register(handler, server(address=f"host:{number + 1}"))
        await asyncio.sleep(60)
        assert len(await missed(handler)) == 100


async def test_a_restarted_server_replaces_its_former_entry(handler: ClusterHandler) -> None:
    await register(handler, server(server_id="before"))
    announced = server(server_id="after")
    await register(handler, announced)
    announced.server_id = "what the caller does with its message later"
    assert await listed(handler) == ["m1", "after"]


async def test_no_server_is_forgotten_because_the_master_was_paused() -> None:
    async with master() as handler:
        await register(handler, server())
    await asyncio.sleep(3_600)
    assert await listed(handler) == ["m1", "s1"]


async def test_more_servers_than_allowed_are_refused_until_one_is_forgotten() -> None:
    async with master(servers_max=2) as handler:
        await register(handler, server(address="a:1"))
        await register(handler, server(address="b:1"))
        with pytest.raises(Overloaded):
            await register(handler, server(address="c:1"))
        await register(handler, server(address="b:1"))
        await asyncio.sleep(5.1)
        await register(handler, server(address="c:1"))


@pytest.mark.parametrize(
    ("announced", "cluster_id", "named"),
    [
        (server(), "another", "another"),
        (server(version="1.6.0"), CLUSTER, r"1\.6\.0"),
        (server(version="2.4.2"), "", r"2\.4\.2"),
    ],
)
async def test_processes_of_other_clusters_and_releases_are_refused_by_name(
    handler: ClusterHandler, announced: pb.Server, cluster_id: str, named: str
) -> None:
    with pytest.raises(WrongCluster, match=named) as caught:
        await register(handler, announced, cluster_id)
    assert caught.value.expected in (CLUSTER, "1.4.2")
    assert await listed(handler) == ["m1"]


@pytest.mark.parametrize("version", ["1.3.0", "1.4.0", "1.5.9"])
async def test_a_minor_version_older_or_newer_works(handler: ClusterHandler, version: str) -> None:
    await register(handler, server(version=version))
    assert await listed(handler) == ["m1", "s1"]


@pytest.mark.parametrize(
    ("announced", "field"),
    [
        (server(kind=pb.SERVICE_KIND_UNSPECIFIED), "server.kind"),
        (server_of_a_newer_release(), "server.kind"),
        (server(server_id=""), "server.server_id"),
        (server(server_id="x" * 257), "server.server_id"),
        (server(server_id="schön"), "server.server_id"),
        (server(server_id="a b"), "server.server_id"),
        (server(server_id="a\n"), "server.server_id"),
        (server(address="[fe80::1%ö]:7100"), "server.address"),
        (server(address=""), "server.address"),
        (server(address="host"), "server.address"),
        (server(address="host:0"), "server.address"),
        (server(address="host:70000"), "server.address"),
        (server(metrics_address="host"), "server.metrics_address"),
        (server(metrics_address="x" * 257), "server.metrics_address"),
    ],
)
async def test_an_invalid_server_is_refused_by_the_name_of_the_field(
    handler: ClusterHandler, announced: pb.Server, field: str
) -> None:
    with refused(field):
        await register(handler, announced)
    assert await listed(handler) == ["m1"]


async def test_the_server_is_required(handler: ClusterHandler) -> None:
    with pytest.raises(InvalidArgument, match="server: is missing"):
        await handler.register(pb.RegisterRequest())


@pytest.mark.parametrize("field", ["server_id", "version", "address", "metrics_address"])
async def test_what_is_remembered_of_a_server_is_bounded(
    handler: ClusterHandler, field: str
) -> None:
    longest = {
        "server_id": "s" * 256,
        "version": "1.4.2".ljust(256, "0"),
        "address": "h." * 125 + "h" * 3 + ":65",
        "metrics_address": "h." * 125 + "h" * 3 + ":65",
    }[field]
    announced = server()
    if field != "version":  # a version this long cannot be compatible
        setattr(announced, field, longest)
        await register(handler, announced)
    setattr(announced, field, longest + "0")
    with refused(f"server.{field}"):
        await register(handler, announced)


async def test_the_clock_of_each_server_is_compared_with_the_masters(
    handler: ClusterHandler,
) -> None:
    now = (await describe(handler)).wall_milliseconds
    fast = server(address="fast:1", server_id="fast")
    silent = server(address="silent:1", server_id="silent")
    await register(handler, fast, wall_milliseconds=now + HOUR)
    await register(handler, silent)
    await asyncio.sleep(1)
    described = await describe(handler)
    assert described.wall_milliseconds == pytest.approx(now + 1000, abs=2)
    own, of_fast, of_silent = described.servers
    assert (own.server_id, own.clock_lead_milliseconds) == ("m1", 0)
    assert of_fast.clock_lead_milliseconds == pytest.approx(HOUR, abs=2)
    assert not of_silent.HasField("clock_lead_milliseconds")


async def test_a_clock_that_no_description_can_hold_is_refused(handler: ClusterHandler) -> None:
    """It was noted, and from then on every Describe failed, for every client of the cluster."""
    with refused("wall_milliseconds"):
        await register(handler, server(), wall_milliseconds=2**64 - 1)
    (own,) = (await describe(handler)).servers
    assert own.server_id == "m1"


def told_a_clock() -> tuple[VirtualClock, Registry]:
    """The clock of a registry, and the registry, to which a server has reported the same time."""
    clock = VirtualClock(asyncio.get_running_loop())
    registry = Registry(clock, LivedTime(clock), silence_milliseconds=5_000, servers_max=9)
    registry.report(server(), wall_milliseconds=clock.wall_milliseconds())
    return clock, registry


async def test_a_servers_clock_stays_what_it_was_while_the_masters_own_is_set() -> None:
    clock, registry = told_a_clock()
    clock.set_wall_back(2 * HOUR)
    [found] = registry.servers()
    assert found.clock_lead_milliseconds == 2 * HOUR


async def test_a_clock_is_unknown_once_its_server_has_not_reported_for_a_while() -> None:
    """It may have been set right since. Time in which the master was stopped counts, though it
    does not count as the server's silence."""
    _, registry = told_a_clock()
    await asyncio.sleep(2.9)
    [found] = registry.servers()
    assert found.HasField("clock_lead_milliseconds")
    await asyncio.sleep(60)
    [found] = registry.servers()
    assert not found.HasField("clock_lead_milliseconds")


async def test_what_a_server_says_of_its_own_clocks_lead_does_not_count(
    handler: ClusterHandler,
) -> None:
    boasting = server()
    boasting.clock_lead_milliseconds = 7
    await register(handler, boasting)
    _, found = (await describe(handler)).servers
    assert not found.HasField("clock_lead_milliseconds")


HERE = "a:1"
ORACLE, WORKER = pb.SERVICE_KIND_ORACLE, pb.SERVICE_KIND_WORKER
TABLET_SERVER, LOCKS = pb.SERVICE_KIND_TABLET_SERVER, pb.SERVICE_KIND_LOCK_SERVICE
MASTER = pb.SERVICE_KIND_MASTER


def server_of_address(kind: ServiceKind, address: str = HERE) -> Server:
    return Server(kind=kind, server_id=f"id-{kind}", address=address, version="0.1.0")


class Process:
    """A process at an address: its health service knows its services, as in a real one."""

    def __init__(self, kind: ServiceKind) -> None:
        self._health = Health()
        if kind in SERVICE_OF:
            self._health.add([SERVICE_OF[kind]])

    async def watch(self, request: HealthCheckRequest) -> AsyncIterator[HealthCheckResponse]:
        yield HealthCheckResponse(status=self._health._status(request.service))


def network(kind: ServiceKind | None) -> ModelNetwork:
    found = ModelNetwork()
    if kind is not None:
        found.handlers[HERE] = (Process(kind),)
    return found


@pytest.mark.parametrize(
    ("listed", "claimed"),
    [(TABLET_SERVER, WORKER), (TABLET_SERVER, ORACLE), (LOCKS, ORACLE), (WORKER, TABLET_SERVER)],
)
async def test_another_kind_is_refused_while_the_listed_server_is_there(
    listed: ServiceKind, claimed: ServiceKind
) -> None:
    kinds = KindCheck(network(listed))
    with refused("server.kind", match=f"{HERE} answers as a "):
        await kinds.require(server_of_address(claimed), [server_of_address(listed)])


@pytest.mark.parametrize(
    ("listed", "claimed"),
    [(TABLET_SERVER, WORKER), (TABLET_SERVER, ORACLE), (WORKER, TABLET_SERVER), (MASTER, LOCKS)],
)
async def test_another_kind_is_accepted_when_it_is_what_answers_there_now(
    listed: ServiceKind, claimed: ServiceKind
) -> None:
    """A process was started on the port of a stopped one of another kind, still listed."""
    kinds = KindCheck(network(claimed))
    await kinds.require(server_of_address(claimed), [server_of_address(listed)])
    assert kinds.questions == 1


@pytest.mark.parametrize("silent", [False, True])
async def test_while_the_address_does_not_answer_the_server_is_told_to_come_back(
    silent: bool,
) -> None:
    where = network(TABLET_SERVER if silent else None)
    where.silent.update([HERE] if silent else [])
    with pytest.raises(NotReady, match="does not say what it is"):
        await KindCheck(where).require(
            server_of_address(ORACLE), [server_of_address(TABLET_SERVER)]
        )


def listed_of_address(world: ModelCluster) -> set[tuple[int, str]]:
    return {(one.kind, one.address) for one in world.masters[0].master.registry.servers()}


@on_two_servers
async def test_a_server_that_has_another_kind_after_a_restart_replaces_its_former_entry(
    world: ModelCluster,
) -> None:
    await world.until(lambda: is_listed(world, TABLET_SERVER), 5)
    world.kill_server(HERE)
    world.network.handlers[HERE] = (Process(LOCKS),)
    await world.masters[0].master.registered(server_of_address(LOCKS), 0)
    assert (LOCKS, HERE) in listed_of_address(world)
    assert (TABLET_SERVER, HERE) not in listed_of_address(world)


@on_two_servers
async def test_the_address_of_the_master_itself_is_not_given_away(world: ModelCluster) -> None:
    address = world.masters[0].address
    world.network.handlers[address] += (Process(MASTER),)
    with pytest.raises(InvalidArgument, match="answers as a master"):
        await world.masters[0].master.registered(server_of_address(ORACLE, address), 0)


@on_two_servers
async def test_who_registers_as_before_is_asked_nothing(world: ModelCluster) -> None:
    await world.until(lambda: is_listed(world, TABLET_SERVER), 5)
    assert world.masters[0].master._kinds.questions == 0


@on_two_servers
async def test_a_master_does_not_register(world: ModelCluster) -> None:
    with refused("server.kind", match="masters do not register"):
        await world.masters[0].master.registered(server_of_address(MASTER, "c:1"), 0)
    assert (MASTER, "c:1") not in listed_of_address(world)


async def is_listed(world: ModelCluster, kind: ServiceKind) -> bool:
    return (kind, HERE) in listed_of_address(world)


# Invalid requests: each gets an error that names the field, and changes nothing.

Options = master_pb2.TableOptions
Observer = master_pb2.Observer
Create = master_pb2.CreateTableRequest
Change = master_pb2.ChangeObserversRequest


def state(world: ModelCluster) -> bytes:
    return cluster_map.encode(world.leader.store.current)


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        (methods.CREATE_TABLE, Create(), "name"),
        (methods.CREATE_TABLE, Create(name="x" * 256), "name"),
        (methods.CREATE_TABLE, Create(name="new\nline"), "name"),
        (methods.CREATE_TABLE, Create(name=" t"), "name"),
        (methods.CREATE_TABLE, Create(name="t"), "name"),
        (methods.CREATE_TABLE, Create(name="u", splits=[b""]), "splits[0]"),
        (methods.CREATE_TABLE, Create(name="u", splits=[b"a", b"a"]), "splits[1]"),
        (methods.CREATE_TABLE, Create(name="u", splits=[b"b", b"c", b"a"]), "splits[2]"),
        (methods.CREATE_TABLE, Create(name="u", splits=[b"x" * 4097]), "splits[0]"),
        (
            methods.CREATE_TABLE,
            Create(name="u", options=Options(split_bytes=1)),
            "options.split_bytes",
        ),
        (
            methods.CREATE_TABLE,
            Create(name="u", options=Options(retention_milliseconds=1 << 60)),
            "options.retention_milliseconds",
        ),
        (methods.SPLIT_TABLET, master_pb2.SplitTabletRequest(tablet_id=99), "tablet_id"),
        (methods.SPLIT_TABLET, master_pb2.SplitTabletRequest(tablet_id=2, row=b""), "row"),
        (methods.SPLIT_TABLET, master_pb2.SplitTabletRequest(tablet_id=2, row=b"m"), "row"),
        (methods.SPLIT_TABLET, master_pb2.SplitTabletRequest(tablet_id=3, row=b"m"), "row"),
        (methods.SPLIT_TABLET, master_pb2.SplitTabletRequest(tablet_id=2), "row"),
        (methods.MOVE_TABLET, master_pb2.MoveTabletRequest(tablet_id=99), "tablet_id"),
        (methods.MOVE_TABLET, master_pb2.MoveTabletRequest(tablet_id=2, server="z:1"), "server"),
        (methods.DRAIN_SERVER, master_pb2.DrainServerRequest(), "server"),
        (methods.DRAIN_SERVER, master_pb2.DrainServerRequest(server="z:1"), "server"),
        (methods.DRAIN_SERVER, master_pb2.DrainServerRequest(server="a:1"), "server"),
        (methods.CHANGE_OBSERVERS, Change(table="t", add=[Observer()]), "add[0].name"),
        (methods.CHANGE_OBSERVERS, Change(table="t", add=[Observer(name="o")]), "add[0].columns"),
        (
            methods.CHANGE_OBSERVERS,
            Change(table="t", add=[Observer(name="o", columns=[b"x" * 256])]),
            "add[0].columns",
        ),
        (
            methods.CHANGE_OBSERVERS,
            Change(table="t", add=[Observer(name="o", columns=[b"c"])] * 2),
            "add[1].name",
        ),
        (methods.CHANGE_OBSERVERS, Change(table="t", remove=["o"]), "remove"),
        (methods.CHANGE_OBSERVERS, Change(table="t", pause=["o"]), "pause"),
        (
            methods.CHANGE_OBSERVERS,
            Change(table="t", add=[Observer(name="o", columns=[b"c"], weak=True, backfill=True)]),
            "add[0].backfill",
        ),
        (
            methods.CHANGE_OBSERVERS,
            Change(table="", add=[Observer(name="o", columns=[b"c"])], awaited=True),
            "table",
        ),
        (methods.CHANGE_OBSERVERS, Change(table="u", remove=["o"], awaited=True), "remove"),
        (methods.CHANGE_OBSERVERS, Change(table="u", pause=["o"], awaited=True), "pause"),
    ],
)
async def test_a_bad_request_names_the_field_and_changes_nothing(
    world: ModelCluster,
    method: UnaryMethod[master_pb2.CreateTableRequest, master_pb2.CreateTableResponse],
    request_: master_pb2.CreateTableRequest,
    field: str,
) -> None:
    await world.call(methods.CREATE_TABLE, name="t", splits=[b"m"])
    before = state(world)
    with refused(field):
        await world.ask(method, request_)
    assert state(world) == before


async def test_a_missing_table_is_a_schema_error(world: ModelCluster) -> None:
    with pytest.raises(SchemaError):
        await world.call(methods.LIST_TABLETS, table="u")
    with pytest.raises(SchemaError):
        await world.call(methods.CHANGE_OBSERVERS, table="u")
    with pytest.raises(SchemaError):
        await world.call(methods.REPORT_BACKFILL, table_id=99)


async def test_an_existing_table_is_left_as_it_is_with_exist_ok(world: ModelCluster) -> None:
    first = await world.call(methods.CREATE_TABLE, name="t", splits=[b"m"])
    second = await world.call(methods.CREATE_TABLE, name="t", splits=[b"x", b"y"], exist_ok=True)
    assert (first.created, second.created) == (True, False)
    assert second.table == first.table


@pytest.mark.parametrize(
    ("options", "others", "field"),
    [
        (
            master_pb2.TableOptions(retention_milliseconds=600_000),
            master_pb2.TableOptions(retention_milliseconds=700_000),
            "options.retention_milliseconds",
        ),
        (
            master_pb2.TableOptions(split_bytes=600_000),
            master_pb2.TableOptions(split_bytes=700_000),
            "options.split_bytes",
        ),
    ],
    ids=["retention", "split_bytes"],
)
async def test_an_existing_table_with_other_options_is_not_what_was_asked_for(
    world: ModelCluster,
    options: master_pb2.TableOptions,
    others: master_pb2.TableOptions,
    field: str,
) -> None:
    first = await world.call(methods.CREATE_TABLE, name="t", options=options)
    await world.call(methods.CREATE_TABLE, name="u")
    for same in (options, master_pb2.TableOptions()):
        assert (
            await world.call(methods.CREATE_TABLE, name="t", exist_ok=True, options=same)
        ).table == first.table
    for name, found in (("t", "600000"), ("u", "the cluster's default")):
        wanted = Create(name=name, exist_ok=True, options=others)
        why = f"table '{name}' exists with {found}.*, not 700000 "
        with refused(field, match=why):
            await world.ask(methods.CREATE_TABLE, wanted)


async def test_an_existing_table_without_a_feed_is_no_table_with_one(world: ModelCluster) -> None:
    await world.call(methods.CREATE_TABLE, name="t")
    wanted = Create(name="t", exist_ok=True, options=master_pb2.TableOptions(change_feed=True))
    with refused("options.change_feed", match="exists without a change feed"):
        await world.ask(methods.CREATE_TABLE, wanted)
    await world.call(methods.SET_CHANGE_FEED, table="t", change_feed=True)
    assert not (await world.ask(methods.CREATE_TABLE, wanted)).created


# A master that no longer leads refuses nothing for good: the caller would ask nobody else.


class _Leadership:
    """One that another master takes over while a call is in progress."""

    def __init__(self) -> None:
        self.is_lost = False

    async def check(self) -> None:
        if self.is_lost:
            raise NotReady("another master leads")


class _Term:
    def __init__(self) -> None:
        self.leadership = _Leadership()
        self.is_over = False


async def _called(problem: PercolatorError, *, is_lost: bool, is_over: bool = False) -> None:
    """A call that fails, at a master that is replaced in the middle of it, or is not."""
    anything = cast("Any", None)
    world = World(VirtualClock(asyncio.get_running_loop()), anything, Random(1))
    registry = Registry(
        world.clock, LivedTime(world.clock), silence_milliseconds=5_000, servers_max=100
    )
    master: Master[Any, Any] = Master(
        world, Server(address="a:1"), anything, registry, anything, anything
    )
    term = master.candidacy.term = _Term()
    async with master.leading():
        term.leadership.is_lost = is_lost
        term.is_over = is_over
        raise problem


@pytest.mark.parametrize(
    "problem", [SchemaError("there is no table 'new'"), PercolatorError("is closed")]
)
async def test_what_only_a_former_leader_refuses_is_asked_of_the_next_one(
    problem: PercolatorError,
) -> None:
    with pytest.raises(NotReady, match="another master leads"):
        await _called(problem, is_lost=True)


async def test_a_term_that_has_ended_refuses_nothing_for_good_either() -> None:
    """It closes what its calls in progress use, before it has given the leadership up."""
    with pytest.raises(NotReady):
        await _called(PercolatorError("is closed"), is_lost=False, is_over=True)


async def test_a_leader_refuses_as_it_is() -> None:
    with pytest.raises(SchemaError, match="no table"):
        await _called(SchemaError("there is no table 'new'"), is_lost=False)


async def test_what_may_have_been_executed_stays_unknown() -> None:
    """`NotReady` would say that it was not."""
    with pytest.raises(DeadlineExceeded):
        await _called(DeadlineExceeded("the oracle was late"), is_lost=True)


class _EndedTerm:
    """A term in which one server reports, until another master leads."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def begin(self) -> None:
        self._registry.report(
            Server(kind=SERVICE_KIND_GATEWAY, server_id="g", address="g:1", version="1")
        )

    async def until_over(self) -> None:
        raise NotReady("another master leads")


async def test_a_master_that_no_longer_leads_misses_nobody() -> None:
    """All servers report to its successor. `percolator status` called every one of them gone while
    no master could lead, as on a full disk."""
    world = World(VirtualClock(asyncio.get_running_loop()), cast("Any", None), Random(1))
    registry = Registry(
        world.clock, LivedTime(world.clock), silence_milliseconds=1_000, servers_max=100
    )
    coordinator, begin = AsyncMock(), AsyncMock(return_value=_EndedTerm(registry))
    master: Master[Any, Any] = Master(
        world, Server(address="a:1"), coordinator, registry, begin, decoded
    )
    with pytest.raises(NotReady):
        await master._serve_a_term()
    for _ in range(10):
        await asyncio.sleep(0.25)
        registry.forget_silent()
    assert registry.missed() == []
