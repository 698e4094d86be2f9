"""Where rows are, and moving them by hand: `percolator tablets` and `percolator servers`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table as Screen
from rich.text import Text

from percolator.cli.connection import (
    Connection,
    all_tablets,
    answer_of_leader,
    ask_master,
    connection,
    plain,
)
from percolator.cli.options import TableOption, bytes_of, not_empty
from percolator.cli.values import UNKNOWN, Forms, NamedTable, named_tables
from percolator.v1 import errors_pb2
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork

Tables = dict[int, NamedTable]

app = typer.Typer(help="List tablets; split and move them.")

TabletId = Annotated[
    int, typer.Argument(help="The tablet's id.", min=1, max=(1 << 63) - 1, show_default=False)
]


@app.callback(invoke_without_command=True)
def tablets(
    context: typer.Context,
    table: TableOption = "",
    hot: Annotated[bool, typer.Option("--hot", help="Busiest first.")] = False,
) -> None:
    """List tablets, or change one with a subcommand."""
    if context.invoked_subcommand is not None:
        return
    here = connection(context)
    found, tables = here.run(lambda network: _found(here, network, table))
    if hot:
        found.sort(
            key=lambda one: one.statistics.mutations_per_second + one.statistics.reads_per_second,
            reverse=True,
        )
    screen = Screen(
        "tablet", "table", "rows from", "to", "server", "epoch", "MiB", "writes/s", "reads/s", "",
        box=None,
    )  # fmt: skip
    for one in found:
        location, figures, forms = one.location, one.statistics, _forms(one.location, tables)
        screen.add_row(
            str(location.tablet_id),
            plain(one.table),
            plain(forms.row_text(location.range.start)) if location.range.start else Text(""),
            plain(forms.row_text(location.range.end)) if location.range.end else Text("end"),
            plain(location.address or "-"),
            str(location.epoch),
            f"{figures.bytes / (1 << 20):.1f}",
            f"{figures.mutations_per_second:.0f}",
            f"{figures.reads_per_second:.0f}",
            Text("") if one.serving else Text.assemble(("not served ", "red"), _reason(one)),
        )
    here.show([_as_data(one, tables) for one in found], screen if found else "no tablets")


@app.command()
def split(
    context: typer.Context,
    tablet: TabletId,
    row: Annotated[
        str | None,
        typer.Option(
            help="First row of the upper half, as the table's keys are written, or hex:00ff "
            "[default: half of its size]."
        ),
    ] = None,
) -> None:
    """Split a tablet in two."""
    here = connection(context)
    bytes_of("--row", row)

    async def work(network: GrpcNetwork) -> tuple[Tables, pb.SplitTabletResponse]:
        found, tables = await _found(here, network, "")
        request = pb.SplitTabletRequest(tablet_id=tablet)
        if row is not None:
            its = [one.location for one in found if one.location.tablet_id == tablet]
            # If there is none, the master says so.
            forms = _forms(its[0], tables) if its else UNKNOWN
            request.row = forms.row("--row", row)
        method = methods.SPLIT_TABLET
        return tables, await answer_of_leader(here, network, method, request)

    tables, answer = here.run(work)
    at = _forms(answer.upper, tables).row_text(answer.upper.range.start)
    here.show(
        {"lower": _location(answer.lower, tables), "upper": _location(answer.upper, tables)},
        plain(
            f"tablet {tablet} split into {answer.lower.tablet_id} and {answer.upper.tablet_id} "
            f"at {at}"
        ),
    )


@app.command()
def move(
    context: typer.Context,
    tablet: TabletId,
    to: Annotated[
        str,
        typer.Option(
            help="Address of a tablet server [default: the one with the fewest tablets].",
            callback=not_empty,
        ),
    ] = "",
) -> None:
    """Move a tablet to another server."""
    here = connection(context)
    request = pb.MoveTabletRequest(tablet_id=tablet, server=to)
    listed = ask_master(here, methods.LIST_TABLES, pb.ListTablesRequest())
    location = ask_master(here, methods.MOVE_TABLET, request).location
    here.show(
        _location(location, named_tables(listed.tables)),
        plain(f"tablet {tablet} is at {location.address}, epoch {location.epoch}"),
    )


async def _found(
    here: Connection, network: GrpcNetwork, table: str
) -> tuple[list[pb.TabletInfo], Tables]:
    """The tablets of one table, or of all, and all tables."""
    found = await all_tablets(here, network, table)
    request = pb.ListTablesRequest()
    listed = await answer_of_leader(here, network, methods.LIST_TABLES, request)
    return found, named_tables(listed.tables)


def _forms(location: errors_pb2.TabletLocation, tables: Tables) -> Forms:
    """The forms of the tablet's rows."""
    table = tables.get(location.table_id)
    return table.forms if table is not None else UNKNOWN  # it was dropped meanwhile


def _reason(one: pb.TabletInfo) -> Text:
    return plain(one.error.message) if one.HasField("error") else Text("yet")


def _location(location: errors_pb2.TabletLocation, tables: Tables) -> dict[str, object]:
    forms, rows = _forms(location, tables), location.range
    return {
        "tablet_id": location.tablet_id,
        "table_id": location.table_id,
        "epoch": location.epoch,
        "start": forms.row_data(rows.start) if rows.start else "",
        "end": forms.row_data(rows.end) if rows.end else None,
        "address": location.address or None,
    }


def _as_data(one: pb.TabletInfo, tables: Tables) -> dict[str, object]:
    return {
        **_location(one.location, tables),
        "table": one.table,
        "serving": one.serving,
        "error": one.error.message if one.HasField("error") else None,
        "bytes": one.statistics.bytes,
        "cells": one.statistics.cells,
        "locks": one.statistics.locks,
        "notifications": one.statistics.notifications,
        "mutations_per_second": one.statistics.mutations_per_second,
        "reads_per_second": one.statistics.reads_per_second,
    }


servers_app = typer.Typer(help="List tablet servers; drain one.")


@servers_app.callback(invoke_without_command=True)
def servers(context: typer.Context) -> None:
    """List tablet servers, or change one with a subcommand."""
    if context.invoked_subcommand is not None:
        return
    here = connection(context)
    found = ask_master(here, methods.LIST_SERVERS, pb.ListServersRequest()).servers
    screen = Screen("address", "tablets", "served", "last answer", "", box=None)
    for one in found:
        screen.add_row(
            plain(one.address),
            str(one.tablets),
            str(one.serving),
            f"{one.silence_milliseconds / 1000:.1f} s ago",
            plain(remarks(one)),
        )
    data = [
        {
            "address": one.address,
            "server_id": one.server_id,
            "tablets": one.tablets,
            "serving": one.serving,
            "draining": one.draining,
            "silence_seconds": one.silence_milliseconds / 1000,
            "writes_refused": one.writes_refused.message or None,
        }
        for one in found
    ]
    here.show(data, screen if found else "no tablet servers")


@servers_app.command()
def drain(
    context: typer.Context,
    server: Annotated[str, typer.Argument(help="The server's address.", show_default=False)],
    undo: Annotated[bool, typer.Option("--undo", help="Give it tablets again.")] = False,
) -> None:
    """Move all tablets away from a server, and assign it no others."""
    here = connection(context)
    ask_master(here, methods.DRAIN_SERVER, pb.DrainServerRequest(server=server, undo=undo))
    what = "takes tablets again" if undo else "no longer has any tablets"
    here.show({"server": server, "draining": not undo}, plain(f"{server} {what}"))


def remarks(server: pb.TabletServerInfo) -> str:
    """The unusual about a tablet server, in a few words."""
    found = ["draining"] * server.draining
    found += ["takes no writes"] * server.HasField("writes_refused")
    return ", ".join(found)
