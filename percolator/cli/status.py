"""`percolator status`: the cluster on one screen."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from percolator.cli.connection import connection, fail, plain
from percolator.cli.overview import NAMES, Overview, is_silent, look
from percolator.cli.roles import ServerRole
from percolator.cli.servers import remarks
from percolator.cli.watching import keep_showing
from percolator.counts import counted
from percolator.errors import UsageError
from percolator.v1.cluster_pb2 import Server
from percolator.v1.master_pb2 import TabletServerInfo

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
        fail(UsageError("--check reports one moment: it cannot be combined with --watch"))
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
        "tables": None if "tables" in missing else len(overview.tables),
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
    screen = Table(
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
    tables = "tables: ?" if "tables" in missing else counted(len(overview.tables), "table")
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
