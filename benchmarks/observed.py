"""Observers of the benchmarks.

A chain of three, each of which copies a number and adds one; and the smallest observer that there
can be, as `def` and as `async def`.
"""

from __future__ import annotations

from percolator import Table, codecs, observes
from percolator import Transaction as BlockingTransaction
from percolator.aio import Transaction

chain = Table("chain")
links = [chain.column(name, codecs.integer) for name in ("a", "b", "c", "d")]


@observes(links[0], name="first", backfill=False)
async def first(tx: Transaction, row: str) -> None:
    tx.set(row, links[1], (await tx.get(row, links[0]) or 0) + 1)


@observes(links[1], name="second", backfill=False)
async def second(tx: Transaction, row: str) -> None:
    tx.set(row, links[2], (await tx.get(row, links[1]) or 0) + 1)


@observes(links[2], name="third", backfill=False)
async def third(tx: Transaction, row: str) -> None:
    tx.set(row, links[3], (await tx.get(row, links[2]) or 0) + 1)


observers = [first, second, third]

changes = {way: Table(f"changes-{way}") for way in ("def", "async-def")}
"""A table for each way to write the smallest observer, which copies one cell."""
values = {way: table.column("value", codecs.integer) for way, table in changes.items()}
copies = {way: table.column("copy", codecs.integer) for way, table in changes.items()}


@observes(values["def"])
def copy(tx: BlockingTransaction, row: str) -> None:
    tx.set(row, copies["def"], tx.get(row, values["def"], default=0))


@observes(values["async-def"], name="copy_async")
async def copy_async(tx: Transaction, row: str) -> None:
    tx.set(row, copies["async-def"], await tx.get(row, values["async-def"], default=0))


smallest = [copy, copy_async]
