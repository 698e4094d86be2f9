"""`percolator status` shows what it could not fetch as unknown, not as 0."""

from __future__ import annotations

import io
from typing import Any, cast

from rich.console import Console

from percolator.cli.connection import Connection
from percolator.cli.overview import look
from percolator.cli.status import _as_data, _as_text
from percolator.errors import PermissionDenied
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import master_pb2
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind

MASTER = Server(server_id="m", kind=ServiceKind.SERVICE_KIND_MASTER, address="master:1")
LOCKS = Server(server_id="l", kind=ServiceKind.SERVICE_KIND_LOCK_SERVICE, address="locks:1")

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


class _Master:
    """Answers a client without the role `admin`."""

    list_servers = list_tablets = staticmethod(_refuse)

    async def describe(self, _: object) -> DescribeResponse:
        return DescribeResponse(servers=[MASTER, LOCKS])

    async def describe_collection(self, _: object) -> master_pb2.DescribeCollectionResponse:
        return master_pb2.DescribeCollectionResponse()

    async def list_tables(self, _: object) -> master_pb2.ListTablesResponse:
        return master_pb2.ListTablesResponse(tables=[master_pb2.Table(name="people")])


class _LockService:
    list_sessions = staticmethod(_refuse)


class _Reached(Connection):
    async def reach(self, network: Any) -> Any:
        return DescribeResponse(servers=[MASTER, LOCKS]), network


async def test_what_a_client_may_not_see_is_unknown_and_not_zero() -> None:
    handlers = {MASTER.address: _Master(), LOCKS.address: _LockService()}
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
