"""The programs of the recipes benchmark: each load in several ways."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from examples import unique_numbers
from percolator import Table, aio, codecs, observes
from percolator.recipes import CombineQueue

LEVELS = unique_numbers.LEVELS


@dataclass(frozen=True)
class Way:
    """One way to do the work."""

    name: str
    observers: str
    """The name of the list in this module."""
    create: Callable[[aio.Database], Awaitable[None]]
    write: Callable[[aio.Transaction, int], Awaitable[None]]
    result: Callable[[aio.Snapshot], Awaitable[int]]
    expected: Callable[[list[int]], int]


# ------------------------------------------------------------------ documents, one counter

documents = Table("documents")
contents = documents.column("contents", codecs.integer)
total = documents.column("total", codecs.integer)
_TOTAL = "~total"


async def _write_document(tx: aio.Transaction, number: int) -> None:
    tx.set(f"{number:06}", contents, number)


@observes(contents, name="add up", backfill=False)
async def add_up(tx: aio.Transaction, row: str) -> None:
    tx.set(_TOTAL, total, await tx.get(_TOTAL, total, default=0) + 1)


counter_strong = [add_up]


async def _create_documents(db: aio.Database) -> None:
    await db.create_table(documents)
    await db.register_observers(counter_strong)


async def _total(snapshot: aio.Snapshot) -> int:
    return await snapshot.get(_TOTAL, total, default=0)


inbox = Table("inbox")
waits = inbox.column("waits", codecs.integer)
_WAKE = "~wake"


@observes(contents, name="put in", backfill=False)
async def put_in(tx: aio.Transaction, row: str) -> None:
    tx.set(row, waits, 1)
    tx.notify(_WAKE, waits)


@observes(waits, weak=True, name="take out")
async def take_out(tx: aio.Transaction, wake: str) -> None:
    number = 0
    async for row in tx.scan(inbox, end=_WAKE, columns=[waits]):
        number += row[waits]
        tx.delete(row.key, waits)
    if number:
        tx.set(_TOTAL, total, await tx.get(_TOTAL, total, default=0) + number)


counter_by_hand = [put_in, take_out]


async def _create_inbox(db: aio.Database) -> None:
    await db.create_tables([documents, inbox])
    await db.register_observers(counter_by_hand)


totals = CombineQueue("totals", key=codecs.text, value=codecs.integer, combine=sum)


@observes(contents, name="add", backfill=False)
async def add(tx: aio.Transaction, row: str) -> None:
    await totals.add(tx, _TOTAL, 1)


counter_combined = [add, totals.combiner()]


async def _create_totals(db: aio.Database) -> None:
    await db.create_table(documents)
    await totals.create(db)
    await db.register_observers(counter_combined)


async def _combined_total(snapshot: aio.Snapshot) -> int:
    return await totals.get(snapshot, _TOTAL) or 0


COUNTER = (
    Way("strong", "counter_strong", _create_documents, _write_document, _total, len),
    Way("inbox by hand", "counter_by_hand", _create_inbox, _write_document, _total, len),
    Way(
        "CombineQueue",
        "counter_combined",
        _create_totals,
        _write_document,
        _combined_total,
        len,
    ),
)

# ------------------------------------------------------------------ a trie of different numbers

trie = Table("trie", key=codecs.tuple_of(codecs.ordered_integer, codecs.ordered_integer))
waiting = trie.column("waiting", codecs.integer)
count = trie.column("count", codecs.integer)


async def _wait_at(tx: aio.Transaction, node: tuple[int, int], number: int) -> None:
    tx.set(node, waiting, await tx.get(node, waiting, default=0) + number)


async def _see(tx: aio.Transaction, number: int) -> None:
    if await tx.get((LEVELS, number), count) is None:
        tx.set((LEVELS, number), count, 1)
        await _wait_at(tx, (LEVELS - 1, number >> 4), 1)


@observes(waiting, name="climb", backfill=False)
async def climb(tx: aio.Transaction, node: tuple[int, int]) -> None:
    number = await tx.get(node, waiting, default=0)
    if not number:
        return
    tx.delete(node, waiting)
    tx.set(node, count, await tx.get(node, count, default=0) + number)
    if node[0]:
        await _wait_at(tx, (node[0] - 1, node[1] >> 4), number)


trie_strong = [climb]


async def _create_trie(db: aio.Database) -> None:
    await db.create_table(trie)
    await db.register_observers(trie_strong)


async def _root(snapshot: aio.Snapshot) -> int:
    return await snapshot.get((0, 0), count, default=0)


async def _announce_at(tx: aio.Transaction, node: tuple[int, int], number: int) -> None:
    await _wait_at(tx, node, number)
    tx.notify(node, waiting)


async def _see_weakly(tx: aio.Transaction, number: int) -> None:
    if await tx.get((LEVELS, number), count) is None:
        tx.set((LEVELS, number), count, 1)
        await _announce_at(tx, (LEVELS - 1, number >> 4), 1)


@observes(waiting, weak=True, name="climb weakly")
async def climb_weakly(tx: aio.Transaction, node: tuple[int, int]) -> None:
    number = await tx.get(node, waiting, default=0)
    if not number:
        return
    tx.delete(node, waiting)
    tx.set(node, count, await tx.get(node, count, default=0) + number)
    if node[0]:
        await _announce_at(tx, (node[0] - 1, node[1] >> 4), number)


trie_weak = [climb_weakly]


async def _create_weak_trie(db: aio.Database) -> None:
    await db.create_table(trie)
    await db.register_observers(trie_weak)


trie_combined = unique_numbers.observers


async def _create_tree(db: aio.Database) -> None:
    await unique_numbers.tree.create(db)


async def _add_number(tx: aio.Transaction, number: int) -> None:
    await unique_numbers.tree.add(tx, (LEVELS, number), 1)


async def _combined_root(snapshot: aio.Snapshot) -> int:
    return await unique_numbers.tree.get(snapshot, (0, 0)) or 0


def _different(numbers: list[int]) -> int:
    return len(set(numbers))


TRIE = (
    Way("strong", "trie_strong", _create_trie, _see, _root, _different),
    Way("weak", "trie_weak", _create_weak_trie, _see_weakly, _root, _different),
    Way("CombineQueue", "trie_combined", _create_tree, _add_number, _combined_root, _different),
)
