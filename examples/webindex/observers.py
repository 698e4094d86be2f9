"""The pipeline as observers, which keep the result of `definition.py` up to date.

    percolator worker --observers examples.webindex.observers:observers

    documents.body --parse--> pages, groups (--tend--> groups)* --> serving
                                        --settle--> links --> inlinks

- `parse` runs when a document is written or deleted. It sends news to the document's groups and, as
  long as these are small, does everything that follows; see `clustering.py`.
- `tend` runs when a group is notified: it has messages, or must learn its canonical URL.
- `settle` runs when a page is notified: it must learn its canonical URL, has links to place, or has
  links to it to move; see `linking.py`.

The last two are weak: they look at the current state, and do a bounded part of the remaining work.
The work for a changed document depends only on its own links, and on the pages whose canonical URL
it changes. Whatever the order of the runs, and however many workers there are, the serving tables
are those of `definition.served` once no work is left.
"""

from __future__ import annotations

import asyncio

from examples.webindex import documents, tables
from examples.webindex.clustering import Groups
from examples.webindex.documents import Document
from examples.webindex.exporting import export
from examples.webindex.group import Child, Group, GroupRow, Member
from examples.webindex.linking import follow, move_links, place_links
from examples.webindex.parsed import Parsed, parsed_page
from percolator import aio, observes


@observes(tables.body)
async def parse(tx: aio.Transaction, url: str) -> None:
    """Runs when a document is written or deleted."""
    if len(url.encode()) > tables.URL_BYTES_MAX:
        raise ValueError(f"the URL has more than {tables.URL_BYTES_MAX} bytes: {url[:80]}…")
    before, (row,) = await asyncio.gather(
        parsed_page(tx, url),
        tx.get_many(tables.documents, [url], [tables.body, tables.crawled]),
    )
    body, cause = row.get(tables.body), row.get(tables.crawled) or int(await tx.timestamp())
    now = None if body is None else Parsed.of(documents.parse(Document(url, body)), cause)
    if now is not None:
        await tx.set(url, tables.parsed, now.encode())
    elif before is not None:
        await tx.delete(url, tables.parsed)
    groups = Groups(tx)
    if before is not None and (now is None or now.keys[0] != before.keys[0]):
        groups.tell(Group(0, before.keys[0]), Child(url), Member((), 0, cause))
    if now is not None and (before is None or now.keys != before.keys):
        groups.tell(Group(0, now.keys[0]), Child(url), Member(now.keys, 1, cause))
    groups.visited.add(url)
    # Independent reads run concurrently to save round trips, here and elsewhere.
    await asyncio.gather(_finish(tx, groups), place_links(tx, url, now, may_show=False))


@observes(tables.state, weak=True)
async def tend(tx: aio.Transaction, row: GroupRow) -> None:
    """Runs when a group is notified."""
    groups = Groups(tx)
    groups.look_at(Group(row[0], row[1]))
    await _finish(tx, groups)


async def _finish(tx: aio.Transaction, groups: Groups) -> None:
    """Handles all news of groups, and updates what is served of them."""
    await groups.settle()

    async def visit(url: str) -> None:
        await follow(tx, url, await parsed_page(tx, url), groups)

    await asyncio.gather(*(visit(url) for url in sorted(groups.visited)))
    await asyncio.gather(*(export(tx, url, groups) for url in sorted(groups.unserved)))


@observes(tables.canonical, weak=True)
async def settle(tx: aio.Transaction, url: str) -> None:
    """Runs when a page is notified."""
    page = await parsed_page(tx, url)
    groups = Groups(tx)
    if not await follow(tx, url, page, groups):
        await move_links(tx, url, groups, page)
    await place_links(tx, url, page, may_show=True)


observers = [parse, tend, settle]
