"""What `percolator status` shows: the cluster at one moment, and what is wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from percolator.cli.connection import Connection
from percolator.cli.masters import all_tablets, answer_of_leader
from percolator.cli.roles import LEADING, Role, roles_of
from percolator.cli.sessions import list_sessions
from percolator.errors import PercolatorError
from percolator.v1 import master_pb2 as wire
from percolator.v1.cluster_pb2 import DescribeRequest, DescribeResponse, Server, ServiceKind
from percolator.v1.lockservice_pb2 import Session
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.world import Network

R = TypeVar("R")

NAMES = {
    ServiceKind.SERVICE_KIND_MASTER: "master",
    ServiceKind.SERVICE_KIND_ORACLE: "oracle",
    ServiceKind.SERVICE_KIND_LOCK_SERVICE: "lock service",
    ServiceKind.SERVICE_KIND_TABLET_SERVER: "tablet server",
    ServiceKind.SERVICE_KIND_WORKER: "worker",
    ServiceKind.SERVICE_KIND_GATEWAY: "gateway",
}
NEEDED = (ServiceKind.SERVICE_KIND_ORACLE, ServiceKind.SERVICE_KIND_LOCK_SERVICE)
SILENCE_MILLISECONDS_MAX = 3_000
_PROBE_SECONDS = 2.0
_LISTED_MAX = 5
"""Tablets that are named, of those that are not served."""


@dataclass
class Overview:
    """Each part as far as it could be had."""

    cluster: DescribeResponse
    roles: Mapping[str, Role] = field(default_factory=dict)
    """By server id, of masters and oracles: found out by asking each."""
    is_live: bool = False
    """The leading master describes the cluster; else a standby, as it was some time ago."""
    tables: Sequence[wire.Table] = ()
    tablets: list[wire.TabletInfo] = field(default_factory=list)
    servers: Sequence[wire.TabletServerInfo] = ()
    sessions: list[Session] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """What could not be had, and why."""

    def problems(self) -> list[str]:
        """What an operator should look at; empty when all is well."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        servers = self.cluster.servers
        present = {server.kind for server in servers}
        yield from (f"no {NAMES[kind]} is registered" for kind in NEEDED if kind not in present)
        for kind in LEADING:
            roles = {self.roles.get(one.server_id) for one in servers if one.kind == kind}
            if roles and not roles & {Role.LEADS, Role.NOT_TOLD}:
                yield f"no {NAMES[kind]} leads"
        for server in servers:
            if self.roles.get(server.server_id) is Role.NO_ANSWER:
                yield f"{_named(server)} does not answer"
            elif self.is_live and is_silent(server):
                yield f"{_named(server)} is silent"
        not_served = [one for one in self.tablets if not one.serving]
        for one in not_served[:_LISTED_MAX]:
            reason = one.error.message if one.HasField("error") else "yet"
            yield f"tablet {one.location.tablet_id} of {one.table} is not served: {reason}"
        if len(not_served) > _LISTED_MAX:
            yield f"{len(not_served) - _LISTED_MAX} other tablets are not served"
        yield from self.unknown

    def leader(self, kind: ServiceKind) -> Server | None:
        """Of the masters, or of the oracles; None when none leads."""
        for one in self.cluster.servers:
            if one.kind == kind and self.roles.get(one.server_id) is Role.LEADS:
                return one
        return None

    def sum(self, figure: str) -> float:
        """Of one statistic over all tablets."""
        return float(sum(getattr(one.statistics, figure) for one in self.tablets))


def is_silent(server: Server) -> bool:
    """Whether it has missed several reports."""
    return server.silence_milliseconds > SILENCE_MILLISECONDS_MAX


def _named(server: Server) -> str:
    return f"{NAMES.get(server.kind, str(server.kind))} {server.address}"


async def look(here: Connection, network: GrpcNetwork) -> Overview:
    """All parts at about the same moment. Raises only when nobody describes the cluster."""
    cluster, reached = await here.reach(network)
    roles = await roles_of(reached, cluster, min(here.timeout_seconds, _PROBE_SECONDS))
    overview = Overview(cluster, roles)
    await _ask_masters(here, reached, overview)

    async def part(name: str, asked: Awaitable[R], otherwise: R) -> R:
        try:
            return await asked
        except PercolatorError as error:
            overview.unknown.append(f"{name} cannot be shown: {error}")
            return otherwise

    overview.tables, overview.tablets, overview.servers, overview.sessions = await asyncio.gather(
        part("tables", _tables(here, network), ()),
        part("tablets", all_tablets(here, network), []),
        part("tablet servers", _servers(here, network), ()),
        part("sessions", list_sessions(here, network), []),
    )
    return overview


async def _ask_masters(here: Connection, reached: Network, overview: Overview) -> None:
    """What the leader knows of the servers, and each other master of itself.

    A standby tells of the servers as the leader once noted them, and the leader of a standby as it
    was at its start.
    """

    async def told_by(server: Server) -> DescribeResponse | None:
        call = reached.unary(server.address, methods.DESCRIBE)
        try:
            return await call(DescribeRequest(), here.timeout_seconds)
        except PercolatorError:
            return None  # what the others tell is shown as that

    leader = overview.leader(ServiceKind.SERVICE_KIND_MASTER)
    cluster = None if leader is None else await told_by(leader)
    if cluster is None:
        return
    overview.cluster, overview.is_live = cluster, True
    for server in cluster.servers:
        is_master = server.kind == ServiceKind.SERVICE_KIND_MASTER
        if is_master and overview.roles.get(server.server_id) is Role.STANDBY:
            found = await told_by(server)
            for own in found.servers if found is not None else ():
                if own.server_id == server.server_id:
                    server.uptime_milliseconds = own.uptime_milliseconds


async def _tables(here: Connection, network: GrpcNetwork) -> Sequence[wire.Table]:
    request = wire.ListTablesRequest()
    return (await answer_of_leader(here, network, methods.LIST_TABLES, request)).tables


async def _servers(here: Connection, network: GrpcNetwork) -> Sequence[wire.TabletServerInfo]:
    request = wire.ListServersRequest()
    return (await answer_of_leader(here, network, methods.LIST_SERVERS, request)).servers
