"""`percolator status`: the cluster on one screen, and its problems.

That a server is registered says little: it may be paused, cut off from the disk, or a standby. So
each master and oracle is asked for what only a leader does, and each tablet server for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Group
from rich.table import Table as Screen
from rich.text import Text

from percolator.aio.observing import worker_context
from percolator.cli.connection import (
    Connection,
    all_tablets,
    answer_of_leader,
    connection,
    fail,
    keep_showing,
    plain,
)
from percolator.cli.sessions import list_sessions
from percolator.cli.tablets import remarks
from percolator.cli.top import workers_of
from percolator.codecs.readable import counted
from percolator.errors import (
    NotReady,
    Overloaded,
    PercolatorError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    UnknownServer,
    UsageError,
)
from percolator.observers.quiet import count_dead_letters
from percolator.schema import DEAD_LETTERS_NAME
from percolator.v1 import master_pb2 as pb
from percolator.v1.cluster_pb2 import DescribeRequest, DescribeResponse, Server, ServiceKind
from percolator.v1.lockservice_pb2 import Session
from percolator.v1.master_pb2 import ListServersRequest, TabletServerInfo
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.v1.tabletserver_pb2 import ReadRequest
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster_clock import CLOCK_SECONDS_MAX, clocks_of, majority
from percolator.world import Network, UnaryMethod


class ServerRole(StrEnum):
    """The role in which a server answered."""

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
    """The leading master described the cluster. If not, a standby did, from older data."""
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
    """Sentences about what could not be fetched, and why."""
    missing: set[str] = field(default_factory=set)
    """The names of the parts that could not be fetched: what is empty there is not known."""

    @property
    def shown_tables(self) -> list[pb.Table]:
        """Without the tables that have the entries of indexes."""
        return [table for table in self.tables if not table.index_of]

    @property
    def row_store(self) -> str:
        """The row store that has the cells; empty if tablet servers have them."""
        return self.cluster.row_store.address

    def problems(self) -> list[str]:
        """Problems that an operator should look at; empty when all is well."""
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
        """The table exists, all its tablets are served, and there is an oracle to ask."""
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
    """The server has missed several reports."""
    return server.silence_milliseconds > SILENCE_MILLISECONDS_MAX


def _named(server: Server) -> str:
    return f"{NAMES.get(server.kind, str(server.kind))} {server.address}"


def _ahead(seconds: float) -> str:
    return f"{abs(seconds):,.0f} s {'ahead of' if seconds > 0 else 'behind'}"


async def look(here: Connection, network: GrpcNetwork) -> Overview:
    """Fetches all parts at about one time. Raises only if no server answers `Describe`."""
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
        part("tablets", _list_tablets(here, network, overview), []),
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


async def _list_tablets(
    here: Connection, network: GrpcNetwork, overview: Overview
) -> list[pb.TabletInfo]:
    """None where a row store has the cells."""
    return [] if overview.row_store else await all_tablets(here, network)


async def _servers(here: Connection, network: GrpcNetwork) -> Sequence[pb.TabletServerInfo]:
    request = pb.ListServersRequest()
    return (await answer_of_leader(here, network, methods.LIST_SERVERS, request)).servers


EXIT_PROBLEMS = 3


def status(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    every: Annotated[
        float, typer.Option(help="Seconds between refreshes, with --watch.", min=0.2, max=86_400)
    ] = 2.0,
    check: Annotated[
        bool, typer.Option("--check", help=f"Exit code {EXIT_PROBLEMS} if something is wrong.")
    ] = False,
) -> None:
    """Show the cluster, its servers, and what is wrong."""
    here = connection(context)
    if watch and check:
        fail(UsageError("--check looks once: it cannot be combined with --watch"))
    if watch:
        keep_showing(here, lambda network: look(here, network), _as_text, _as_data, every=every)
        return
    overview = here.run(lambda network: look(here, network))
    here.show(_as_data(overview), _as_text(overview))
    if check and overview.problems():
        raise typer.Exit(EXIT_PROBLEMS)


def _as_data(overview: Overview) -> dict[str, object]:
    cluster = overview.cluster
    return {
        "cluster_id": cluster.cluster_id,
        "version": cluster.version,
        "format": cluster.format,
        "servers": [_server_as_data(overview, server) for server in cluster.servers],
        "gone": [
            {"kind": _kind(one), "address": one.address, "silence_seconds": _silence(one)}
            for one in cluster.gone
        ],
        "workers": [
            {
                "description": one.info.description,
                "session_id": one.session_id.hex(),
                "uptime_seconds": one.age_milliseconds / 1000,
                "observers": [[its.table, its.observer] for its in one.info.activity.observers],
            }
            for one in overview.library_workers()
        ],
        "row_store": overview.row_store or None,
        **_sums(overview),
        "problems": overview.problems(),
    }


def _sums(overview: Overview) -> dict[str, float | None]:
    """None is what could not be fetched: 0 would be taken for the truth."""
    missing = overview.missing
    tablets = {
        "tablets": len(overview.tablets),
        "tablets_served": sum(one.serving for one in overview.tablets),
        "bytes": int(overview.sum("bytes")),
        "locks": int(overview.sum("locks")),
        "notifications": int(overview.sum("notifications")),
        "mutations_per_second": overview.sum("mutations_per_second"),
        "reads_per_second": overview.sum("reads_per_second"),
    }
    # They are only counted if it is known that their tablets are served.
    uncounted = missing & {"tables", "tablets", "dead letters"}
    return {
        "tables": None if "tables" in missing else len(overview.shown_tables),
        **(dict.fromkeys(tablets) if "tablets" in missing else tablets),
        "sessions": None if "sessions" in missing else len(overview.sessions),
        "dead_letters": None if uncounted else sum(overview.dead_letters.values()),
    }


def _server_as_data(overview: Overview, server: Server) -> dict[str, object]:
    live = overview.is_live
    refused = {one.address: one.writes_refused.message or None for one in overview.servers}
    return {
        "kind": _kind(server),
        "server_id": server.server_id,
        "address": server.address,
        "metrics_address": server.metrics_address,
        "version": server.version,
        "role": overview.roles.get(server.server_id),
        "uptime_seconds": server.uptime_milliseconds / 1000 if live else None,
        "silence_seconds": _silence(server) if live else None,
        "writes_refused": refused.get(server.address),
    }


def _as_text(overview: Overview) -> Group:
    cluster = overview.cluster
    serving = {one.address: one for one in overview.servers}
    screen = Screen(
        "service",
        "address",
        "version",
        "role",
        "uptime",
        "last report",
        "tablets, or observers",
        box=None,
    )
    for server in cluster.servers:
        tablets = serving.get(server.address)
        role = overview.roles.get(server.server_id)
        screen.add_row(
            _kind(server),
            plain(server.address),
            plain(server.version),
            Text(role or "", style="red" if role is ServerRole.NO_ANSWER else ""),
            *(_times(server) if overview.is_live else ("?", "?")),
            plain(_tablets_of(tablets)) if tablets else "",
        )
    for worker in overview.library_workers():
        screen.add_row(
            "worker (library)",
            plain(worker.info.description or "(no description)"),
            "",
            "",
            str(timedelta(seconds=worker.age_milliseconds // 1000)),
            "",
            plain(", ".join(one.observer for one in worker.info.activity.observers)),
        )
    title = f"cluster {cluster.cluster_id}, version {cluster.version}, format {cluster.format}"
    problems = [Text.assemble(("! ", "red"), plain(one)) for one in overview.problems()]
    return Group(plain(title), screen, plain(_summary(overview)), *problems)


def _summary(overview: Overview) -> str:
    missing = overview.missing
    tables = "tables: ?" if "tables" in missing else counted(len(overview.shown_tables), "table")
    found = len(overview.sessions)
    sessions = "sessions: ?" if "sessions" in missing else counted(found, "session")
    if overview.row_store:
        return f"cells in {overview.row_store}, {tables}, {sessions}"
    return f"{tables}, {_tablets(overview)}, {sessions}"


def _tablets(overview: Overview) -> str:
    if "tablets" in overview.missing:
        return "tablets: ?"
    served = sum(one.serving for one in overview.tablets)
    return (
        f"{served} of {len(overview.tablets)} tablets served, "
        f"{overview.sum('bytes') / (1 << 20):,.1f} MiB, "
        f"{overview.sum('mutations_per_second'):,.0f} writes/s, "
        f"{overview.sum('reads_per_second'):,.0f} reads/s, "
        f"{counted(overview.sum('locks'), 'lock')}, "
        f"{counted(overview.sum('notifications'), 'notification')}"
    )


def _kind(server: Server) -> str:
    return NAMES.get(server.kind, str(server.kind))


def _silence(server: Server) -> float:
    return server.silence_milliseconds / 1000


def _times(server: Server) -> tuple[str, Text]:
    return (
        str(timedelta(seconds=server.uptime_milliseconds // 1000)),
        Text(
            f"{_silence(server):.1f} s ago",
            style="red" if is_silent(server) else "",
        ),
    )


def _tablets_of(server: TabletServerInfo) -> str:
    found = remarks(server)
    return f"{server.tablets}, {found}" if found else str(server.tablets)
