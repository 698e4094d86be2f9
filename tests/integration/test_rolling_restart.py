"""Every service is restarted under load, one process after another; no user notices.

The library may retry inside a transaction; what a program calls must not fail once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from percolator import Table, aio, codecs
from percolator.services.local.cluster import LocalCluster
from percolator.world import Random
from tests.integration.observed_orders import orders

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

ACCOUNTS = 20
OPENING = 100
TELLERS = 2
PROGRESS_SECONDS = 30.0
TRANSACTIONS_BETWEEN = 3
"""Transactions that every teller completes between two restarts, so that none is stuck."""

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)
ROWS = [f"account-{number:02}" for number in range(ACCOUNTS)]


@pytest.fixture(name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"),
        tablet_servers=2,
        masters=2,
        oracles=2,
        gateways=1,
        workers=1,
        observers=["tests.integration.observed_orders:observers"],
    ) as started:
        yield started


@dataclass
class Teller:
    """Moves money and audits until told to stop. An error ends it: a user would have seen it."""

    name: str
    database: aio.Database
    chance: Random
    done: int = 0
    stopping: bool = False

    async def work(self) -> None:
        while not self.stopping:
            if self.chance.random() < 0.3:
                await self._audit()
            else:
                await self.database.run(self._transfer)
            self.done += 1

    async def _transfer(self, tx: aio.Transaction) -> None:
        source, target = self.chance.sample(ROWS, 2)
        found = await tx.get_many(accounts, [source, target], [balance])
        await tx.set(source, balance, found[0][balance] - 1)
        await tx.set(target, balance, found[1][balance] + 1)

    async def _audit(self) -> None:
        async with self.database.snapshot() as snapshot:
            total = sum([row[balance] async for row in snapshot.scan(accounts)])
        assert total == ACCOUNTS * OPENING, f"{self.name} found {total}"


async def all_go_on(tellers: list[Teller], working: list[asyncio.Task[None]]) -> None:
    """Returns when each has done several transactions more; raises the first one's error."""
    before = [teller.done for teller in tellers]
    deadline = time.monotonic() + PROGRESS_SECONDS
    while any(
        teller.done < was + TRANSACTIONS_BETWEEN
        for teller, was in zip(tellers, before, strict=True)
    ):
        for task in working:
            if task.done():
                task.result()
        assert time.monotonic() < deadline, [(one.name, one.done) for one in tellers]
        await asyncio.sleep(0.02)


async def test_a_rolling_restart_of_everything_fails_no_transaction(cluster: LocalCluster) -> None:
    async with (
        aio.connect(cluster.address, description="direct") as direct,
        aio.connect(cluster.gateway_address, description="through") as through,
    ):
        await direct.create_table(orders)
        await asyncio.to_thread(cluster.wait_workers)
        await direct.create_table(accounts, splits=[ROWS[ACCOUNTS // 2]])
        opening = ((row, {balance: OPENING}) for row in ROWS)
        await direct.set_many(opening)
        tellers = [
            Teller(f"{where} {number}", database, Random(f"{where} {number}"))
            for where, database in (("direct", direct), ("through", through))
            for number in range(TELLERS)
        ]
        working = [asyncio.create_task(teller.work()) for teller in tellers]
        try:
            restarted = []
            for name, process in cluster.processes.items():
                await all_go_on(tellers, working)
                process.ask_to_stop()
                assert await asyncio.to_thread(process.wait_stopped) == 0, name
                await asyncio.to_thread(cluster.restart, name)
                restarted.append(name)
            await all_go_on(tellers, working)
            for teller in tellers:
                teller.stopping = True
            await asyncio.gather(*working)
        finally:
            for task in working:
                task.cancel()
        assert restarted == list(cluster.processes)
        print(f"{sum(teller.done for teller in tellers)} transactions, {len(restarted)} restarts")
