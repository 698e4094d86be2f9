"""The tables of a soak run, and the observers that its workers run: a chain of two."""

from __future__ import annotations

from percolator import Table, Transaction, aio, codecs, observes

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)

orders = Table("orders")
placed = orders.column("placed", codecs.integer)
packed = orders.column("packed", codecs.integer)
shipped = orders.column("shipped", codecs.integer)

arrivals = Table("arrivals")
"""Rows come and go: as many are deleted as are written."""
item = arrivals.column("item", codecs.raw)

notes = Table("notes")
"""Written by way of a gateway's own transactions, as programs in other languages do."""
text = notes.column("text", codecs.raw)


@observes(placed, name="pack")
async def pack(tx: aio.Transaction, row: str) -> None:
    await tx.set(row, packed, await tx.get(row, placed, default=0))


@observes(packed, name="ship")
def ship(tx: Transaction, row: str) -> None:
    """A blocking one, so that workers use threads."""
    tx.set(row, shipped, tx.get(row, packed, default=0))


observers = [pack, ship]
