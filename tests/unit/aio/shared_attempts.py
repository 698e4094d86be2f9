"""Attempts of a shared transaction's tasks, for tests: they write, finish, and die."""

from __future__ import annotations

import pytest

from percolator import Timestamp
from percolator.aio import Database
from percolator.aio.shared import Receipt, Share, SharedTransaction, Ticket
from percolator.errors import ConflictError
from tests.unit.connected import accounts, balance

TTL_SECONDS = 15.0
ROWS = ("ann", "bob", "joe", "zoe")


async def values_of(db: Database, at: Timestamp | None = None) -> dict[str, int]:
    async with db.snapshot(at=at) as snapshot:
        return {row.key: row[balance] async for row in snapshot.scan(accounts)}


async def share_of(
    db: Database, ticket: Ticket, task: str, *, generation: int = 0, **values: int
) -> Share:
    """An attempt that has locked these cells."""
    share = db.share(ticket, task=task, generation=generation)
    await share.begin()
    for row, value in values.items():
        await share.set(row, balance, value)
    await share._flush()
    return share


async def receipt_of(db: Database, ticket: Ticket, task: str, **values: int) -> Receipt:
    return await (await share_of(db, ticket, task, **values)).finish()


def dies(process: Share | SharedTransaction) -> None:
    if isinstance(process, Share):
        process._leave()
    else:
        process._end("has died")


async def set_value(db: Database, row: str, value: int) -> None:
    async with db.transaction() as tx:
        await tx.set(row, balance, value)


async def fails_to_set(db: Database, row: str) -> None:
    with pytest.raises(ConflictError):
        async with db.transaction() as tx:
            await tx.set(row, balance, 0)
