"""Observers for the workers in tests, each of which is a separate process."""

from __future__ import annotations

from percolator import Table, Transaction, aio, codecs, observes
from percolator.recipes import Index

orders = Table("orders")
placed = orders.column("placed", codecs.integer)
packed = orders.column("packed", codecs.integer)
shipped = orders.column("shipped", codecs.integer)
disputed = orders.column("disputed", codecs.integer)


@observes(placed, name="pack")
async def pack(tx: aio.Transaction, row: str) -> None:
    """Counts how often it has run for a row: a row that is placed once is packed once."""
    await tx.set(row, packed, await tx.get(row, packed, default=0) + 1)


@observes(packed, name="ship")
def ship(tx: Transaction, row: str) -> None:
    tx.set(row, shipped, tx.get(row, shipped, default=0) + 1)


@observes(disputed, name="settle", attempts=1)
def settle(tx: Transaction, row: str) -> None:
    """Fails until the order is packed."""
    if tx.get(row, packed) is None:
        raise ValueError(f"order {row} was never packed")


observers = [pack, ship, settle]


@observes(packed, name="pack")
async def another_pack(tx: aio.Transaction, row: str) -> None: ...


others = [another_pack]


# An index that the tests of commands build and check.

people = Table("people")
city = people.column("city", codecs.text)
by_city: Index[str, str, str] = Index("people by city", on=city, value=codecs.text)
