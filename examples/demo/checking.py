"""Checks that the right pages are served, without trusting the cluster.

This process remembers what was written. The documents table must hold exactly these documents, and
the serving tables exactly what `examples/webindex/definition.py` computes from them, in plain
Python, in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from examples.webindex import tables
from examples.webindex.definition import Served, served
from examples.webindex.documents import Document
from examples.webindex.served import served_table_async
from percolator import aio

V = TypeVar("V")

DIFFERENCES_SHOWN = 3


class WentWrong(Exception):
    """Raised when the demo finds something wrong."""


@dataclass(frozen=True)
class Checked:
    """Counts of what was compared and found equal."""

    documents: int
    pages: Mapping[str, Served]
    """By canonical URL."""

    @property
    def inlinks(self) -> int:
        return sum(len(page.inlinks) for page in self.pages.values())


async def check(db: aio.Database, written: Mapping[str, str]) -> Checked:
    """Raises `WentWrong` with the differences. Call it when no work is in progress."""
    async with db.snapshot() as snapshot:
        found = snapshot.scan(tables.documents, columns=[tables.body])
        stored = {row.key: row[tables.body] async for row in found}
    require_equal("documents in the store", "written", stored, written)
    try:
        pages = await served_table_async(db)
    except ValueError as error:
        raise WentWrong(str(error)) from None
    right = served(Document(url, body) for url, body in written.items())
    require_equal("pages served", "computed from scratch", pages, right)
    return Checked(len(stored), pages)


def require_equal(what: str, expected: str, found: Mapping[str, V], right: Mapping[str, V]) -> None:
    """`expected` says where the right values come from."""
    wrong = sorted(url for url in found.keys() | right if found.get(url) != right.get(url))
    if not wrong:
        return
    lines = [f"{len(wrong):,} differ: {len(found):,} {what}, {len(right):,} {expected}"]
    for url in wrong[:DIFFERENCES_SHOWN]:
        lines += [
            f"  {url}",
            f"    {what}: {found.get(url, 'none')}",
            f"    {expected}: {right.get(url, 'none')}",
        ]
    raise WentWrong("\n".join(lines))
