"""The pipeline as observers, which keep the result of `definition.py` up to date.

    percolator worker --observers examples.webindex.observers:observers

    documents.body --parse--> pages, groups (--update_group--> groups)* --> serving
                                        --update_links--> links --> inlinks

- `parse` runs when a document is written or deleted. It sends news to the document's groups and, as
  long as these are small, does everything that follows; see `clustering.py`. It places the links.
- `update_group` runs when a group is notified: it has messages, or must learn its canonical URL.
- `update_links` runs when a page is notified: it must learn its canonical URL, or has more links to
  place or to move than fit into one transaction; see `linking.py`.

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
from examples.webindex.parsed import Parsed, StoredPage, stored_pages
from percolator import aio, observes

AT_ONCE = 32
"""Documents that one worker parses at a time: enough to keep it busy. Those of a burst have groups
and links in common, so that with 128 at a time, a quarter of all runs lost to a neighbour."""


@observes(tables.body, concurrency=AT_ONCE)
async def parse(tx: aio.Transaction, url: str) -> None:
    """Runs when a document is written or deleted."""
    if len(url.encode()) > tables.URL_BYTES_MAX:
        raise ValueError(f"the URL has more than {tables.URL_BYTES_MAX} bytes: {url[:80]}…")
    (body, crawled), found = await asyncio.gather(
        tx.get_many([(url, tables.body), (url, tables.crawled)]), stored_pages(tx, [url])
    )
    stored = found[url]
    before, cause = stored.parsed, crawled or int(await tx.timestamp())
    now = None if body is None else Parsed.of(documents.parse(Document(url, body)), cause)
    if now is not None:
        tx.set(url, tables.parsed, now.encode())
    elif before is not None:
        tx.delete(url, tables.parsed)
    groups = Groups(tx)
    if before is not None and (now is None or now.keys[0] != before.keys[0]):
        groups.tell(Group(0, before.keys[0]), Child(url), Member((), 0, cause))
    if now is not None and (before is None or now.keys != before.keys):
        groups.tell(Group(0, now.keys[0]), Child(url), Member(now.keys, 1, cause))
    groups.visited.add(url)
    await _finish(tx, groups, {url: stored._replace(parsed=now)})
    await place_links(tx, url, stored, now)


@observes(tables.state, weak=True)
async def update_group(tx: aio.Transaction, row: GroupRow) -> None:
    """Runs when a group is notified."""
    groups = Groups(tx)
    groups.look_at(Group(row[0], row[1]))
    await _finish(tx, groups, {})


async def _finish(tx: aio.Transaction, groups: Groups, known: dict[str, StoredPage]) -> None:
    """Handles all news of groups, and updates what is served of them."""
    await groups.handle_news()
    visited, unserved = sorted(groups.visited), sorted(groups.unserved)
    # Independent reads run concurrently to save round trips, here and elsewhere.
    found, rows = await asyncio.gather(
        stored_pages(tx, groups.visited.union(unserved).difference(known)),
        tx.get_many(tables.serving, unserved),
    )
    found |= known
    await asyncio.gather(
        *(follow(tx, url, found[url], groups) for url in visited),
        *(export(tx, row, found[row.key].parsed, groups) for row in rows),
    )


@observes(tables.canonical, weak=True)
async def update_links(tx: aio.Transaction, url: str) -> None:
    """Runs when a page is notified."""
    stored = (await stored_pages(tx, [url]))[url]
    groups = Groups(tx)
    if not await follow(tx, url, stored, groups):
        await move_links(tx, url, stored, groups)
    if stored.linked is not None:
        await place_links(tx, url, stored, stored.parsed)


observers = [parse, update_group, update_links]
