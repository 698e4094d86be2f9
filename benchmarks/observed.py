"""The observers of the benchmark: a chain of three, each of which copies a number and adds one."""

from __future__ import annotations

from percolator import Table, codecs, observes
from percolator.aio import Transaction

chain = Table("chain")
links = [chain.column(name, codecs.integer) for name in ("a", "b", "c", "d")]


@observes(links[0], name="first")
async def first(tx: Transaction, row: str) -> None:
    await tx.set(row, links[1], (await tx.get(row, links[0]) or 0) + 1)


@observes(links[1], name="second")
async def second(tx: Transaction, row: str) -> None:
    await tx.set(row, links[2], (await tx.get(row, links[1]) or 0) + 1)


@observes(links[2], name="third")
async def third(tx: Transaction, row: str) -> None:
    await tx.set(row, links[3], (await tx.get(row, links[2]) or 0) + 1)


observers = [first, second, third]
