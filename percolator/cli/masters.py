"""Calls to the leading master."""

from __future__ import annotations

from percolator.cli.connection import Connection
from percolator.errors import (
    NotReady,
    PercolatorError,
    Unavailable,
)
from percolator.v1 import master_pb2 as wire
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of
from percolator.world import RequestT, ResponseT, UnaryMethod


def ask_master(
    here: Connection, method: UnaryMethod[RequestT, ResponseT], request: RequestT
) -> ResponseT:
    """Calls the leading master, and returns its response."""
    return here.run(lambda network: answer_of_leader(here, network, method, request))


async def answer_of_leader(
    here: Connection,
    network: GrpcNetwork,
    method: UnaryMethod[RequestT, ResponseT],
    request: RequestT,
) -> ResponseT:
    """The leading master's response: from the given addresses, or from masters that these know."""
    problem: PercolatorError = Unavailable("no address was given")
    for address in here.addresses:
        try:
            return await network.unary(address, method)(request, here.timeout_seconds)
        except (NotReady, Unavailable) as error:
            # The last one is reported: the leader's own reason says more than a standby's.
            problem = error
    if not isinstance(problem, NotReady):
        raise problem
    cluster, reached = await here.reach(network)
    for address in addresses_of(cluster, ServiceKind.SERVICE_KIND_MASTER):
        try:
            return await reached.unary(address, method)(request, here.timeout_seconds)
        except (NotReady, Unavailable) as error:
            problem = error
    raise problem


async def all_tablets(
    here: Connection, network: GrpcNetwork, table: str = ""
) -> list[wire.TabletInfo]:
    """The tablets of one table, or of all, in order of their ids."""
    found: list[wire.TabletInfo] = []
    more = True
    while more:
        after = found[-1].location.tablet_id if found else 0
        request = wire.ListTabletsRequest(table=table, after_tablet_id=after)
        page = await answer_of_leader(here, network, methods.LIST_TABLETS, request)
        found += page.tablets
        more = page.more
    return found
