"""Times to live of columns as people type them: `--ttl token=30d`, or `--ttl token=` for none."""

from __future__ import annotations

from math import ceil
from typing import Annotated

import typer

from percolator.cli.durations import duration_seconds
from percolator.errors import InvalidArgument
from percolator.row_text import row_bytes
from percolator.v1.tabletserver_pb2 import ColumnTtl

Ttls = Annotated[
    list[str] | None,
    typer.Option(
        "--ttl",
        metavar="COLUMN=TIME",
        help="How long after its commit a value of a column is visible: 90s, 15m, 2h, 30d; "
        "repeatable.",
        show_default=False,
    ),
]


def column_ttls(given: list[str] | None, *, may_be_empty: bool = False) -> list[ColumnTtl]:
    """Raises `InvalidArgument`."""
    found = []
    for text in given or ():
        column, equals, ttl = text.rpartition("=")
        if not column or not equals:
            raise InvalidArgument("--ttl", f"expected COLUMN=TIME, found {text[:80]!r}")
        milliseconds = 0
        if ttl or not may_be_empty:
            milliseconds = ceil(1000 * duration_seconds("--ttl", ttl))
        found.append(ColumnTtl(column=row_bytes("--ttl", column), ttl_milliseconds=milliseconds))
    return found
