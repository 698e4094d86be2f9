"""Bulk-loads a large repository: all tables, in the state in which observers would leave them.

    python -m examples.webindex.initial --documents 1000000

This is many times faster than crawling into empty tables. The content follows from `definition.py`,
and a test compares it with what observers leave, cell by cell. So the observers have nothing to do
for what is loaded: they are registered without a backfill, unless they are registered already.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import typer

from examples.webindex import tables
from examples.webindex.clustering import TOGETHER_MAX
from examples.webindex.crawl import Crawl
from examples.webindex.definition import canonical_urls
from examples.webindex.documents import KEYS, Document, Page, parse
from examples.webindex.group import ROOT, Child, Group, Member, State
from examples.webindex.observers import observers
from examples.webindex.parsed import Parsed
from examples.webindex.tables import GROUP, MEMBER, digest
from percolator import Column, PercolatorError, Table, aio
from percolator.aio.bulk_load import BulkLoad, LoadedCell, LoadPlan

CELLS_AT_ONCE = 8_192
PROGRESS_CELLS = 100 * CELLS_AT_ONCE


class _Member(NamedTuple):
    """A member of a group. In sorted order, as in the group's rows, the best one comes first."""

    group: str
    """The key of the group."""
    length: int
    """The length of the URL."""
    child: Child
    documents: int
    """The number of documents below it."""


class Repository:
    """The cells of all tables for the given documents, kept in memory."""

    def __init__(self, documents: Iterable[Document], crawled: int) -> None:
        """`crawled` is the timestamp of all documents, and the cause of everything else."""
        self._crawled = crawled
        self._bodies: dict[str, str] = {}
        self._pages: dict[str, Page] = {}
        for document in documents:
            page = parse(document)
            links = Parsed.of(page, crawled).links
            self._bodies[document.url] = document.body
            self._pages[document.url] = page._replace(links=tuple(sorted(links)))
        self._canonical = canonical_urls(self._pages)

    def tables(self) -> Iterator[tuple[Table[Any], Iterator[LoadedCell]]]:
        """Each table with its cells, ordered by row."""
        yield tables.documents, self._documents()
        yield tables.pages, self._page_cells()
        yield tables.groups, self._groups()
        yield tables.links, self._links()
        yield tables.serving, self._serving()
        yield tables.inlinks, self._inlinks()

    def _documents(self) -> Iterator[LoadedCell]:
        for url in sorted(self._bodies):
            body = self._bodies[url]
            yield from _row(url, (tables.body, body), (tables.crawled, self._crawled))

    def _page_cells(self) -> Iterator[LoadedCell]:
        for url in sorted(self._pages):
            page = self._pages[url]
            parsed = Parsed(page.title, page.keys, frozenset(page.links), self._crawled)
            cells: list[tuple[Column[Any], Any]] = [(tables.canonical, self._canonical[url])]
            yield from _row(url, *cells, (tables.parsed, parsed.encode()))

    def _groups(self) -> Iterator[LoadedCell]:
        members = [
            _Member(page.keys[0], len(url), Child(url), 1) for url, page in self._pages.items()
        ]
        for level in range(KEYS):
            members.sort()
            representatives = []
            for key, found in groupby(members, attrgetter("group")):
                of_group = list(found)
                best, documents = of_group[0], sum(one.documents for one in of_group)
                yield from self._group(Group(level, key), of_group, documents)
                if level != ROOT:
                    url = best.child.url
                    above = self._pages[url].keys[level + 1]
                    representatives.append(_Member(above, best.length, Child(url, key), documents))
            members = representatives

    def _group(
        self, group: Group, members: Sequence[_Member], documents: int
    ) -> Iterator[LoadedCell]:
        best = members[0].child
        keys, canonical = self._pages[best.url].keys, self._canonical[best.url]
        known = {
            one.child: Member(self._pages[one.child.url].keys, one.documents, self._crawled)
            for one in members
        }
        together = known if len(known) <= TOGETHER_MAX else None
        state = State(best, keys, documents, self._crawled, canonical, members=together)
        yield from _row(group.row(GROUP), (tables.state, state.encode()))
        if together is None:
            for child, member in known.items():
                yield from _row(child.row(group, MEMBER), (tables.member, member))

    def _links(self) -> Iterator[LoadedCell]:
        rows = (
            (link.target, url, digest(link.anchor), link.anchor)
            for url, page in self._pages.items()
            for link in page.links
        )
        for target, url, anchor_digest, anchor in sorted(rows):
            shown = self._canonical.get(target, "")
            key = (target, url, anchor_digest)
            yield from _row(key, (tables.placed, [anchor, shown, self._crawled]))

    def _serving(self) -> Iterator[LoadedCell]:
        sizes: dict[str, int] = {}
        for url in self._canonical.values():
            sizes[url] = sizes.get(url, 0) + 1
        for url in sorted(sizes):
            yield from _row(
                url,
                (tables.cause, self._crawled),
                (tables.size, sizes[url]),
                (tables.title, self._pages[url].title),
            )

    def _inlinks(self) -> Iterator[LoadedCell]:
        rows = (
            (canonical, url, digest(link.anchor), digest(link.target), link.anchor)
            for url, page in self._pages.items()
            for link in page.links
            if (canonical := self._canonical.get(link.target)) is not None
        )
        for *key, anchor in sorted(rows):
            yield from _row(tuple(key), (tables.anchor, anchor))


def _row(key: object, *cells: tuple[Column[Any], Any]) -> Iterator[LoadedCell]:
    row = cells[0][0].table.key.encode(key)
    return ((row, column.name, column.codec.encode(value)) for column, value in cells)


async def register(db: aio.Database) -> None:
    """Registers the observers only for what is written from now on."""
    await db.register_observers([replace(one, backfill=False) for one in observers])


async def load(db: aio.Database, documents: Iterable[Document]) -> int:
    """Loads into existing, empty tables. Returns the number of cells."""
    repository = Repository(documents, int(await db.timestamp()))
    loaded = 0
    for table, cells in repository.tables():
        bulk = BulkLoad(db, LoadPlan(table.name, f"initial {table.name}", b"", b"", notify=False))
        timestamps = await bulk.begin()
        try:
            async for batch in _batches(cells):
                await bulk.load(batch, timestamps)
                loaded += len(batch)
                if loaded % PROGRESS_CELLS < len(batch):
                    _say(f"{table.name}: {loaded:,} cells of all tables loaded")
        except BaseException:
            await bulk.abandon()
            raise
        await bulk.finish(timestamps)
    _say(f"{loaded:,} cells loaded")
    return loaded


async def _batches(cells: Iterator[LoadedCell]) -> AsyncIterator[list[LoadedCell]]:
    """Batches of cells. The next one is made while the previous one is being sent."""

    def make() -> list[LoadedCell]:
        return list(islice(cells, CELLS_AT_ONCE))

    batch = await asyncio.to_thread(make)
    while batch:
        following = asyncio.create_task(asyncio.to_thread(make))
        try:
            yield batch
        finally:
            batch = await following


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


async def load_crawl(address: str | None, crawl: Crawl, tablets: int) -> None:
    """Creates the missing tables, and loads the crawl."""
    async with aio.connect(address, description="an initial repository") as db:
        await tables.create_tables_async(db, crawl.splits(tablets))
        await register(db)
        await load(db, crawl)


def main(
    documents: Annotated[int, typer.Option(help="Number of synthetic documents.", min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="Each seed gives another crawl.")] = 0,
    tablets: Annotated[
        int, typer.Option(help="Tablets of each table that is keyed by URL.", min=1)
    ] = 4,
    address: Annotated[
        str | None, typer.Option(help="host:port of masters; PERCOLATOR_ADDRESS.")
    ] = None,
) -> None:
    """Load a repository of documents, and everything that observers would compute from it."""
    # Millions of objects stay alive; looking for garbage among them would take minutes.
    gc.disable()
    try:
        asyncio.run(load_crawl(address, Crawl(documents, seed), tablets))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (PercolatorError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
