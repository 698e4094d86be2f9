"""`percolator gc status`: how far back one can look, who holds it back, and what that costs."""

from __future__ import annotations

import typer
from rich.console import Group, RenderableType
from rich.table import Column, Table

from percolator.cli.connection import connection, plain
from percolator.timestamps import Timestamp
from percolator.v1.master_pb2 import DescribeCollectionResponse
from percolator.wire.status import from_detail

app = typer.Typer(no_args_is_help=True, help="History: how much of the past is kept.")


@app.callback()
def gc() -> None:
    """History: how much of the past is kept."""


@app.command("status")
def status(context: typer.Context) -> None:
    """Show the safe point of each table, who holds it back, and how much history there is."""
    here = connection(context)
    told = here.run_with_database(
        lambda database: database.engine.catalog.describe_collection(
            database.engine.now() + here.timeout_seconds
        )
    )
    here.show(_as_data(told), _as_text(told))


def moment(timestamp: int) -> str | None:
    """For programs, and None for none."""
    return Timestamp(timestamp).to_datetime().isoformat() if timestamp else None


def _as_data(told: DescribeCollectionResponse) -> dict[str, object]:
    return {
        "tables": [
            {
                "table": table.table,
                "retention_seconds": table.retention_milliseconds / 1000,
                "safe_point": table.safe_point,
                "safe_point_time": moment(table.safe_point),
                "collected_below": table.collected_below,
                "history_bytes": table.history_bytes,
                "cells_collected": table.cells_collected,
                "bytes_collected": table.bytes_collected,
            }
            for table in told.tables
        ],
        "transactions_safe_point": told.transactions_safe_point,
        "held_by": told.held_by or None,
        "held_by_session": told.held_by_session_id.hex() or None,
        "held_at": told.held_at or None,
        "held_at_time": moment(told.held_at),
        "error": str(from_detail(told.error)) if told.HasField("error") else None,
        "age_seconds": told.age_milliseconds / 1000 if told.HasField("age_milliseconds") else None,
    }


def _as_text(told: DescribeCollectionResponse) -> Group:
    screen = Table(
        Column("table"),
        Column("keeps", justify="right"),
        Column("readable since"),
        Column("history", justify="right"),
        Column("collected", justify="right"),
        box=None,
    )
    for table in told.tables:
        since = Timestamp(table.safe_point).describe() if table.safe_point else "its creation"
        screen.add_row(
            plain(table.table),
            f"{table.retention_milliseconds / 1000:,.0f} s",
            since,
            f"{table.history_bytes:,} bytes",
            f"{table.cells_collected:,} cells",
        )
    lines: list[RenderableType] = [screen]
    if told.HasField("age_milliseconds"):
        lines.append(f"the last round was done {told.age_milliseconds / 1000:,.1f} s ago")
    else:
        lines.append("no round has been done since this master leads")
    if told.held_by:
        at = Timestamp(told.held_at).describe()
        who = f"{told.held_by} (session {told.held_by_session_id.hex()})"
        lines.append(plain(f"held back by {who}, which needs history since {at}"))
    if told.HasField("error"):
        lines.append(plain(f"the last round failed: {from_detail(told.error)}"))
    return Group(*lines)
