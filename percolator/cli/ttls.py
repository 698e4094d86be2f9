"""Times to live of columns as people type them: `--ttl token=30d`, or `--ttl token=` for none."""

from __future__ import annotations

from math import ceil
from typing import Annotated

import typer

from percolator.cli.durations import duration_seconds
from percolator.errors import InvalidArgument
from percolator.row_text import row_bytes
from percolator.v1.tabletserver_pb2 import ColumnTtl
from percolator.wire.table_options import TTL_MILLISECONDS_MAX

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
    found: dict[bytes, ColumnTtl] = {}
    for text in given or ():
        column, equals, ttl = text.rpartition("=")
        if not column or not equals:
            raise InvalidArgument("--ttl", f"expected COLUMN=TIME, found {text[:80]!r}")
        milliseconds = 0
        if ttl or not may_be_empty:
            milliseconds = ceil(1000 * duration_seconds("--ttl", ttl))
        if milliseconds > TTL_MILLISECONDS_MAX:
            raise InvalidArgument("--ttl", f"expected at most 100 years, found {ttl!r}")
        name = row_bytes("--ttl", column)
        if name in found:
            raise InvalidArgument("--ttl", f"column {column!r} is named twice")
        found[name] = ColumnTtl(column=name, ttl_milliseconds=milliseconds)
    return list(found.values())
