"""A repository that is loaded at once is what observers would have made of its documents."""

from __future__ import annotations

import random
from typing import Any

import percolator.testing
from examples.webindex import initial, tables
from examples.webindex.crawl import Crawl
from examples.webindex.definition import served
from examples.webindex.documents import Document
from examples.webindex.observers import observers
from examples.webindex.served import served_table_async
from percolator import Table, aio, codecs

from .pipeline import URLS, any_document

ODD = [
    Document("http://empty", ""),
    Document("http://title", "Title"),
    Document(
        "http://long-link", f"T\n\n[x](http://{'y' * tables.URL_BYTES_MAX}) [x](http://title)"
    ),
    Document(
        "http://ü\0/\uffff", "T\n\n[ä](http://title) [ä](http://title) [b](http://ü\0/\uffff)"
    ),
    Document("http://ü\0/\U0001f600", "T\n\n[ä](http://gone) []()"),
]

Cells = dict[tuple[bytes, bytes], bytes]


async def cells_of(db: aio.Database, table: Table[Any]) -> Cells:
    found: Cells = {}
    async with db.snapshot() as snapshot:
        async for page in snapshot.scan_cells(table):
            for row, column, value in zip(page.rows, page.columns, page.values, strict=True):
                found[row, column] = value
    return found


async def crawled_by_observers(documents: list[Document], crawled: int) -> dict[str, Cells]:
    async with percolator.testing.connect_async() as db:
        await tables.create_tables_async(db)
        await db.register_observers(observers)
        for document in documents:
            async with db.transaction() as tx:
                await tx.set(document.url, tables.body, document.body)
                await tx.set(document.url, tables.crawled, crawled)
        await percolator.testing.run_observers_async(db, observers)
        return {table.name: await cells_of(db, table) for table in tables.ALL}


async def test_its_cells_are_those_that_observers_leave() -> None:
    chance = random.Random(4)
    documents = [*ODD, *Crawl(60, seed=2), *(any_document(chance, url) for url in URLS)]
    made = initial.Repository(documents, crawled=17).tables()
    found = {
        table.name: {(row, column): value for row, column, value in cells} for table, cells in made
    }
    assert found == await crawled_by_observers(documents, crawled=17)


async def test_cells_come_in_the_order_of_their_rows() -> None:
    for _, cells in initial.Repository([*ODD, *Crawl(60, seed=2)], crawled=17).tables():
        addresses = [(row, column) for row, column, _ in cells]
        assert addresses == sorted(set(addresses))


async def test_observers_go_on_from_there() -> None:
    crawl = Crawl(60, seed=2)
    async with percolator.testing.connect_async() as db:
        await tables.create_tables_async(db)
        for table, cells in initial.Repository(crawl, crawled=17).tables():
            stored = Table(table.name, key=codecs.stored)
            async with db.transaction() as tx:
                for row, column, value in cells:
                    await tx.set(row, stored.column(column, codecs.stored), value)
        await initial.register(db)
        assert await percolator.testing.run_observers_async(db, observers) == 0
        for number in range(20):
            async with db.transaction() as tx:
                document = crawl.document(number, edition=1)
                await tx.set(document.url, tables.body, document.body)
        for number in range(20, 30):
            async with db.transaction() as tx:
                await tx.delete(crawl.url(number), tables.body)
        await percolator.testing.run_observers_async(db, observers)
        left = [crawl.document(number, edition=int(number < 20)) for number in range(60)]
        assert await served_table_async(db) == served(left[:20] + left[30:])
