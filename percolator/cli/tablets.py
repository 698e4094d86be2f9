"""`percolator tablets`: where rows are, how they are used, and moving them by hand."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table as Screen
from rich.text import Text

from percolator.cli.connection import connection, fail, plain
from percolator.cli.given import TableOption, not_empty
from percolator.cli.masters import all_tablets, ask_master
from percolator.errors import InvalidArgument
from percolator.row_text import row_bytes, row_text
from percolator.v1 import errors_pb2
from percolator.v1 import master_pb2 as wire
from percolator.wire import methods

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
    found = here.run(lambda network: all_tablets(here, network, table))
    if hot:
        found.sort(key=_rate, reverse=True)
    screen = Screen(
        "tablet", "table", "rows from", "to", "server", "epoch", "MiB", "writes/s", "reads/s", "",
        box=None,
    )  # fmt: skip
    for one in found:
        location, figures = one.location, one.statistics
        screen.add_row(
            str(location.tablet_id),
            plain(one.table),
            plain(row_text(location.range.start)),
            plain(row_text(location.range.end)) if location.range.end else Text("end"),
            plain(location.address or "-"),
            str(location.epoch),
            f"{figures.bytes / (1 << 20):.1f}",
            f"{figures.mutations_per_second:.0f}",
            f"{figures.reads_per_second:.0f}",
            Text("") if one.serving else Text.assemble(("not served ", "red"), _reason(one)),
        )
    here.show([_as_data(one) for one in found], screen if found else "no tablets")


@app.command()
def split(
    context: typer.Context,
    tablet: TabletId,
    row: Annotated[
        str | None, typer.Option(help="First row of the upper half [default: half of its size].")
    ] = None,
) -> None:
    """Split a tablet in two."""
    here = connection(context)
    request = wire.SplitTabletRequest(tablet_id=tablet)
    if row is not None:
        try:
            request.row = row_bytes("--row", row)
        except InvalidArgument as error:
            fail(error)
    answer = ask_master(here, methods.SPLIT_TABLET, request)
    here.show(
        {"lower": _location(answer.lower), "upper": _location(answer.upper)},
        plain(
            f"tablet {tablet} split into {answer.lower.tablet_id} and {answer.upper.tablet_id} "
            f"at {row_text(answer.upper.range.start)}"
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
    request = wire.MoveTabletRequest(tablet_id=tablet, server=to)
    location = ask_master(here, methods.MOVE_TABLET, request).location
    here.show(
        _location(location),
        plain(f"tablet {tablet} is at {location.address}, epoch {location.epoch}"),
    )


def _rate(one: wire.TabletInfo) -> float:
    return one.statistics.mutations_per_second + one.statistics.reads_per_second


def _reason(one: wire.TabletInfo) -> Text:
    return plain(one.error.message) if one.HasField("error") else Text("yet")


def _location(location: errors_pb2.TabletLocation) -> dict[str, object]:
    return {
        "tablet_id": location.tablet_id,
        "table_id": location.table_id,
        "epoch": location.epoch,
        "start": row_text(location.range.start),
        "end": row_text(location.range.end) if location.range.end else None,
        "address": location.address or None,
    }


def _as_data(one: wire.TabletInfo) -> dict[str, object]:
    return {
        **_location(one.location),
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
