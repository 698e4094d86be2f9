"""`percolator status`: roles, problems, and what could not be fetched."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
from rich.console import Console
from typer import Exit
from typer.testing import Result

from percolator import codecs
from percolator.bigtable.admin import require_table
from percolator.bigtable.place import Place, parse_place
from percolator.bigtable.store import BigtableStore
from percolator.cli import sessions as sessions_command
from percolator.cli import store as store_command
from percolator.cli import top
from percolator.cli.app import app
from percolator.cli.connection import Connection, answer_of_leader, confirm
from percolator.cli.pins import released
from percolator.cli.sessions import list_sessions
from percolator.cli.status import Overview, ServerRole, _as_data, _as_text, look
from percolator.cli.tablets import remarks
from percolator.cli.top import Activities, LostCell, Sample, cell_data, cell_text
from percolator.cli.values import UNKNOWN, Forms, NamedTable
from percolator.cli.worker import connected
from percolator.codecs.names import CodecNames
from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    PermissionDenied,
    SchemaError,
    Unavailable,
)
from percolator.formats.records import (
    LockRecord,
    RecordKind,
    acknowledgement_column,
    read_lock_column,
)
from percolator.rowstore.conformance import Conformance
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.timestamps import Timestamp
from percolator.v1 import cluster_pb2, lockservice_pb2, master_pb2, oracle_pb2
from percolator.v1 import master_pb2 as pb
from percolator.v1.bigtable_pb2 import BigtableAppProfile
from percolator.v1.cells_pb2 import Cell, Space
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.v1.lockservice_pb2 import Activity, ContendedCell, ObserverActivity, Session
from percolator.v1.master_pb2 import ListTablesResponse, TabletServerInfo
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.lock_service import LockServiceCalls
from percolator.wire.sessions import SessionSettings
from tests.command_line import CliRunner
from tests.patching import in_place_of
from tests.simulation.virtual_time import VirtualClock
from tests.unit.unary_network import UnaryTimeouts
from tests.unit.wire.lock_services import A, B, LockServices, client, lock_services

MASTER = Server(server_id="m", kind=ServiceKind.SERVICE_KIND_MASTER, address="master:1")
ORACLE = Server(server_id="o", kind=ServiceKind.SERVICE_KIND_ORACLE, address="oracle:1")
STANDBY = Server(server_id="s", kind=ServiceKind.SERVICE_KIND_ORACLE, address="oracle:2")
LOCKS = Server(server_id="l", kind=ServiceKind.SERVICE_KIND_LOCK_SERVICE, address="locks:1")


class _Master:
    async def describe(self, _: object) -> DescribeResponse:
        return DescribeResponse(servers=[MASTER, ORACLE, STANDBY, LOCKS])

    async def list_servers(self, _: object) -> master_pb2.ListServersResponse:
        return master_pb2.ListServersResponse()

    async def describe_collection(self, _: object) -> master_pb2.DescribeCollectionResponse:
        return master_pb2.DescribeCollectionResponse()

    async def list_tables(self, _: object) -> master_pb2.ListTablesResponse:
        return master_pb2.ListTablesResponse()

    async def list_tablets(self, _: object) -> master_pb2.ListTabletsResponse:
        return master_pb2.ListTabletsResponse()


class _Oracle:
    def __init__(self, *, leads: bool) -> None:
        self._leads = leads

    async def get_timestamps(self, _: object) -> oracle_pb2.GetTimestampsResponse:
        if not self._leads:
            raise NotReady("another oracle leads")
        return oracle_pb2.GetTimestampsResponse(first=1, count=1)


class _LockService:
    async def list_sessions(self, _: object) -> lockservice_pb2.ListSessionsResponse:
        return lockservice_pb2.ListSessionsResponse()


class _Reached(Connection):
    """Reaches the cluster by an address that knows of these servers only."""

    servers: tuple[Server, ...] = (MASTER, LOCKS)

    async def reach(self, network: Any) -> Any:
        return DescribeResponse(servers=self.servers), network


class _Earlier(_Reached):
    """Has not heard of the second oracle yet."""

    servers = (MASTER, ORACLE, LOCKS)


async def test_a_server_that_has_registered_meanwhile_is_asked_what_it_is() -> None:
    handlers = {
        MASTER.address: _Master(),
        ORACLE.address: _Oracle(leads=True),
        STANDBY.address: _Oracle(leads=False),
        LOCKS.address: _LockService(),
    }
    network = cast("Any", InProcessNetwork(handlers))
    found = await look(_Earlier([MASTER.address], 1.0, as_json=True), network)
    assert found.unknown == []
    assert found.roles == {
        "m": ServerRole.LEADS,
        "o": ServerRole.LEADS,
        "s": ServerRole.STANDBY,
    }


OF_TABLETS = (
    "tablets",
    "tablets_served",
    "bytes",
    "locks",
    "notifications",
    "mutations_per_second",
    "reads_per_second",
)


async def _refuse(_: object) -> None:
    raise PermissionDenied("it needs ADMIN")


class _RefusingMaster(_Master):
    """Answers a client without the role `admin`."""

    list_servers = list_tablets = staticmethod(_refuse)  # type: ignore[assignment]

    async def describe(self, _: object) -> DescribeResponse:
        return DescribeResponse(servers=[MASTER, LOCKS])

    async def list_tables(self, _: object) -> master_pb2.ListTablesResponse:
        return master_pb2.ListTablesResponse(tables=[master_pb2.Table(name="people")])


class _RefusingLockService:
    list_sessions = staticmethod(_refuse)


async def test_what_a_client_may_not_see_is_unknown_and_not_zero() -> None:
    handlers = {
        MASTER.address: _RefusingMaster(),
        LOCKS.address: _RefusingLockService(),
    }
    network = cast("Any", InProcessNetwork(handlers))
    found = await look(_Reached([MASTER.address], 1.0, as_json=True), network)
    data = _as_data(found)
    not_told = (*OF_TABLETS, "sessions", "dead_letters")
    assert {name: data[name] for name in not_told} == dict.fromkeys(not_told)
    assert data["tables"] == 1
    console = Console(file=io.StringIO(), width=200)
    console.print(_as_text(found))
    shown = cast("io.StringIO", console.file).getvalue()
    assert "1 table, tablets: ?, sessions: ?" in shown


HOUR = 3_600_000
NOW = 1_800_000_000_000


def problems(
    leads: dict[str, int], *, timestamps: int | None = 0, is_live: bool = True
) -> list[str]:
    """The problems if tablet servers and the oracle are this far ahead of the master's clock."""
    servers = [
        Server(kind=ServiceKind.SERVICE_KIND_TABLET_SERVER, address=one, clock_lead_milliseconds=ms)
        for one, ms in leads.items()
    ]
    servers.append(
        Server(kind=ServiceKind.SERVICE_KIND_MASTER, address="master:1", clock_lead_milliseconds=0)
    )
    cluster = DescribeResponse(
        servers=servers, wall_milliseconds=NOW, timestamp_lead_milliseconds=timestamps
    )
    found = Overview(cluster, is_live=is_live).problems()
    return [one for one in found if "clock" in one]


def test_clocks_that_agree_are_not_a_problem() -> None:
    assert not problems({"a:1": 900, "b:1": -20_000}, timestamps=29_000)


OFF = {
    "a clock ahead": (
        (2 * HOUR, 0, 0),
        "the clock of tablet server a:1 is 7,200 s ahead of most others",
    ),
    "a clock behind": (
        (-400 * 24 * HOUR, 0, 0),
        "the clock of tablet server a:1 is 34,560,000 s behind most others",
    ),
    # On the wire, all other clocks are relative to it. Timestamps follow the other clocks.
    "the clock of the master itself": (
        (-2 * HOUR, -2 * HOUR, -2 * HOUR),
        "the clock of master master:1 is 7,200 s ahead of most others",
    ),
    "timestamps ahead of clocks that are right again": (
        (0, 0, 2 * HOUR),
        "the oracle's timestamps are 7,200 s ahead of most clocks",
    ),
    "timestamps behind": (
        (0, 0, -2 * HOUR),
        "the oracle's timestamps are 7,200 s behind most clocks",
    ),
}


@pytest.mark.parametrize(("leads", "said"), OFF.values(), ids=OFF)
def test_a_clock_or_timestamps_that_are_off_are_named(
    leads: tuple[int, int, int], said: str
) -> None:
    [problem] = problems({"a:1": leads[0], "b:1": leads[1]}, timestamps=leads[2])
    assert problem.startswith(said)


def test_unknown_clocks_are_not_a_problem() -> None:
    assert not problems({}, timestamps=None)
    assert not problems({"a:1": HOUR, "b:1": 0}, is_live=False)


FULL = TabletServerInfo(
    address="b:1", writes_refused=ErrorDetail(message="1 MiB are free on the disk")
)


def test_a_server_that_takes_no_writes_is_a_problem_that_names_it_and_the_cause() -> None:
    found = Overview(DescribeResponse(), servers=[TabletServerInfo(address="a:1"), FULL])
    refusals = [one for one in found.problems() if "writes" in one]
    assert refusals == ["tablet server b:1 takes no writes: 1 MiB are free on the disk"]


def test_what_is_unusual_about_a_server_stands_beside_it() -> None:
    assert remarks(TabletServerInfo(address="a:1")) == ""
    assert remarks(TabletServerInfo(address="a:1", draining=True)) == "draining"
    assert remarks(FULL) == "takes no writes"


# Calls to the leading master, and questions before a command destroys something.


class _Leader:
    def __init__(self) -> None:
        self.moved = 0

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        kind = cluster_pb2.SERVICE_KIND_MASTER
        servers = [cluster_pb2.Server(kind=kind, address=one) for one in ("standby:1", "leader:1")]
        return cluster_pb2.DescribeResponse(servers=servers)

    async def list_tablets(self, request: pb.ListTabletsRequest) -> pb.ListTabletsResponse:
        return pb.ListTabletsResponse(more=True)

    async def move_tablet(self, request: pb.MoveTabletRequest) -> pb.MoveTabletResponse:
        self.moved += 1
        return pb.MoveTabletResponse()


class _Standby(_Leader):
    async def list_tablets(self, request: pb.ListTabletsRequest) -> pb.ListTabletsResponse:
        raise NotReady("this master does not lead")

    async def move_tablet(self, request: pb.MoveTabletRequest) -> pb.MoveTabletResponse:
        raise NotReady("this master does not lead")


class _Silent(_Leader):
    async def _never(self, request: object) -> None:
        await asyncio.get_running_loop().create_future()

    list_tablets = describe = move_tablet = _never  # type: ignore[assignment]


def _network() -> tuple[GrpcNetwork, _Leader]:
    leader = _Leader()
    handlers: dict[str, object] = {
        "leader:1": leader,
        "standby:1": _Standby(),
        "silent:1": _Silent(),
    }
    return cast(GrpcNetwork, UnaryTimeouts(handlers)), leader


@pytest.mark.parametrize(
    "addresses",
    [
        ["leader:1"],
        ["standby:1"],
        ["gone:1", "standby:1"],
        ["standby:1", "gone:1"],
        ["silent:1", "leader:1"],
        ["silent:1", "standby:1"],
        ["standby:1", "silent:1"],
    ],
)
async def test_the_leader_answers_whoever_else_is_named(addresses: list[str]) -> None:
    network, _ = _network()
    here = Connection(addresses, 10.0, as_json=False)
    request = pb.ListTabletsRequest()
    assert (await answer_of_leader(here, network, methods.LIST_TABLETS, request)).more
    assert VirtualClock(asyncio.get_running_loop()).monotonic_seconds() <= 10.0


async def test_a_change_that_may_have_been_made_is_not_asked_of_another_master() -> None:
    network, leader = _network()
    here = Connection(["silent:1", "leader:1"], 10.0, as_json=False)
    with pytest.raises(DeadlineExceeded):
        await answer_of_leader(here, network, methods.MOVE_TABLET, pb.MoveTabletRequest())
    assert not leader.moved


@pytest.mark.parametrize("answer", ["", "n\n"])
def test_a_question_that_no_terminal_answers_names_the_option(
    answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    with pytest.raises(Exit):
        confirm("Clear 3 dead letters?")
    assert "Without a terminal, answer with --yes" in capsys.readouterr().err


async def test_a_worker_waits_for_a_master_and_tells_each_reason_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    database = object()
    answers = [Unavailable("refused"), Unavailable("refused"), NotReady("none leads"), database]
    here = cast(Connection, Mock(database=AsyncMock(side_effect=answers)))
    assert await connected(here) is database
    assert capsys.readouterr().err == "waiting: refused\nwaiting: none leads\n"


async def test_a_worker_that_may_not_connect_does_not_wait() -> None:
    here = cast(Connection, Mock(database=AsyncMock(side_effect=PermissionDenied("no token"))))
    with pytest.raises(PermissionDenied, match="no token"):
        await connected(here)


# Sessions and pins, and the figures that clients and workers report with them.

TEA = LostCell(1, b"tea", b"stock")


def _session(who: str, runs: int, conflicts: int, *, observers: bool = True) -> Session:
    session = Session(session_id=who.encode())
    session.info.description = who
    cell = ContendedCell(table_id=1, row=b"tea", column=b"stock", conflicts=conflicts)
    its = ObserverActivity(
        table="orders",
        observer="count",
        runs=runs,
        commits=runs - conflicts,
        conflicts=conflicts,
        latency_milliseconds=10 * runs,
        backlog=3,
        cells=[cell],
    )
    activity = Activity(commits=runs, conflicts=conflicts, cells=[cell])
    if observers:
        activity.observers.append(its)
    session.info.activity.CopyFrom(activity)
    return session


def test_what_several_workers_did_is_added_up_by_observer_and_cell() -> None:
    silent = Session(session_id=b"old")
    found = Activities.of([_session("a", 10, 2), _session("b", 5, 5), silent])
    [(name, figures)] = found.observers.items()
    assert name == ("orders", "count")
    assert (figures.workers, figures.counts["runs"], figures.backlog) == (2, 15, 6)
    assert figures.cells == found.cells == {TEA: 7}
    assert figures.latency_seconds() == 150 / 8 / 1000
    assert [one.who for one in found.clients.values()] == ["a", "b"]


def test_rates_are_of_the_time_since_the_refresh_before() -> None:
    before = Activities.of([_session("a", 10, 2), _session("gone", 1_000, 0)])
    now = Activities.of([_session("a", 30, 6), _session("new", 50, 50)])
    moment = Sample(now, {1: NamedTable("goods", UNKNOWN)}, before, 2.0)
    [(client, commits, conflicts), (new, *_)] = moment.clients()
    assert (client.who, commits, conflicts) == ("a", 10.0, 2.0)
    assert new.who == "new"
    assert moment.cells() == [(TEA, 27.0)]
    [(_, _, rates)] = moment.observers()
    assert rates["runs"] == 0.0, "of a worker that has gone, no negative rate is left"


def test_a_cell_with_conflicts_is_shown_by_the_key_of_its_row() -> None:
    key = codecs.tuple_of(codecs.text, codecs.ordered_integer)
    forms = Forms(CodecNames(key="tuple_of(text, ordered_integer)"))
    tables = {1: NamedTable("orders", forms)}
    cell = LostCell(1, key.encode(("eu", 17)), b"state")
    assert cell_text(cell, tables) == 'orders, row ["eu", 17], column state'
    assert cell_data(cell, tables) == {"table": "orders", "row": ["eu", 17], "column": "state"}
    assert cell_text(TEA, {}) == "table 1, row tea, column stock"


def test_a_conflict_at_an_acknowledgement_names_the_observer_and_its_column() -> None:
    """The name of such a cell is not text: two workers have run the same change at once."""
    acknowledged = TEA._replace(column=acknowledgement_column(b"count", b"stock"))
    assert cell_text(acknowledged, {}) == "table 1, row tea, column stock, acknowledged by count"
    locked = TEA._replace(column=read_lock_column(b"stock", 7))
    assert cell_text(locked, {}) == "table 1, row tea, column stock"
    assert cell_text(TEA._replace(column=b"\0ack"), {}) == "table 1, row tea, column hex:0061636b"


def test_workers_of_the_library_are_those_that_are_no_servers() -> None:
    cluster = DescribeResponse(
        servers=[Server(kind=ServiceKind.SERVICE_KIND_WORKER, address="h:1")]
    )
    sessions = [
        _session("worker h:1", 1, 0),
        _session("shop.py on h, pid 7", 1, 0),
        _session("a client", 1, 0, observers=False),
    ]
    found = Overview(cluster, sessions=sessions).library_workers()
    assert [one.info.description for one in found] == ["shop.py on h, pid 7"]


def test_dead_letters_and_servers_that_are_gone_are_problems() -> None:
    gone = Server(
        kind=ServiceKind.SERVICE_KIND_TABLET_SERVER, address="h:1", silence_milliseconds=65_000
    )
    dead = {("orders", "count"): 2, ("orders", "settle"): 1}
    found = Overview(DescribeResponse(gone=[gone]), dead_letters=dead)
    assert [one for one in found.problems() if not one.startswith("no ")] == [
        "tablet server h:1 was there until 0:01:05 ago, and is gone: start it again",
        "observer count of table orders has 2 dead letters: see `percolator dead-letters list`",
        "observer settle of table orders has 1 dead letter: see `percolator dead-letters list`",
    ]


def test_the_first_refresh_of_top_has_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a single look has none, the command looks twice before it shows anything."""
    looks = iter([[_session("a", 10, 2)], [_session("a", 30, 6)]])
    slept: list[float] = []

    @in_place_of(monkeypatch, top, "list_sessions")
    async def sessions(*_: object, **__: object) -> list[Session]:
        return next(looks)

    @in_place_of(monkeypatch, top, "answer_of_leader")
    async def tables(*_: object) -> ListTablesResponse:
        return ListTablesResponse()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("percolator.cli.top.asyncio.sleep", sleep)
    result = CliRunner().invoke(app, ["--json", "top", "--times", "1", "--every", "3600"])
    assert result.exit_code == 0, result.output
    (program,) = json.loads(result.output)["programs"]
    assert program["commits_per_second"] > 0
    assert program["conflicts_per_second"] > 0
    assert slept == [2.0]


class _Connection:
    """The part of a connection that commands use, to a cluster with two lock services."""

    timeout_seconds = 5.0

    async def reach(self, network: LockServices) -> tuple[DescribeResponse, LockServices]:
        cluster = DescribeResponse()
        for address in (A, B):
            cluster.servers.add(kind=ServiceKind.SERVICE_KIND_LOCK_SERVICE, address=address)
        return cluster, network


async def test_a_command_says_which_lock_service_has_not_told_its_sessions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here: Any = _Connection()
    async with lock_services(A, B) as services:
        network: Any = services
        sessions = client(services, B)
        session_id = await sessions.current()
        await list_sessions(here, network)
        assert capsys.readouterr().err == ""
        services.refusing.add(A)
        assert [one.session_id for one in await list_sessions(here, network)] == [session_id]
        told = capsys.readouterr().err
        assert told.startswith(f"sessions of the lock service at {A} cannot be shown: ")
        problems: list[str] = []
        await list_sessions(here, network, tell=problems.append)
        assert [told] == [f"{one}\n" for one in problems]
        with pytest.raises(Unavailable, match=A):
            await list_sessions(here, network, tell=top._refuse)
        services.refusing.add(B)
        with pytest.raises(Unavailable, match="connection refused"):
            await list_sessions(here, network)
        await sessions.close()


async def test_a_pin_is_released_at_the_lock_service_that_knows_it() -> None:
    async with lock_services(A, B) as services:
        await asyncio.sleep(61)  # their grace periods are over
        pin = client(services, B, settings=SessionSettings(pin_at=42))
        session = await pin.current()
        assert session is not None
        calls = LockServiceCalls(services, [A, B])
        await released(calls, session, 5.0)
        assert services.alive(B) == []
        with pytest.raises(InvalidArgument, match="there is no pin"):
            await released(calls, session, 5.0)
        services.refusing.add(A)
        with pytest.raises(Unavailable):
            await released(calls, session, 5.0)
        await pin.close()


@pytest.mark.parametrize("named", [False, True])
async def test_locks_of_all_tables_leave_out_a_table_that_is_dropped_meanwhile(
    named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = LockRecord(1 << 18, 0, 3000, RecordKind.PUT, b"", CellAddress(1, b"r", b"c"), b"")
    cell = Cell(row=b"r", column=b"c", space=Space.SPACE_LOCK, value=lock.encode())

    @in_place_of(monkeypatch, sessions_command, "stored_cells")
    async def cells(_: object, table: Any, *__: object) -> AsyncIterator[Cell]:
        yield cell
        if table.name == "gone":
            raise SchemaError("there is no table 'gone'", table="gone")

    infos = [Mock(codecs=Mock(names=CodecNames())) for _ in range(2)]
    infos[0].name, infos[1].name = "gone", "kept"
    catalog = Mock(tables=AsyncMock(return_value=infos), table=AsyncMock(return_value=infos[0]))
    engine = Mock(catalog=catalog, now=lambda: 0.0)
    database: Any = Mock(
        internal=Mock(engine=engine), timestamp=AsyncMock(return_value=Timestamp(2 << 18))
    )
    here: Any = _Connection()
    if named:
        with pytest.raises(SchemaError, match="gone"):
            await sessions_command._held(here, database, "gone", None, 10)
    else:
        found = await sessions_command._held(here, database, None, None, 10)
        assert [one.table for one in found] == ["kept"]


# `percolator store init` and `percolator store check`, on the model of Bigtable.

ADDRESS = "bigtable://my-project/my-instance?profile=one"
GOOD = BigtableAppProfile(
    single_cluster_routing=BigtableAppProfile.SingleClusterRouting(
        cluster_id="cluster-1", allow_transactional_writes=True
    )
)
run = CliRunner()


@pytest.fixture(name="model")
def connected_model(monkeypatch: pytest.MonkeyPatch) -> BigtableInMemory:
    """A model that the commands connect to, as if it were the service."""
    model = BigtableInMemory()
    model.app_profiles["one"] = GOOD
    monkeypatch.delenv("BIGTABLE_EMULATOR_HOST", raising=False)

    class ModelConnection:
        def __init__(self, place: Place) -> None:
            self.place = place
            self.network = InProcessNetwork({place.address: model, place.tables_address: model})
            self.store = BigtableStore(self.network, place)

        async def close(self) -> None:
            await self.network.close()

    monkeypatch.setattr(store_command, "Connection", ModelConnection)
    return model


def checked(*more: str) -> Result:
    return run.invoke(app, ["--json", "store", "check", ADDRESS, *more])


def rows_left(model: BigtableInMemory) -> int:
    return sum(len(table.rows) for table in model.tables.values())


def test_an_instance_that_is_prepared_has_the_records_table_and_may_be_prepared_again(
    model: BigtableInMemory,
) -> None:
    for _ in range(2):
        result = run.invoke(app, ["--json", "store", "init", ADDRESS])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == {
            "store": ADDRESS,
            "cluster": "cluster-1",
            "table": "percolator-0",
        }
    assert [name.rpartition("/")[2] for name in model.tables] == ["percolator-0"]


def test_missing_roles_are_named_with_their_permissions_and_nothing_is_created(
    model: BigtableInMemory,
) -> None:
    model.denied = {"bigtable.tables.mutateRows", "bigtable.tables.create"}
    result = run.invoke(app, ["store", "init", ADDRESS])
    assert result.exit_code == 1
    assert (
        "missing: bigtable.tables.mutateRows; grant the account roles/bigtable.user"
        in result.stderr
    )
    assert "bigtable.tables.create; grant the account roles/bigtable.admin" in result.stderr
    assert not model.tables


PROFILES = {
    "routes to several clusters": BigtableAppProfile(
        multi_cluster_routing_use_any=BigtableAppProfile.MultiClusterRoutingUseAny()
    ),
    "does not permit single-row transactions": BigtableAppProfile(
        single_cluster_routing=BigtableAppProfile.SingleClusterRouting(cluster_id="cluster-1")
    ),
    "can only read": BigtableAppProfile(
        single_cluster_routing=GOOD.single_cluster_routing,
        data_boost_isolation_read_only=BigtableAppProfile.DataBoostIsolationReadOnly(),
    ),
}


@pytest.mark.parametrize("verb", ["init", "check"])
@pytest.mark.parametrize("why", PROFILES)
def test_a_profile_without_single_row_transactions_in_one_cluster_is_refused(
    model: BigtableInMemory, verb: str, why: str
) -> None:
    model.app_profiles["one"] = PROFILES[why]
    result = run.invoke(app, ["store", verb, ADDRESS])
    assert result.exit_code != 0
    assert f"the app profile 'one' {why}" in result.stderr
    assert "--transactional-writes" in result.stderr
    assert not model.tables


def test_a_store_that_keeps_all_promises_is_measured_and_left_empty(
    model: BigtableInMemory,
) -> None:
    result = checked("--seconds", "0.2", "--price", "0.65", "--nodes", "3")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["not_kept"] == {}
    assert shown["check_and_mutates_per_second"] > 0
    assert shown["nodes"] >= 1
    assert shown["cost_per_month"] == pytest.approx(shown["nodes"] * 0.65 * 730)
    assert result.stderr.count("\nkept: ") == 9
    assert not rows_left(model)


def _check_passes(model: Any) -> None:
    """A check that is not one with its changes."""
    correct = model.check_and_mutate_row

    async def wrong(request: Any) -> Any:
        if len(request.false_mutations):
            request.true_mutations.extend(request.false_mutations)
        return await correct(request)

    model.check_and_mutate_row = wrong


def _direction_ignored(model: Any) -> None:
    correct = model.read_rows

    async def wrong(request: Any) -> Any:
        request.reversed = False
        async for response in correct(request):
            yield response

    model.read_rows = wrong


def _all_times(model: Any) -> None:
    correct = model.read_rows

    async def wrong(request: Any) -> Any:
        for one in request.filter.chain.filters:
            one.timestamp_range_filter.Clear() if one.HasField("timestamp_range_filter") else None
        async for response in correct(request):
            yield response

    model.read_rows = wrong


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (_check_passes, "of many who check the same, one makes its changes"),
        (_direction_ignored, "scans backwards"),
        (_all_times, "times and values are selected by range, and the newest"),
    ],
)
def test_a_promise_that_is_not_kept_is_named_and_no_cluster_should_start(
    model: BigtableInMemory, broken: Any, promise: str
) -> None:
    broken(model)
    result = checked("--seconds", "0")
    assert result.exit_code == 3, result.output
    assert promise in json.loads(result.stdout)["not_kept"]


@pytest.mark.parametrize("verb", ["init", "check"])
def test_a_malformed_address_is_a_wrong_command(verb: str) -> None:
    result = run.invoke(app, ["store", verb, "bigtable://my-project"])
    assert result.exit_code == 2
    assert "the instance is missing" in result.stderr


async def test_conformance_of_the_model_as_an_emulator() -> None:
    """Times as late as emulators accept."""
    model = BigtableInMemory()
    place = parse_place(ADDRESS, environment={"BIGTABLE_EMULATOR_HOST": "localhost:1"})
    network = InProcessNetwork({place.address: model})
    await require_table(network, place, 9, 10.0)
    trials = Conformance(
        BigtableStore(network, place), 9, b"run-", store_command._LATEST_TIME_OF_EMULATORS, 10.0
    )
    assert [broken async for _, broken in trials.verdicts()] == [""] * 8
    await trials.clean_up()
    assert not rows_left(model)
