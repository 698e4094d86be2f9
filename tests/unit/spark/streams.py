"""A stream without Spark: the loop of its micro-batches, on a cluster in memory.

The loop keeps what Spark keeps in a checkpoint (the end of each batch before it is read, and which
batches were written) and nothing else, so a query that was killed is one more `Query` with the same
checkpoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from percolator import Table, codecs
from percolator.aio import Database
from percolator.routing.cells import ChangesRequest, StoredChange
from percolator.spark.chosen_rows import Wanted
from percolator.spark.stream_progress import Batch, Offset, Progress, WholeTable
from percolator.timestamps import Timestamp
from tests.unit.connected import connected

orders = Table("orders")
price = orders.column("price", codecs.integer)
state = orders.column("state", codecs.text)
raw_orders = Table("orders", key=codecs.raw)

Cell = tuple[int, bytes, bytes, bytes | None]
"""Commit timestamp, row, column and value."""


@asynccontextmanager
async def shop() -> AsyncIterator[Database]:
    async with connected() as (db, _):
        await db.create_table(orders, splits=["h", "p"], change_feed=True)
        yield db


async def put(db: Database, **prices: int | None) -> None:
    """One transaction; None deletes."""
    async with db.transaction() as tx:
        for row, value in prices.items():
            if value is None:
                await tx.delete(row, price)
            else:
                await tx.set(row, price, value)


async def all_changes(db: Database, after: int) -> list[Cell]:
    """Changes seen by a program that follows the feed."""
    until = await db.timestamp()
    found = db.changes(raw_orders, after=Timestamp(after), until=until)
    return [(one.commit_timestamp, one.key, one.column, one.raw_value) async for one in found]


async def snapshot_cells(db: Database, at: int) -> list[Cell]:
    found = []
    async with db.snapshot(at=Timestamp(at)) as snapshot:
        async for page in snapshot.scan_cells(raw_orders):
            cells = zip(page.commit_timestamps, page.rows, page.columns, page.values, strict=True)
            found += list(cells)
    return sorted(found)


@dataclass
class Checkpoint:
    """State that outlives a query that is killed."""

    planned: list[Offset] = field(default_factory=list)
    written: int = 0
    """How many batches Spark knows to be written."""
    sink: dict[int, list[Cell]] = field(default_factory=dict)
    """By number of batch: a sink that replaces a batch that it gets again."""

    def rows(self) -> list[Cell]:
        return [row for number in sorted(self.sink) for row in self.sink[number]]


class Query:
    """A query from its start until it is stopped or killed."""

    def __init__(
        self, db: Database, checkpoint: Checkpoint, rows_per_batch: int = 0, **wanted: Any
    ) -> None:
        self.db = db
        self.checkpoint = checkpoint
        self.rows_per_batch = rows_per_batch
        self.progress = Progress(db, Wanted("orders", **wanted))

    async def trigger(self, *, killed_at: int = 99) -> bool:
        """One trigger. Returns whether it made a batch. Stops before step `killed_at`."""
        kept = self.checkpoint
        number = kept.written
        start = kept.planned[number - 1] if number else Offset()
        if len(kept.planned) == number:
            end = await self.progress.latest(start, self.rows_per_batch)
            if killed_at <= 1 or end == start:
                return False
            kept.planned.append(end)
        if killed_at <= 2:
            return False
        batch = await self.progress.batch(start, kept.planned[number])
        if killed_at <= 3:
            return False
        rows = await self.read(batch)
        if killed_at <= 4:
            return False
        again = kept.sink.get(number)
        assert again is None or again == rows, "a batch that is read again has the same rows"
        kept.sink[number] = rows
        if killed_at <= 5:
            return False
        kept.written += 1
        if killed_at <= 6:
            return True
        self.progress.committed(kept.planned[number])
        return True

    async def until_idle(self) -> None:
        """Triggers until there is nothing to do."""
        while await self.trigger():
            pass

    async def read(self, batch: Batch) -> list[Cell]:
        if batch is None:
            return []
        if isinstance(batch, WholeTable):
            return await snapshot_cells(self.db, batch.at)
        request = ChangesRequest(batch.table_id, batch.after, batch.until)
        found: list[StoredChange] = []
        for rows in batch.ranges:
            pages = self.db.internal.engine.router.scan_changes(request, [rows], 10.0)
            async with aclosing(pages) as some:
                async for page in some:
                    found += page
        return sorted(change[:4] for change in found)
