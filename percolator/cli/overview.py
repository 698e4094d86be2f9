"""What `percolator status` shows: the cluster at one moment, and what is wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from percolator.aio.observing import worker_context
from percolator.cli.activity import workers_of
from percolator.cli.connection import Connection
from percolator.cli.masters import all_tablets, answer_of_leader
from percolator.cli.roles import LEADING, ServerRole, roles_of
from percolator.cli.sessions import list_sessions
from percolator.counts import counted
from percolator.errors import PercolatorError, Unavailable
from percolator.observers.waiting import count_dead_letters
from percolator.schema import DEAD_LETTERS_NAME
from percolator.v1 import master_pb2 as pb
from percolator.v1.cluster_pb2 import DescribeRequest, DescribeResponse, Server, ServiceKind
from percolator.v1.lockservice_pb2 import Session
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster_clock import CLOCK_SECONDS_MAX, clocks_of, majority
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
NEEDED = (
    ServiceKind.SERVICE_KIND_ORACLE,
    ServiceKind.SERVICE_KIND_LOCK_SERVICE,
    ServiceKind.SERVICE_KIND_TABLET_SERVER,
)
SILENCE_MILLISECONDS_MAX = 3_000
HELD_SECONDS_MAX = 86_400
ROUND_AGE_SECONDS_MAX = 3_600
_PROBE_SECONDS = 2.0
_LISTED_MAX = 5
"""How many of the tablets that are not served are named."""


@dataclass
class Overview:
    """The state of the cluster, as far as it could be fetched."""

    cluster: DescribeResponse
    roles: Mapping[str, ServerRole] = field(default_factory=dict)
    """The roles of masters and oracles by server id, as each of them answered."""
    is_live: bool = False
    """Whether the leading master described the cluster. If not, a standby did, from older data."""
    tables: Sequence[pb.Table] = ()
    tablets: list[pb.TabletInfo] = field(default_factory=list)
    servers: Sequence[pb.TabletServerInfo] = ()
    sessions: list[Session] = field(default_factory=list)
    """With what their processes do."""
    dead_letters: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By table and observer."""
    history: pb.DescribeCollectionResponse | None = None
    """None if the leading master does not describe it, such as just after it began to lead."""
    unknown: list[str] = field(default_factory=list)
    """What could not be fetched, and why."""
    missing: set[str] = field(default_factory=set)
    """The names of the parts that could not be fetched: what is empty there is not known."""

    @property
    def row_store(self) -> str:
        """The row store that has the cells; empty if tablet servers have them."""
        return self.cluster.row_store.address

    def problems(self) -> list[str]:
        """What an operator should look at; empty when all is well."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        servers = self.cluster.servers
        present = {server.kind for server in servers}
        needed = NEEDED[:-1] if self.row_store else NEEDED
        yield from (f"no {NAMES[kind]} is registered" for kind in needed if kind not in present)
        for kind in LEADING:
            roles = {self.roles.get(one.server_id) for one in servers if one.kind == kind}
            if roles and not roles & {ServerRole.LEADS, ServerRole.NOT_TOLD}:
                yield f"no {NAMES[kind]} leads"
        for server in servers:
            if self.roles.get(server.server_id) is ServerRole.NO_ANSWER:
                yield f"{_named(server)} does not answer"
            elif self.is_live and is_silent(server):
                yield f"{_named(server)} is silent"
        for server in self.cluster.gone:
            ago = timedelta(seconds=server.silence_milliseconds // 1000)
            yield f"{_named(server)} was there until {ago} ago, and is gone: start it again"
        for serving in self.servers:
            if serving.HasField("writes_refused"):
                why = serving.writes_refused.message
                yield f"tablet server {serving.address} takes no writes: {why}"
        yield from self._wrong_clocks()
        not_served = [one for one in self.tablets if not one.serving]
        for one in not_served[:_LISTED_MAX]:
            reason = f": {one.error.message}" if one.HasField("error") else " yet"
            yield f"tablet {one.location.tablet_id} of {one.table} is not served{reason}"
        if len(not_served) > _LISTED_MAX:
            yield f"{len(not_served) - _LISTED_MAX} other tablets are not served"
        for (table, observer), count in sorted(self.dead_letters.items()):
            yield (
                f"observer {observer} of table {table} has {counted(count, 'dead letter')}: see "
                "`percolator dead-letters list`"
            )
        if self.history is not None:
            yield from _history_problems(self.history)
        yield from self.unknown

    def _wrong_clocks(self) -> Iterator[str]:
        """Clocks that differ from the others, and timestamps that differ from the clocks.

        Timestamps may be far off even if all clocks are right again.
        """
        if not self.is_live:
            return
        clocks = clocks_of(self.cluster)
        agreed = majority(clocks)
        if agreed is None:
            return
        for server in self.cluster.servers:
            ahead = (clocks.get(server.address, agreed) - agreed) / 1000
            if abs(ahead) > CLOCK_SECONDS_MAX:
                yield (
                    f"the clock of {_named(server)} is {_ahead(ahead)} most others: correct it, "
                    "before an oracle on that machine leads"
                )
        if self.cluster.HasField("timestamp_lead_milliseconds"):
            oracle = self.cluster.wall_milliseconds + self.cluster.timestamp_lead_milliseconds
            lead = (oracle - agreed) / 1000
            if abs(lead) > CLOCK_SECONDS_MAX:
                yield (
                    f"the oracle's timestamps are {_ahead(lead)} most clocks: see "
                    '"When timestamps differ from the clocks" in docs/operating.md'
                )

    def library_workers(self) -> list[Session]:
        """Processes that run observers and are no servers of the cluster: `percolator worker`, and
        programs with `db.run_observers`."""
        services = {
            f"worker {one.address}"
            for one in self.cluster.servers
            if one.kind == ServiceKind.SERVICE_KIND_WORKER
        }
        return [one for one in workers_of(self.sessions) if one.info.description not in services]

    def leader(self, kind: ServiceKind) -> Server | None:
        """The leading master or oracle; None if none leads."""
        for one in self.cluster.servers:
            if one.kind == kind and self.roles.get(one.server_id) is ServerRole.LEADS:
                return one
        return None

    def can_be_read(self, table: str) -> bool:
        """Whether the table exists, all its tablets are served, and there is an oracle to ask."""
        if self.row_store:
            is_served = any(one.name == table for one in self.tables)
        else:
            tablets = [one for one in self.tablets if one.table == table]
            is_served = bool(tablets) and all(one.serving for one in tablets)
        return is_served and bool(self.leader(ServiceKind.SERVICE_KIND_ORACLE))

    def sum(self, figure: str) -> float:
        """The sum of one statistic over all tablets."""
        return float(sum(getattr(one.statistics, figure) for one in self.tablets))


def _history_problems(history: pb.DescribeCollectionResponse) -> Iterator[str]:
    """The conditions of the alerts HistoryHeldBack and HistoryNotCollected."""
    held_seconds = history.held_milliseconds // 1000
    if held_seconds > HELD_SECONDS_MAX:
        yield (
            f"{history.held_by} holds back history for {timedelta(seconds=held_seconds)} longer "
            "than tables keep it: see `percolator gc status`"
        )
    age_seconds = history.age_milliseconds // 1000
    if age_seconds > ROUND_AGE_SECONDS_MAX:
        why = f": {history.error.message}" if history.HasField("error") else ""
        yield f"no history was collected for {timedelta(seconds=age_seconds)}{why}"


def is_silent(server: Server) -> bool:
    """Whether the server has missed several reports."""
    return server.silence_milliseconds > SILENCE_MILLISECONDS_MAX


def _named(server: Server) -> str:
    return f"{NAMES.get(server.kind, str(server.kind))} {server.address}"


def _ahead(seconds: float) -> str:
    return f"{abs(seconds):,.0f} s {'ahead of' if seconds > 0 else 'behind'}"


async def look(here: Connection, network: GrpcNetwork) -> Overview:
    """Fetches all parts at about the same moment. Raises only if no server answers `Describe`."""
    cluster, reached = await here.reach(network)
    probe_seconds = min(here.timeout_seconds, _PROBE_SECONDS)
    overview = Overview(cluster, await roles_of(reached, cluster.servers, probe_seconds))
    await _ask_masters(here, reached, overview)
    # The leader may name servers that have registered since; they would be shown without a role.
    asked = {one.server_id for one in cluster.servers}
    others = [one for one in overview.cluster.servers if one.server_id not in asked]
    overview.roles = {**overview.roles, **await roles_of(reached, others, probe_seconds)}

    async def part(name: str, asked: Awaitable[R], otherwise: R) -> R:
        try:
            return await asked
        except PercolatorError as error:
            overview.unknown.append(f"{name} cannot be shown: {error}")
            overview.missing.add(name)
            return otherwise

    overview.tables, overview.tablets, overview.servers, overview.sessions = await asyncio.gather(
        part("tables", _tables(here, network), ()),
        part("tablets", _tablets(here, network, overview), []),
        part("tablet servers", _servers(here, network), ()),
        part(
            "sessions",
            list_sessions(here, network, activity=True, tell=overview.unknown.append),
            [],
        ),
    )
    with contextlib.suppress(PercolatorError):  # if the master is silent, other parts say so
        overview.history = await answer_of_leader(
            here, network, methods.DESCRIBE_COLLECTION, pb.DescribeCollectionRequest()
        )
    if overview.can_be_read(DEAD_LETTERS_NAME):
        overview.dead_letters = await part("dead letters", _dead_letters(here), {})
    return overview


async def _dead_letters(here: Connection) -> dict[tuple[str, str], int]:
    """Counted only if the tablets that have them are served: otherwise it would wait for them."""
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            return await here.on_database(
                lambda database: count_dead_letters(worker_context(database.internal.engine))
            )
    except TimeoutError:
        raise Unavailable(f"no answer within {_PROBE_SECONDS:g} s") from None


async def _ask_masters(here: Connection, reached: Network, overview: Overview) -> None:
    """Takes from the leader what it knows of the servers, and from each other master its uptime.

    A standby describes the servers as the leader once wrote them down, and the leader describes a
    standby as it was when that standby started.
    """

    async def description_from(server: Server) -> DescribeResponse | None:
        call = reached.unary(server.address, methods.DESCRIBE)
        try:
            return await call(DescribeRequest(), here.timeout_seconds)
        except PercolatorError:
            return None  # what other servers say is shown instead

    leader = overview.leader(ServiceKind.SERVICE_KIND_MASTER)
    cluster = None if leader is None else await description_from(leader)
    if cluster is None:
        return
    overview.cluster, overview.is_live = cluster, True
    for server in cluster.servers:
        is_master = server.kind == ServiceKind.SERVICE_KIND_MASTER
        if is_master and overview.roles.get(server.server_id) is ServerRole.STANDBY:
            found = await description_from(server)
            for own in found.servers if found is not None else ():
                if own.server_id == server.server_id:
                    server.uptime_milliseconds = own.uptime_milliseconds


async def _tables(here: Connection, network: GrpcNetwork) -> Sequence[pb.Table]:
    request = pb.ListTablesRequest()
    return (await answer_of_leader(here, network, methods.LIST_TABLES, request)).tables


async def _tablets(
    here: Connection, network: GrpcNetwork, overview: Overview
) -> list[pb.TabletInfo]:
    """None where a row store has the cells."""
    return [] if overview.row_store else await all_tablets(here, network)


async def _servers(here: Connection, network: GrpcNetwork) -> Sequence[pb.TabletServerInfo]:
    request = pb.ListServersRequest()
    return (await answer_of_leader(here, network, methods.LIST_SERVERS, request)).servers
