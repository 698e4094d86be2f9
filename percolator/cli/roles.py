"""Finds out which master and which oracle lead, by asking each for what only a leader does, and
which tablet servers answer.

That a server is registered says little: it may be paused, cut off from the disk, or a standby.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from percolator.errors import (
    NotReady,
    Overloaded,
    PercolatorError,
    PermissionDenied,
    Unauthenticated,
    UnknownServer,
)
from percolator.v1.cluster_pb2 import Server, ServiceKind
from percolator.v1.master_pb2 import ListServersRequest
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.v1.tabletserver_pb2 import ReadRequest
from percolator.wire import methods
from percolator.world import Network, UnaryMethod


class ServerRole(StrEnum):
    """What a server turned out to be when it was asked."""

    LEADS = "leads"
    STANDBY = "standby"
    NO_ANSWER = "no answer"
    NOT_TOLD = "not told"
    """The caller may not know."""


LEADING: dict[ServiceKind, tuple[UnaryMethod[Any, Any], Any]] = {
    ServiceKind.SERVICE_KIND_MASTER: (methods.LIST_SERVERS, ListServersRequest()),
    ServiceKind.SERVICE_KIND_ORACLE: (methods.GET_TIMESTAMPS, GetTimestampsRequest(count=1)),
}
"""The kinds of server of which one leads, each with a call that only the leader answers."""


_ASKED: dict[ServiceKind, tuple[UnaryMethod[Any, Any], Any]] = {
    **LEADING,
    ServiceKind.SERVICE_KIND_TABLET_SERVER: (methods.READ, ReadRequest()),
}


async def roles_of(
    network: Network, servers: Iterable[Server], timeout_seconds: float
) -> dict[str, ServerRole]:
    """The roles of the masters and oracles among them, by server id, and the tablet servers that
    do not answer."""
    asked = [server for server in servers if server.kind in _ASKED]
    found = await asyncio.gather(*(_role(network, one, timeout_seconds) for one in asked))
    return {
        server.server_id: role
        for server, role in zip(asked, found, strict=True)
        if role is not None
    }


async def _role(network: Network, server: Server, timeout_seconds: float) -> ServerRole | None:
    method, request = _ASKED[server.kind]
    leads = server.kind in LEADING
    try:
        await network.unary(server.address, method)(request, timeout_seconds)
    except (PermissionDenied, Unauthenticated):
        return ServerRole.NOT_TOLD if leads else None
    except Overloaded:
        return ServerRole.NO_ANSWER if leads else None
    except NotReady as error:
        # A gateway says so, too, of a server that is not listed.
        return (
            ServerRole.STANDBY
            if leads and not isinstance(error, UnknownServer)
            else ServerRole.NO_ANSWER
        )
    except PercolatorError:
        return ServerRole.NO_ANSWER
    return ServerRole.LEADS if leads else None
