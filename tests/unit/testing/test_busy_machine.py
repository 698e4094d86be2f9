"""The database in memory on a busy machine: nothing fails because time has passed."""

from __future__ import annotations

import itertools

import pytest

import percolator.testing
from percolator import Table, aio, codecs, transactional
from percolator.testing import local_database
from percolator.world import MachineClock

SECONDS_BETWEEN_LOOKS = 4.0

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)


class BusyClock(MachineClock):
    """Seconds pass between any two looks at it."""

    def __init__(self) -> None:
        self._looks = itertools.count(1)

    def wall_milliseconds(self) -> int:
        return super().wall_milliseconds() + int(self.monotonic_seconds() * 1_000)

    def monotonic_seconds(self) -> float:
        return next(self._looks) * SECONDS_BETWEEN_LOOKS


@transactional
async def increment(tx: aio.Transaction) -> None:
    for row in ("a", "z"):
        await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)


async def test_no_limit_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_database, "MachineClock", BusyClock)
    async with percolator.testing.connect_async() as db:
        await db.create_table(accounts, splits=["m"])
        for _ in range(10):
            await increment(db)
        async with db.snapshot() as snapshot:
            assert await snapshot.get_many([("a", balance), ("z", balance)]) == [10, 10]
