"""Percolator for asyncio: the same names as in `percolator`. Await all calls but plain writes.

    async with percolator.aio.connect("localhost:7100") as db:
        async with db.transaction() as tx:
            left = await tx.get("bob", balance, default=0)
            tx.set("bob", balance, left - 7)

A database belongs to the event loop in which it was opened.

Open `database.py` first, then `transaction.py`. Transactions and snapshots (`snapshot.py`) read by
a `Reader` (`reader.py`); that file also says which calls have to be awaited.

`engine.py` wires together what all transactions of a database use, and `connecting.py` finds the
parts of a cluster. Besides transactions there are `changes.py`, `shared.py`, `bulk_load.py`,
`pin.py`, and `observing.py`, which starts workers. `DatabaseInternals` and `TransactionInternals`
are for the rest of the library: programs do not need them.

The rules of transactions are in `percolator.protocol`, not here.
"""

from percolator.aio.changes import Changes
from percolator.aio.connecting import connect
from percolator.aio.database import Database
from percolator.aio.pin import Pin
from percolator.aio.shared import Receipt, Share, SharedTransaction, Ticket
from percolator.aio.snapshot import Snapshot
from percolator.aio.transaction import Outcome, Transaction

__all__ = [
    "Changes",
    "Database",
    "Outcome",
    "Pin",
    "Receipt",
    "Share",
    "SharedTransaction",
    "Snapshot",
    "Ticket",
    "Transaction",
    "connect",
]
