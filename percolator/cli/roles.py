"""Which master and which oracle leads: each is asked for what only a leader does.

That somebody is registered says little: he may be paused, cut off from the disk, or a standby.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Any

from percolator.errors import (
    NotReady,
    PercolatorError,
    PermissionDenied,
    Unauthenticated,
    UnknownServer,
)
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind
from percolator.v1.master_pb2 import ListServersRequest
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.wire import methods
from percolator.world import Network, UnaryMethod


class Role(StrEnum):
    """What came of asking."""

    LEADS = "leads"
    STANDBY = "standby"
    NO_ANSWER = "no answer"
    NOT_TOLD = "not told"
    """Whoever asks may not know."""


LEADING: dict[ServiceKind, tuple[UnaryMethod[Any, Any], Any]] = {
    ServiceKind.SERVICE_KIND_MASTER: (methods.LIST_SERVERS, ListServersRequest()),
    ServiceKind.SERVICE_KIND_ORACLE: (methods.GET_TIMESTAMPS, GetTimestampsRequest(count=1)),
}
"""The kinds of which one leads, and what it alone answers."""


async def roles_of(
    network: Network, cluster: DescribeResponse, timeout_seconds: float
) -> dict[str, Role]:
    """By server id."""
    asked = [server for server in cluster.servers if server.kind in LEADING]
    found = await asyncio.gather(*(_role(network, one, timeout_seconds) for one in asked))
    return {server.server_id: role for server, role in zip(asked, found, strict=True)}


async def _role(network: Network, server: Server, timeout_seconds: float) -> Role:
    method, request = LEADING[server.kind]
    try:
        await network.unary(server.address, method)(request, timeout_seconds)
    except (PermissionDenied, Unauthenticated):
        return Role.NOT_TOLD
    except UnknownServer:
        return Role.NO_ANSWER
    except NotReady:
        return Role.STANDBY
    except PercolatorError:
        return Role.NO_ANSWER
    return Role.LEADS
