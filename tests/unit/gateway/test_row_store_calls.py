"""Calls to the row store through a gateway: those of the driver, to the cluster's own tables."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from percolator.bigtable.admin import require_table
from percolator.bigtable.connection import RELAYED, RelayedNetwork
from percolator.bigtable.messages import CREATE_TABLE
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.errors import (
    InvalidArgument,
    InvariantViolation,
    NotReady,
    Overloaded,
    PercolatorError,
    PermissionDenied,
    Unauthenticated,
    UnknownServer,
    UsageError,
)
from percolator.rowstore.conformance import Conformance
from percolator.rowstore.identity import CLUSTER, IDENTITY, TABLE_ID, require_cluster
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.rowstore.layout import COLLECTED, DATA, LOCKS, WRITES
from percolator.rowstore.port import Change, Check, RowChange, Selection, SetCell
from percolator.services.chassis import rpc
from percolator.services.chassis.access import CallerIdentity
from percolator.services.gateway.row_store_handler import RowStoreHandler
from percolator.services.gateway.servers import ClusterHandler, Servers
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import bigtable_pb2 as pb
from percolator.v1 import cluster_pb2
from percolator.v1.cluster_pb2 import DescribeRequest, DescribeResponse, RowStorePlace, Server
from percolator.wire import methods
from percolator.wire.roles import REQUIRED, Role
from percolator.world import Network, StreamMethod, UnaryMethod, World
from tests.simulation.virtual_time import VirtualClock

SECONDS = 5.0
GATEWAY = "gateway:1"
PLACE = Place("bigtable:443", "gateways", "behind", app_profile="single")
"""As the gateway knows it."""
SEEN_FROM_OUTSIDE = Place("bigtable:443", "gateways", "behind")
TIME = 1_000_000
LATEST = (1 << 53) * 1_000 - 1_000


class Described:
    """The cluster, as the gateway's masters describe it."""

    def __init__(self, *, on_rows: bool = True) -> None:
        self.described: DescribeResponse | None = DescribeResponse(cluster_id="c")
        if on_rows:
            self.described.row_store.CopyFrom(RowStorePlace(address=str(PLACE)))


class Connection:
    """The gateway's own connection, to the model."""

    def __init__(self, model: object) -> None:
        self.network: Network = InProcessNetwork({PLACE.address: model})
        self.place = PLACE

    async def close(self) -> None:
        """Nothing is open."""


class Behind:
    """A `ThroughNetwork` to one gateway, without sockets."""

    def __init__(self, handler: RowStoreHandler) -> None:
        self._network = InProcessNetwork({GATEWAY: handler})

    def unary_of_any(self, method: UnaryMethod[Any, Any]) -> Any:
        return self._network.unary(GATEWAY, method)

    def stream_of_any(self, method: StreamMethod[Any, Any]) -> Any:
        return self._network.stream(GATEWAY, method)


class Watched(BigtableInMemory):
    """Remembers the profile of each call, and refuses what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.profiles: set[str] = set()
        self.refusal: PercolatorError | None = None

    async def check_and_mutate_row(
        self, request: pb.BigtableCheckAndMutateRowRequest
    ) -> pb.BigtableCheckAndMutateRowResponse:
        self.profiles.add(request.app_profile_id)
        if self.refusal is not None:
            raise self.refusal
        return await super().check_and_mutate_row(request)

    async def read_rows(
        self, request: pb.BigtableReadRowsRequest
    ) -> AsyncIterator[pb.BigtableReadRowsResponse]:
        self.profiles.add(request.app_profile_id)
        if self.refusal is not None:
            raise self.refusal
        async for answer in super().read_rows(request):
            yield answer


async def through(model: BigtableInMemory, *, place: Place = SEEN_FROM_OUTSIDE) -> BigtableStore:
    """The store as a client without an account reaches it, with a table of each kind."""
    direct = InProcessNetwork({PLACE.address: model})
    for table_id in (TABLE_ID, 1, INTENTS_TABLE):
        await require_table(direct, PLACE, table_id, SECONDS)
    handler = RowStoreHandler(cast("Any", Described()), lambda _: cast("Any", Connection(model)))
    return BigtableStore(RelayedNetwork(cast("Any", Behind(handler))), place)


@pytest.fixture
@asynccontextmanager
async def model() -> AsyncIterator[Watched]:
    """A model of Bigtable with a table of each kind."""
    model = Watched()
    await through(model)
    yield model


@pytest.fixture
@asynccontextmanager
async def store(model: Watched) -> AsyncIterator[BigtableStore]:
    yield await through(model)


_NOTHING = Check((Selection(DATA),), found=False)


def _put(value: bytes) -> list[Change]:
    return [SetCell(DATA, b"c", TIME, value)]


async def test_a_store_behind_a_gateway_keeps_all_promises(
    model: Watched, store: BigtableStore
) -> None:
    promises = Conformance(store, 1, b"run", LATEST, SECONDS)
    found = [verdict async for verdict in promises.verdicts()]
    assert [one for one in found if one.broken] == []
    assert len(found) > 5
    assert model.profiles == {"single"}, "the profile is the gateway's, not the caller's"


async def test_intents_are_written_and_tables_sampled_there_too() -> None:
    store = await through(BigtableInMemory())
    assert await store.check_and_mutate(INTENTS_TABLE, b"key", _NOTHING, _put(b"v"), SECONDS)
    (row,) = await store.read(INTENTS_TABLE, [b"key"], [Selection(DATA)], SECONDS)
    assert row.cells[0].value == b"v"
    assert (await store.sample(1, SECONDS))[-1].key == b""


async def test_what_a_cluster_knows_of_itself_is_out_of_reach_but_for_its_identity(
    model: Watched, store: BigtableStore
) -> None:
    """Whoever could write the oracle's mark could have timestamps handed out twice."""
    own = BigtableStore(InProcessNetwork({PLACE.address: model}), PLACE)
    change = [SetCell(DATA, IDENTITY, TIME, b'{"cluster_id": "c"}')]
    await own.check_and_mutate(TABLE_ID, CLUSTER, _NOTHING, change, SECONDS)
    await require_cluster(store, "c", SECONDS)
    only = "of percolator-0, only the row 'cluster' can be read"
    with pytest.raises(InvalidArgument, match=only):
        await store.check_and_mutate(TABLE_ID, CLUSTER, _NOTHING, _put(b""), SECONDS)
    with pytest.raises(InvalidArgument, match=only):
        await store.read(TABLE_ID, [b"role/oracle"], [Selection(DATA)], SECONDS)
    with pytest.raises(InvalidArgument, match=only):
        await store.read(TABLE_ID, [CLUSTER, b"role/oracle"], [Selection(DATA)], SECONDS)
    scan = store.scan(
        TABLE_ID, b"", b"", [Selection(DATA)], rows_max=0, reverse=False, timeout_seconds=SECONDS
    )
    with pytest.raises(InvalidArgument, match=only):
        assert [row async for row in scan] == []


@pytest.mark.parametrize(
    "place",
    [
        Place("bigtable:443", "another", "behind"),
        Place("bigtable:443", "gateways", "another"),
    ],
)
async def test_tables_of_another_instance_are_out_of_reach(place: Place) -> None:
    store = await through(BigtableInMemory(), place=place)
    with pytest.raises(InvalidArgument, match="table_name: expected a table of this cluster"):
        await store.read(1, [b"key"], [Selection(DATA)], SECONDS)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "customers",
        "percolator-",
        "percolator-01",
        "percolator-1/../0",
        "percolator-1 ",
        "x" * 9,
    ],
)
async def test_tables_that_are_not_the_clusters_are_out_of_reach(name: str, model: Watched) -> None:
    handler = RowStoreHandler(cast("Any", Described()), lambda _: cast("Any", Connection(model)))
    request = pb.BigtableMutateRowsRequest(table_name=f"{PLACE.parent}/tables/{name}")
    with pytest.raises(InvalidArgument, match="table_name"):
        assert [one async for one in handler.mutate_rows(request)] == []


def _served(model: BigtableInMemory) -> RowStoreHandler:
    return RowStoreHandler(cast("Any", Described()), lambda _: cast("Any", Connection(model)))


async def _write(handler: RowStoreHandler, table_id: int, change: pb.BigtableMutation) -> None:
    request = pb.BigtableMutateRowsRequest(table_name=PLACE.table(table_id))
    request.entries.add(row_key=b"key", mutations=[change])
    async for _ in handler.mutate_rows(request):
        pass


def _set(family: str) -> pb.BigtableMutation:
    cell = pb.BigtableMutation.SetCell(
        family_name=family, column_qualifier=b"c", timestamp_micros=TIME, value=b"v"
    )
    return pb.BigtableMutation(set_cell=cell)


def _deleted(family: str, start: int, end: int) -> pb.BigtableMutation:
    times = pb.BigtableTimestampRange(start_timestamp_micros=start, end_timestamp_micros=end)
    deleted = pb.BigtableMutation.DeleteFromColumn(
        family_name=family, column_qualifier=b"c", time_range=times
    )
    return pb.BigtableMutation(delete_from_column=deleted)


async def test_only_who_may_load_writes_without_conditions_outside_of_intents(
    model: Watched,
) -> None:
    """On tablets, LOAD needs that role, too: what is written so replaces what others rely on."""
    handler = _served(model)
    client = rpc._caller.set(CallerIdentity(Role.CLIENT))
    try:
        with pytest.raises(PermissionDenied, match="has the role CLIENT, but it needs ADMIN"):
            await _write(handler, 1, _set(WRITES))
        await _write(handler, INTENTS_TABLE, _set(WRITES))
    finally:
        rpc._caller.reset(client)
    await _write(handler, 1, _set(WRITES))


@pytest.mark.parametrize(
    "change",
    [
        _set(LOCKS),
        _set("x"),
        _deleted(WRITES, TIME, TIME + 2_000),
        _deleted(WRITES, TIME, 0),
        _deleted(LOCKS, TIME, TIME + 1_000),
        pb.BigtableMutation(),
    ],
)
async def test_of_intents_single_versions_are_set_and_deleted(
    change: pb.BigtableMutation, model: Watched
) -> None:
    with pytest.raises(InvalidArgument, match=r"entries\[0\].mutations\[0\]: expected one version"):
        await _write(_served(model), INTENTS_TABLE, change)
    await _write(_served(model), INTENTS_TABLE, _deleted(WRITES, TIME, TIME + 1_000))


@pytest.mark.parametrize(
    "change",
    [_set(COLLECTED), _deleted(COLLECTED, TIME, TIME + 1_000), _deleted(WRITES, 0, 0)],
)
async def test_no_caller_makes_what_no_step_consists_of(
    change: pb.BigtableMutation, model: Watched
) -> None:
    """A note of collection would make the row unreadable for every older snapshot."""
    for field in ("true_mutations", "false_mutations"):
        request = pb.BigtableCheckAndMutateRowRequest(table_name=PLACE.table(1), row_key=b"key")
        getattr(request, field).extend([_set(LOCKS), change])
        with pytest.raises(InvalidArgument, match=rf"{field}\[1\]: expected one version"):
            await _served(model).check_and_mutate_row(request)


def _of_no_table() -> pb.BigtableRowFilter:
    unknown = pb.BigtableRowFilter()
    unknown.column_range_filter.family_name = "x"
    either = pb.BigtableRowFilter()
    either.interleave.filters.extend([pb.BigtableRowFilter(), unknown])
    found = pb.BigtableRowFilter()
    found.chain.filters.append(either)
    return found


async def test_a_family_that_no_table_has_is_the_callers_mistake(model: Watched) -> None:
    """Otherwise the error would say that somebody has removed it in the store."""
    handler, table = _served(model), PLACE.table(1)
    reading = pb.BigtableReadRowsRequest(table_name=table, filter=_of_no_table())
    with pytest.raises(InvalidArgument, match="filter: names the family 'x'"):
        [one async for one in handler.read_rows(reading)]
    checking = pb.BigtableCheckAndMutateRowRequest(
        table_name=table, row_key=b"r", predicate_filter=_of_no_table()
    )
    with pytest.raises(InvalidArgument, match="predicate_filter: names the family 'x'"):
        await handler.check_and_mutate_row(checking)
    with pytest.raises(InvalidArgument, match=r"entries\[0\].mutations: names the family 'x'"):
        await _write(handler, 1, _set("x"))


async def test_what_the_gateway_does_not_know_is_not_passed_on(model: Watched) -> None:
    """Bigtable knows more than our messages say: to delete a whole row, or to call a view of
    another table by its name."""
    view_of_another_table, delete_from_row = b"\x4a\x04view", b"\x22\x00"
    known = pb.BigtableCheckAndMutateRowRequest(table_name=PLACE.table(1), row_key=b"key")
    named = known.SerializeToString() + view_of_another_table
    deleting = b"\x0a" + bytes([len(PLACE.table(1))]) + PLACE.table(1).encode()
    deleting += b"\x12\x07\x0a\x01k" + b"\x12" + bytes([len(delete_from_row)]) + delete_from_row
    for call in (
        _served(model).check_and_mutate_row(pb.BigtableCheckAndMutateRowRequest.FromString(named)),
        anext(_served(model).mutate_rows(pb.BigtableMutateRowsRequest.FromString(deleting))),
    ):
        with pytest.raises(InvalidArgument, match="no client of this cluster sends"):
            await call
    assert not model.profiles


@pytest.mark.parametrize(
    "refusal", [Unauthenticated("no such token"), PermissionDenied("grant the account a role")]
)
async def test_what_the_store_refuses_to_the_gateway_is_not_the_callers_fault(
    refusal: PercolatorError, model: Watched, store: BigtableStore
) -> None:
    """A client would replace its own token, which is right."""
    model.refusal = refusal
    expected = f"the account of this gateway cannot use the store: {refusal.message}"
    with pytest.raises(NotReady, match=expected):
        await store.check_and_mutate(1, b"key", _NOTHING, _put(b""), SECONDS)
    with pytest.raises(NotReady, match=expected):
        await store.read(1, [b"key"], [Selection(DATA)], SECONDS)


async def test_an_overloaded_store_slows_the_client_down(
    model: Watched, store: BigtableStore
) -> None:
    before = store._admission.bound
    model.refusal = Overloaded("a quota is used up", retry_after_seconds=0.0)
    with pytest.raises(Overloaded):
        await store.read(1, [b"key"], [Selection(DATA)], SECONDS)
    assert store._admission.bound == before // 2


async def test_a_cluster_of_tablet_servers_says_that_it_is_one() -> None:
    handler = RowStoreHandler(
        cast("Any", Described(on_rows=False)), lambda _: cast("Any", Connection(BigtableInMemory()))
    )
    with pytest.raises(InvalidArgument, match="are in tablet servers"):
        await handler.check_and_mutate_row(pb.BigtableCheckAndMutateRowRequest())


def test_no_gateway_creates_or_deletes_tables() -> None:
    with pytest.raises(UsageError, match="no gateway makes the call"):
        RelayedNetwork(cast("Any", None)).unary("", CREATE_TABLE)


def test_what_is_passed_on_needs_the_role_of_a_client() -> None:
    assert {REQUIRED[path] for path in RELAYED.values()} == {Role.CLIENT}
    assert REQUIRED[methods.CREATE_TABLE.path] is Role.ADMIN


async def test_the_gateway_asks_which_family_a_table_lacks_since_its_callers_cannot(
    model: Watched, store: BigtableStore
) -> None:
    model.tables[PLACE.table(1)].families.remove(DATA)
    says = "the table percolator-1 lacks the family d: somebody has removed it in the store"
    with pytest.raises(InvariantViolation, match=says):
        await store.check_and_mutate(1, b"k", _NOTHING, _put(b"v"), SECONDS)
    with pytest.raises(InvariantViolation, match=says):
        await store.read(1, [b"k"], [Selection(DATA)], SECONDS)


class AnswersByRow(BigtableInMemory):
    """Says for each row that a family is missing, as the service does."""

    async def mutate_rows(
        self, request: pb.BigtableMutateRowsRequest
    ) -> AsyncIterator[pb.BigtableMutateRowsResponse]:
        answer = pb.BigtableMutateRowsResponse()
        for index in range(len(request.entries)):
            status = answer.entries.add(index=index).status
            status.code, status.message = 5, "Requested column family not found."
        yield answer


async def test_the_gateway_names_the_family_that_only_rows_say_is_missing() -> None:
    model = AnswersByRow()
    store = await through(model)
    model.tables[PLACE.table(INTENTS_TABLE)].families.remove(WRITES)
    change = RowChange(b"k", (SetCell(WRITES, b"c", TIME, b"v"),))
    says = "the table percolator-intents lacks the family w: somebody has removed it in the store"
    with pytest.raises(InvariantViolation, match=says):
        await store.write(INTENTS_TABLE, [change], SECONDS)


# The servers that a gateway forwards calls to: as masters list them, and a little longer.

MASTER = "master:7100"
TABLET_SERVER = Server(
    kind=cluster_pb2.SERVICE_KIND_TABLET_SERVER, server_id="t1", address="tablets:7103"
)


class Master:
    """Describes the cluster that a test has set up."""

    def __init__(self) -> None:
        self.cluster_id = "c"
        self.servers = [TABLET_SERVER]
        self.asked = 0

    async def describe(self, request: DescribeRequest) -> DescribeResponse:
        self.asked += 1
        await asyncio.sleep(0.01)
        return DescribeResponse(cluster_id=self.cluster_id, servers=self.servers, version="1.0.0")


def site() -> tuple[Master, InProcessNetwork, Servers]:
    clock, master = VirtualClock(asyncio.get_running_loop()), Master()
    network = InProcessNetwork({MASTER: master})
    return master, network, Servers(World(clock, network, random.Random(1)), [MASTER], "c")


async def test_a_server_is_known_by_its_id_and_by_its_address() -> None:
    _, _, servers = site()
    assert servers.known("t1") is None
    assert await servers.find("t1") == await servers.find("tablets:7103") == TABLET_SERVER
    with pytest.raises(UnknownServer, match="'t2' is in this cluster") as caught:
        await servers.find("t2")
    assert caught.value.server == "t2"


async def test_a_master_that_has_just_started_and_lists_no_servers_does_no_harm() -> None:
    master, _, servers = site()
    following = asyncio.ensure_future(servers.follow())
    await servers.refresh()
    master.servers = []
    await asyncio.sleep(20.0)
    assert await servers.find("t1") == TABLET_SERVER
    await asyncio.sleep(20.0)
    with pytest.raises(UnknownServer):
        await servers.find("t1")
    following.cancel()


async def test_known_servers_stay_known_while_no_master_answers() -> None:
    _, network, servers = site()
    following = asyncio.ensure_future(servers.follow())
    await servers.refresh()
    network.handlers.clear()
    await asyncio.sleep(3_600.0)
    assert await servers.find("t1") == TABLET_SERVER
    following.cancel()


async def test_a_server_that_is_unknown_because_no_master_answers_is_not_denied() -> None:
    _, network, servers = site()
    await servers.refresh()
    network.handlers.clear()
    await asyncio.sleep(1.0)
    for _ in range(2):  # the second time, no master is asked
        with pytest.raises(UnknownServer, match=r"'t2' is unknown here.*listening") as caught:
            await servers.find("t2")
        assert caught.value.server == "t2"


async def test_a_description_of_another_cluster_is_ignored() -> None:
    master, _, servers = site()
    await servers.refresh()
    master.cluster_id, master.servers = "other", [Server(server_id="x", address="x:1")]
    await servers.refresh()
    assert servers.known("x") is None
    assert servers.known("t1") == TABLET_SERVER


async def test_many_calls_for_unknown_servers_are_one_request_to_the_master() -> None:
    master, _, servers = site()
    asked = [servers.find(f"stranger-{number}") for number in range(100)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(answer) for answer in answers} == {UnknownServer}
    assert master.asked == 1


async def test_a_gateway_describes_the_cluster_with_another_route_and_registers_no_server() -> None:
    master, _, servers = site()
    handler = ClusterHandler(servers, "1.1.0")
    told = await handler.describe(DescribeRequest())
    assert (told.route, told.version) == (cluster_pb2.ROUTE_THROUGH, "1.1.0")
    assert list(told.servers) == master.servers
    with pytest.raises(Exception, match="a gateway does not register servers"):
        await handler.register(cluster_pb2.RegisterRequest())
    _, silent, without_masters = site()
    silent.handlers.clear()
    with pytest.raises(NotReady, match="no master"):
        await ClusterHandler(without_masters, "1.1.0").describe(DescribeRequest())
