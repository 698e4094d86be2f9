"""Percolator for asyncio: the same names as in `percolator`, with `await`.

    async with percolator.aio.connect("localhost:7100") as db:
        async with db.transaction() as tx:
            left = await tx.get("bob", balance, default=0)
            await tx.set("bob", balance, left - 7)

A database belongs to the event loop in which it was opened.
"""

from percolator.aio.connecting import connect
from percolator.aio.database import Database
from percolator.aio.pin import Pin
from percolator.aio.snapshot import Snapshot
from percolator.aio.transaction import Outcome, Transaction

__all__ = ["Database", "Outcome", "Pin", "Snapshot", "Transaction", "connect"]
