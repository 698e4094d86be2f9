"""`percolator status` says what each server is, also one that has only just registered."""

from __future__ import annotations

from typing import Any, cast

from percolator.cli.connection import Connection
from percolator.cli.overview import look
from percolator.cli.roles import ServerRole
from percolator.errors import NotReady
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import lockservice_pb2, master_pb2, oracle_pb2
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind

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
