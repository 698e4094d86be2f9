"""`percolator gc status`: how far back history is readable, what holds it back, and its size."""

from __future__ import annotations

import typer
from rich.console import Group, RenderableType
from rich.table import Column, Table

from percolator.cli.connection import connection, plain
from percolator.timestamps import Timestamp, in_json
from percolator.v1.master_pb2 import DescribeCollectionResponse
from percolator.wire.status import from_detail

app = typer.Typer(no_args_is_help=True, help="Show how much history is kept.")


@app.callback()
def gc() -> None:
    """Show how much history is kept."""


@app.command("status")
def status(context: typer.Context) -> None:
    """Show the safe point of each table, what holds it back, and how much history there is."""
    here = connection(context)
    described = here.run_with_database(
        lambda database: database.internal.engine.catalog.describe_collection(
            database.internal.engine.now() + here.timeout_seconds
        )
    )
    here.show(_as_data(described), _as_text(described))


def moment(timestamp: int) -> str | None:
    """The time of a timestamp, for programs; None for timestamp 0."""
    return Timestamp(timestamp).time_text() if timestamp else None


def _as_data(described: DescribeCollectionResponse) -> dict[str, object]:
    return {
        "tables": [
            {
                "table": table.table,
                "retention_seconds": table.retention_milliseconds / 1000,
                "safe_point": in_json(table.safe_point),
                "safe_point_time": moment(table.safe_point),
                "collected_below": in_json(table.collected_below),
                "history_bytes": table.history_bytes,
                "cells_collected": table.cells_collected,
                "bytes_collected": table.bytes_collected,
            }
            for table in described.tables
        ],
        "transactions_safe_point": in_json(described.transactions_safe_point),
        "held_by": described.held_by or None,
        "held_by_session": described.held_by_session_id.hex() or None,
        "held_at": in_json(described.held_at) if described.held_at else None,
        "held_at_time": moment(described.held_at),
        "held_seconds": described.held_milliseconds / 1000,
        "error": str(from_detail(described.error)) if described.HasField("error") else None,
        "age_seconds": described.age_milliseconds / 1000
        if described.HasField("age_milliseconds")
        else None,
    }


def _as_text(described: DescribeCollectionResponse) -> Group:
    screen = Table(
        Column("table"),
        Column("keeps", justify="right"),
        Column("readable since"),
        Column("history", justify="right"),
        Column("collected", justify="right"),
        box=None,
    )
    for table in described.tables:
        since = Timestamp(table.safe_point).describe() if table.safe_point else "its creation"
        screen.add_row(
            plain(table.table),
            f"{table.retention_milliseconds / 1000:,.0f} s",
            since,
            f"{table.history_bytes:,} bytes",
            f"{table.cells_collected:,} cells",
        )
    lines: list[RenderableType] = [screen]
    if described.HasField("age_milliseconds"):
        lines.append(f"the last round ended {described.age_milliseconds / 1000:,.1f} s ago")
    else:
        lines.append("no round has completed since this master began to lead")
    if described.held_by:
        at = Timestamp(described.held_at).describe()
        # Only admins are told the session: who knows it can end it.
        told = described.held_by_session_id.hex()
        who = f"{described.held_by} (session {told})" if told else described.held_by
        lines.append(plain(f"held back by {who}, which needs history since {at}"))
    if described.HasField("error"):
        lines.append(plain(f"the last round failed: {from_detail(described.error)}"))
    return Group(*lines)
