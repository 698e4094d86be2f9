"""Reads the serving tables, for comparison with `definition.served`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from examples.webindex import tables
from examples.webindex.definition import Inlink, Served
from percolator import Database, Row, aio


def served_table(db: Database) -> dict[str, Served]:
    """Everything that is served, by canonical URL, at one snapshot.

    Raises `ValueError` if there are inlinks of a page that is not served.
    """
    with db.snapshot() as snapshot:
        return _put_together(snapshot.scan(tables.serving), snapshot.scan(tables.inlinks))


async def served_table_async(db: aio.Database) -> dict[str, Served]:
    """Like `served_table`, for asyncio."""
    async with db.snapshot() as snapshot:
        serving = [row async for row in snapshot.scan(tables.serving)]
        inlinks = [row async for row in snapshot.scan(tables.inlinks)]
    return _put_together(serving, inlinks)


def _put_together(serving: Iterable[Row[str]], inlinks: Iterable[Row[Any]]) -> dict[str, Served]:
    by_url: dict[str, set[Inlink]] = {}
    for row in inlinks:
        by_url.setdefault(row.key[0], set()).add(Inlink(row.key[1], row[tables.anchor]))
    found = {
        row.key: Served(row[tables.title], row[tables.size], tuple(sorted(by_url.pop(row.key, ()))))
        for row in serving
    }
    if by_url:
        raise ValueError(f"inlinks of pages that are not served: {sorted(by_url)[:3]}")
    return found
