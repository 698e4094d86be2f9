"""The last step of replacing a table by what a shared transaction has written: its other cells go.

Once all tasks have finished, the driver reads the table, and locks the deletion of each cell that
no chosen attempt writes. So the old rows go when the new ones appear, atomically.

It reads at a timestamp from after the last receipt: what others have committed until then goes,
too. A row that another transaction inserts after that stays, as if it had come after the commit.

The tablets report the locks that are in the way of this scan. One of a chosen attempt says that the
job writes its cell, so the cell is left alone, at no further cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from percolator.aio.database import DatabaseInternals
from percolator.aio.shared import Receipt, Ticket
from percolator.aio.snapshot import Snapshot
from percolator.errors import CellAddress
from percolator.formats.records import KIND_DELETE
from percolator.protocol.write_set import Write
from percolator.schema import Table

_GENERATION = 1
"""Higher than that of the tasks: attempts that were not chosen are rolled back, wherever met."""


async def rest_deleted(
    internal: DatabaseInternals,
    ticket: Ticket,
    receipts: Sequence[Receipt],
    snapshot: Snapshot,
    table: Table[Any],
    *,
    columns: Sequence[bytes] | None = None,
    task: str,
    timeout: float,
) -> Receipt:
    """Locks the deletion of all cells of these columns (None: of all) that the chosen attempts do
    not write. Commit the receipt that it returns together with theirs.

    `snapshot` must have begun after the last of them, or not have begun yet.
    """
    chosen = frozenset(part.start for receipt in receipts for part in receipt.parts)
    engine = internal.engine
    info = await engine.catalog.table(table.name, engine.now() + timeout)
    info.require_older_than(ticket.began)
    share = internal.share(ticket, task, _GENERATION, timeout, 0.0, chosen)
    async with share:
        locking: asyncio.Task[None] | None = None
        try:
            found = snapshot.scan_cells(table, columns=columns, leaving_out=chosen)
            async with aclosing(found) as pages:
                async for page in pages:
                    if locking is not None:
                        await locking
                    cells: dict[CellAddress, Write] = {
                        CellAddress(info.table_id, row, column): (KIND_DELETE, b"")
                        for row, column in zip(page.rows, page.columns, strict=True)
                    }
                    # The next page is on its way meanwhile.
                    locking = asyncio.ensure_future(share.write(cells))
            if locking is not None:
                await locking
        except BaseException:
            if locking is not None:
                locking.cancel()
                await asyncio.wait([locking])
            raise
        return await share.finish()
