"""The database in memory on a busy machine: nothing fails because time has passed."""

from __future__ import annotations

import itertools

import pytest

import percolator.testing
from percolator import ConflictError, Table, aio, codecs, transactional
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


async def test_a_write_does_not_wait_for_ever_for_a_shared_transaction_of_its_own_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = BusyClock()
    monkeypatch.setattr(local_database, "MachineClock", lambda: clock)
    async with percolator.testing.connect_async() as db:
        await db.create_table(accounts)
        async with db.shared_transaction() as whole:
            async with db.share(whole.ticket, task="1") as share:
                await share.set("a", balance, 1)
                receipt = await share.finish()
            began = clock.monotonic_seconds()
            with pytest.raises(ConflictError, match="is locked by"):
                async with db.transaction() as tx:
                    await tx.set("a", balance, 2)
            assert clock.monotonic_seconds() - began < 300.0
            await whole.commit([receipt])
        assert await db.get("a", balance) == 1
