"""The demonstration notices whatever is not as it has to be, and says what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from examples.demo.checking import WentWrong, check
from examples.webindex import tables
from examples.webindex.crawl import Crawl
from examples.webindex.load import write
from examples.webindex.observers import observers
from percolator import aio
from tests.unit.webindex.pipeline import clients

Damage = Callable[[aio.Transaction, str], Awaitable[None]]

CRAWL = Crawl(20)
WRITTEN = {one.url: one.body for one in CRAWL}


async def index(db: aio.Database) -> None:
    async with db.run_observers(observers):
        for url, body in WRITTEN.items():
            await write(db, url, body)
        await db.wait_for_observers()


async def test_what_is_right_is_counted() -> None:
    async with clients(0, 1) as (db,):
        await index(db)
        checked = await check(db, WRITTEN)
    assert checked.documents == len(WRITTEN)
    assert sum(page.documents for page in checked.pages.values()) == len(WRITTEN)
    assert checked.inlinks > len(WRITTEN)


async def lose_a_document(tx: aio.Transaction, url: str) -> None:
    await tx.delete(url, tables.body)


async def count_a_document_twice(tx: aio.Transaction, url: str) -> None:
    size = await tx.get(url, tables.size, 0)
    await tx.set(url, tables.size, size + 1)


async def make_an_inlink(tx: aio.Transaction, url: str) -> None:
    await tx.set((url, "http://unlinked", "", ""), tables.anchor, "never written")


async def link_to_nothing(tx: aio.Transaction, url: str) -> None:
    await tx.set((f"{url}/nothing", "http://unlinked", "", ""), tables.anchor, "never written")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lose_a_document, "1 differ: 19 documents in the store, 20 written"),
        (count_a_document_twice, r"1 differ: (\d+) pages served, \1 computed from scratch"),
        (make_an_inlink, "never written"),
        (link_to_nothing, "inlinks of pages that are not served"),
    ],
)
async def test_any_difference_is_an_error_that_shows_it(damage: Damage, told: str) -> None:
    async with clients(0, 1) as (db,):
        await index(db)
        served = sorted((await check(db, WRITTEN)).pages)
        await db.run(damage, served[0])
        with pytest.raises(WentWrong, match=told):
            await check(db, WRITTEN)
