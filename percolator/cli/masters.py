"""Calls to the master that leads, and rows as people read and write them."""

from __future__ import annotations

import string

from percolator.cli.connection import Connection
from percolator.errors import (
    InvalidArgument,
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

_HEX = "hex:"


def ask_master(
    here: Connection, method: UnaryMethod[RequestT, ResponseT], request: RequestT
) -> ResponseT:
    """The answer of the master that leads."""
    return here.run(lambda network: answer_of_leader(here, network, method, request))


async def answer_of_leader(
    here: Connection,
    network: GrpcNetwork,
    method: UnaryMethod[RequestT, ResponseT],
    request: RequestT,
) -> ResponseT:
    """Of the first address that neither is gone nor a standby's, or of a master that these know."""
    problem: PercolatorError = Unavailable("no address was given")
    for address in here.addresses:
        try:
            return await network.unary(address, method)(request, here.timeout_seconds)
        except (NotReady, Unavailable) as error:
            # The leader's own reason says more than a standby's.
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
    """Of one table, or of all; by id."""
    found: list[wire.TabletInfo] = []
    more = True
    while more:
        after = found[-1].location.tablet_id if found else 0
        request = wire.ListTabletsRequest(table=table, after_tablet_id=after)
        page = await answer_of_leader(here, network, methods.LIST_TABLETS, request)
        found += page.tablets
        more = page.more
    return found


def row_bytes(field: str, text: str) -> bytes:
    """The row that `text` means: itself, in UTF-8, or the bytes behind "hex:"."""
    if not text.startswith(_HEX):
        return text.encode()
    digits = text.removeprefix(_HEX)
    if len(digits) % 2 or not set(digits) <= set(string.hexdigits):
        raise InvalidArgument(field, f"expected pairs of hexadecimal digits, found {digits[:40]!r}")
    return bytes.fromhex(digits)


def row_text(row: bytes) -> str:
    """What `row_bytes` reads as this row."""
    try:
        text = row.decode()
    except UnicodeDecodeError:
        return _HEX + row.hex()
    return text if text.isprintable() and not text.startswith(_HEX) else _HEX + row.hex()
