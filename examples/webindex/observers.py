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
from examples.webindex.group import ROOT, Child, Group, GroupRow, Member
from examples.webindex.linking import follow, move_links, place_links
from examples.webindex.parsed import Parsed, StoredPage, stored_pages
from percolator import aio, observes

PARSED_AT_ONCE = 32
"""Documents that one run parses: it reads and writes for all of them at once. Those of a burst have
groups and links in common, so of two such runs at a time, one would often lose to the other."""
UPDATED_AT_ONCE = 16
FOLLOWED_AT_ONCE = 60
"""Pages whose links are scanned at the same time. A connection takes 63 calls at a time in frames;
further ones go over gRPC, which costs more."""


@observes(tables.body, batch=PARSED_AT_ONCE, concurrency=1)
async def parse(tx: aio.Transaction, urls: list[str]) -> None:
    """Runs when documents are written or deleted."""
    for url in urls:
        if len(url.encode()) > tables.URL_BYTES_MAX:
            raise ValueError(f"the URL has more than {tables.URL_BYTES_MAX} bytes: {url[:80]}…")
    rows, stored = await asyncio.gather(
        tx.get_many(tables.documents, urls, [tables.body, tables.crawled]), stored_pages(tx, urls)
    )
    groups, known = Groups(tx, len(urls)), dict(stored)
    for row in rows:
        url, body, before = row.key, row.get(tables.body), stored[row.key].parsed
        cause = row.get(tables.crawled) or int(await tx.timestamp())
        now = None if body is None else Parsed.of(documents.parse(Document(url, body)), cause)
        if now is not None:
            tx.set(url, tables.parsed, now.encode())
        elif before is not None:
            tx.delete(url, tables.parsed)
        if before is not None and (now is None or now.keys[0] != before.keys[0]):
            groups.tell(Group(0, before.keys[0]), Child(url), Member((), 0, cause))
        if now is not None and (before is None or now.keys != before.keys):
            groups.tell(Group(0, now.keys[0]), Child(url), Member(now.keys, 1, cause))
        groups.visited.add(url)
        known[url] = stored[url]._replace(parsed=now)
    await _finish(tx, groups, known)
    await asyncio.gather(*(place_links(tx, url, stored[url], known[url].parsed) for url in urls))


@observes(tables.state, weak=True, batch=UPDATED_AT_ONCE)
async def update_group(tx: aio.Transaction, rows: list[GroupRow]) -> None:
    """Runs when groups are notified."""
    groups = Groups(tx, len(rows))
    for row in rows:
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
    of_interest = [(url, 0) for url in visited] + [(url, ROOT) for url in unserved]
    pages = [(found[url].parsed, level) for url, level in of_interest]
    await groups.know(Group(level, page.keys[level]) for page, level in pages if page)
    for at in range(0, len(visited), FOLLOWED_AT_ONCE):
        some = visited[at : at + FOLLOWED_AT_ONCE]
        await asyncio.gather(*(follow(tx, url, found[url], groups) for url in some))
    await asyncio.gather(*(export(tx, row, found[row.key].parsed, groups) for row in rows))


@observes(tables.canonical, weak=True, batch=UPDATED_AT_ONCE)
async def update_links(tx: aio.Transaction, urls: list[str]) -> None:
    """Runs when pages are notified."""
    stored = await stored_pages(tx, urls)
    groups = Groups(tx, len(urls))

    async def update(url: str) -> None:
        if not await follow(tx, url, stored[url], groups):
            await move_links(tx, url, stored[url], groups)

    await asyncio.gather(*map(update, urls))
    unplaced = [(url, page) for url, page in stored.items() if page.linked is not None]
    await asyncio.gather(*(place_links(tx, url, page, page.parsed) for url, page in unplaced))


observers = [parse, update_group, update_links]
