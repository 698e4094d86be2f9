"""Calls to the leading master."""

from __future__ import annotations

from collections.abc import Sequence

from percolator.cli.connection import Connection
from percolator.errors import (
    DeadlineExceeded,
    NotReady,
    PercolatorError,
    Unavailable,
)
from percolator.v1 import master_pb2 as pb
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of
from percolator.world import Network, RequestT, ResponseT, UnaryMethod

_LOOKS = (methods.LIST_TABLES, methods.LIST_TABLETS, methods.LIST_SERVERS, methods.DESCRIBE_TABLE)
"""What changes nothing, and so may be asked of another master if one is silent."""


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
    try:
        return await _first_answer(network, here.addresses, here.timeout_seconds, method, request)
    except NotReady:
        # From a master that stands by, or from none that can answer at the moment.
        cluster, reached = await here.reach(network)
    masters = addresses_of(cluster, ServiceKind.SERVICE_KIND_MASTER)
    return await _first_answer(reached, masters, here.timeout_seconds, method, request)


async def _first_answer(
    network: Network,
    addresses: Sequence[str],
    timeout_seconds: float,
    method: UnaryMethod[RequestT, ResponseT],
    request: RequestT,
) -> ResponseT:
    """The first answer. Raises `NotReady` if there is none, but a master that could name others."""
    passed_over: tuple[type[PercolatorError], ...] = (NotReady, Unavailable)
    seconds = timeout_seconds
    if method in _LOOKS:  # any other may have been executed by a master that is silent
        passed_over = (*passed_over, DeadlineExceeded)
        seconds = timeout_seconds / max(len(addresses), 1)
    problem: PercolatorError = Unavailable("no address was given")
    for address in addresses:
        try:
            return await network.unary(address, method)(request, seconds)
        except passed_over as error:
            # The last one is reported: the leader's own reason says more than a standby's.
            if isinstance(error, NotReady) or not isinstance(problem, NotReady):
                problem = error
    raise problem


async def all_tablets(
    here: Connection, network: GrpcNetwork, table: str = ""
) -> list[pb.TabletInfo]:
    """The tablets of one table, or of all, in order of their ids."""
    found: list[pb.TabletInfo] = []
    more = True
    while more:
        after = found[-1].location.tablet_id if found else 0
        request = pb.ListTabletsRequest(table=table, after_tablet_id=after)
        page = await answer_of_leader(here, network, methods.LIST_TABLETS, request)
        found += page.tablets
        more = page.more
    return found
