"""Writes the serving table.

A URL is served if it represents the root of the groups of its own keys. That is looked up again
whenever there is news of a root that it represents or has represented. Then the row is written, or
locked if it was right already, so that of two runs the later decides, which has seen more.
"""

from __future__ import annotations

from examples.webindex import tables
from examples.webindex.clustering import Groups
from examples.webindex.group import ROOT, Group
from examples.webindex.parsed import Parsed
from percolator import Row, aio


async def export(tx: aio.Transaction, row: Row[str], page: Parsed | None, groups: Groups) -> None:
    """Brings this row up to date."""
    url = row.key
    if page is not None:
        root = await groups.state(Group(ROOT, page.keys[ROOT]))
        if root.best is not None and root.best.url == url:
            if (row.get(tables.title), row.get(tables.size)) == (page.title, root.documents):
                tx.lock(url, tables.size)
                return
            if row.get(tables.title) != page.title:
                tx.set(url, tables.title, page.title)
            tx.set(url, tables.size, root.documents)
            tx.set(url, tables.cause, root.cause)
            return
    if not row:
        tx.lock(url, tables.size)
        return
    for column in (tables.title, tables.size, tables.cause):
        tx.delete(url, column)
