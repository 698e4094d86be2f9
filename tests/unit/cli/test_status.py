"""`percolator status`: roles, problems, and what could not be fetched."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
from rich.console import Console

from percolator.cli.connection import Connection
from percolator.cli.status import Overview, ServerRole, _as_data, _as_text, look
from percolator.cli.tablets import remarks
from percolator.errors import NotReady, PermissionDenied
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import lockservice_pb2, master_pb2, oracle_pb2
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.v1.master_pb2 import TabletServerInfo

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


class _Earlier(Connection):
    """Reaches the cluster by an address that has not heard of the second oracle yet."""

    async def reach(self, network: Any) -> Any:
        return DescribeResponse(servers=[MASTER, ORACLE, LOCKS]), network


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


class _RefusingMaster:
    """Answers a client without the role `admin`."""

    list_servers = list_tablets = staticmethod(_refuse)

    async def describe(self, _: object) -> DescribeResponse:
        return DescribeResponse(servers=[MASTER, LOCKS])

    async def describe_collection(self, _: object) -> master_pb2.DescribeCollectionResponse:
        return master_pb2.DescribeCollectionResponse()

    async def list_tables(self, _: object) -> master_pb2.ListTablesResponse:
        return master_pb2.ListTablesResponse(tables=[master_pb2.Table(name="people")])


class _RefusingLockService:
    list_sessions = staticmethod(_refuse)


class _Reached(Connection):
    async def reach(self, network: Any) -> Any:
        return DescribeResponse(servers=[MASTER, LOCKS]), network


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


@pytest.mark.parametrize(
    ("lead", "how"), [(2 * HOUR, "7,200 s ahead of"), (-400 * 24 * HOUR, "34,560,000 s behind")]
)
def test_a_clock_that_is_off_is_named(lead: int, how: str) -> None:
    [problem] = problems({"a:1": lead, "b:1": 0})
    assert problem.startswith(f"the clock of tablet server a:1 is {how} most others")


def test_the_masters_own_clock_is_named_if_it_is_the_one_that_is_off() -> None:
    """On the wire, all other clocks are relative to it. Timestamps follow the other clocks."""
    [problem] = problems({"a:1": -2 * HOUR, "b:1": -2 * HOUR}, timestamps=-2 * HOUR)
    assert problem.startswith("the clock of master master:1 is 7,200 s ahead of most others")


def test_timestamps_far_from_the_clocks_are_named_even_if_all_clocks_are_right_again() -> None:
    [problem] = problems({"a:1": 0, "b:1": 0}, timestamps=2 * HOUR)
    assert problem.startswith("the oracle's timestamps are 7,200 s ahead of most clocks")
    [problem] = problems({"a:1": 0, "b:1": 0}, timestamps=-2 * HOUR)
    assert problem.startswith("the oracle's timestamps are 7,200 s behind most clocks")


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
