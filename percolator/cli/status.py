"""`percolator status`: the cluster on one screen."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from percolator.cli.connection import connection, plain
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind

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


def status(context: typer.Context) -> None:
    """Show the cluster and its servers."""
    here = connection(context)
    cluster = here.run(here.describe)
    here.show(
        {
            "cluster_id": cluster.cluster_id,
            "version": cluster.version,
            "format": cluster.format,
            "servers": [_server_as_data(server) for server in cluster.servers],
            "missing": list(_missing(cluster)),
        },
        _as_text(cluster),
    )


def _server_as_data(server: Server) -> dict[str, object]:
    return {
        "kind": NAMES.get(server.kind, str(server.kind)),
        "server_id": server.server_id,
        "address": server.address,
        "metrics_address": server.metrics_address,
        "version": server.version,
        "uptime_seconds": server.uptime_milliseconds / 1000,
        "silence_seconds": server.silence_milliseconds / 1000,
    }


def _missing(cluster: DescribeResponse) -> Iterable[str]:
    present = {server.kind for server in cluster.servers}
    return (NAMES[kind] for kind in NEEDED if kind not in present)


def _as_text(cluster: DescribeResponse) -> Group:
    table = Table("service", "address", "version", "up for", "last heard of", "metrics", box=None)
    for server in cluster.servers:
        silent = server.silence_milliseconds > SILENCE_MILLISECONDS_MAX
        table.add_row(
            NAMES.get(server.kind, str(server.kind)),
            plain(server.address),
            plain(server.version),
            str(timedelta(seconds=server.uptime_milliseconds // 1000)),
            Text(f"{server.silence_milliseconds / 1000:.1f} s ago", style="red" if silent else ""),
            plain(server.metrics_address),
        )
    title = f"cluster {cluster.cluster_id}, version {cluster.version}, format {cluster.format}"
    missing = [Text(f"no {name} is registered", style="red") for name in _missing(cluster)]
    return Group(plain(title), table, *missing)
