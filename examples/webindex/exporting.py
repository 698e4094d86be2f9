"""What is shown of a page: the serving table.

A URL is shown if it represents the root of its own keys' groups. That is looked up afresh whenever
something is new about a root that it represents, or has represented, and the row is written, or
if it was right, locked: whoever looks later decides, since it has seen more.
"""

from __future__ import annotations

import asyncio

from examples.webindex import tables
from examples.webindex.clustering import Groups
from examples.webindex.group import ROOT, Group
from examples.webindex.parsed import parsed_page
from examples.webindex.tables import serving
from percolator import aio


async def export(tx: aio.Transaction, url: str, groups: Groups) -> None:
    """Brings its row up to date."""
    (row,), page = await asyncio.gather(tx.get_many(serving, [url]), parsed_page(tx, url))
    if page is not None:
        root = await groups.state(Group(ROOT, page.keys[ROOT]))
        if root.best is not None and root.best.url == url:
            if (row.get(tables.title), row.get(tables.size)) == (page.title, root.documents):
                await tx.lock(url, tables.size)
                return
            await tx.set(url, tables.title, page.title)
            await tx.set(url, tables.size, root.documents)
            await tx.set(url, tables.cause, root.cause)
            return
    if not row:
        await tx.lock(url, tables.size)
        return
    for column in (tables.title, tables.size, tables.cause):
        await tx.delete(url, column)
