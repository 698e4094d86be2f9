"""Finding a cluster: one list of `host:port` is all that a client needs.

Any master or gateway in the list describes the cluster; the first answer wins.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from percolator.v1.cluster_pb2 import DescribeRequest, DescribeResponse, ServiceKind
from percolator.wire.addresses import parse_host_port
from percolator.wire.methods import DESCRIBE
from percolator.world import Network

DEFAULT_ADDRESS = "localhost:7100"
ENVIRONMENT_VARIABLE = "PERCOLATOR_ADDRESS"


def parse_addresses(text: str, *, field: str = "address") -> list[str]:
    """Splits "host:port,host:port"; `InvalidArgument` names `field` if one is malformed."""
    addresses = [parse_host_port(part.strip(), field) for part in text.split(",")]
    for address in addresses:
        if address.port == 0:
            raise InvalidArgument(field, f"port 0 cannot be dialled, in {text!r}")
    return [str(address) for address in addresses]


def default_addresses() -> list[str]:
    """The addresses in PERCOLATOR_ADDRESS, or else the port of a master on this machine."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, DEFAULT_ADDRESS)
    return parse_addresses(text, field=ENVIRONMENT_VARIABLE)


async def describe(
    network: Network, addresses: Sequence[str], timeout_seconds: float
) -> DescribeResponse:
    """Asks one address after another until one describes the cluster."""
    return (await described_by(network, addresses, timeout_seconds))[1]


async def described_by(
    network: Network, addresses: Sequence[str], timeout_seconds: float
) -> tuple[str, DescribeResponse]:
    """Like `describe`, and also returns the address that answered."""
    problems = []
    for address in addresses:
        try:
            call = network.unary(address, DESCRIBE)
            return address, await call(DescribeRequest(), timeout_seconds / len(addresses))
        except (Unauthenticated, PermissionDenied):
            # The others would say the same, and the caller needs to know what is wrong.
            raise
        except PercolatorError as error:
            problems.append(f"{address}: {error.message}")
    hint = ""
    if all(parse_host_port(address, "address").is_loopback() for address in addresses):
        hint = "; if no cluster is running, start one with `percolator dev`"
    raise Unavailable(
        f"no master or gateway answered: {'; '.join(problems)}{hint}", where="Describe"
    )


def addresses_of(cluster: DescribeResponse, kind: ServiceKind) -> list[str]:
    """The addresses of the servers of one kind."""
    return [server.address for server in cluster.servers if server.kind == kind]
