"""Money in Bigtable, while the clients that move it are killed."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from percolator.aio import Database
from percolator.bigtable.channel import BigtableNetwork
from percolator.bigtable.place import Place
from percolator.bigtable.tables import create_table
from percolator.services.local.cluster import LocalCluster
from tests.bigtable.bank_client import (
    ACCOUNTS,
    BALANCE,
    BANK,
    START_BALANCE,
    TRANSFERS,
    connected,
)
from tests.bigtable.emulator_process import emulator

pytestmark = [pytest.mark.bigtable, pytest.mark.timeout(300)]

CLIENTS = 3
KILLS = 9
TRANSFERS_BETWEEN_KILLS = 4
_DAY_MILLISECONDS = 86_400_000
ROOT = Path(__file__).parents[2]


async def test_money_is_neither_made_nor_lost_while_clients_are_killed(tmp_path: Path) -> None:
    epoch = round(time.time() * 1000) - _DAY_MILLISECONDS
    with emulator() as address, LocalCluster(tmp_path / "cluster", tablet_servers=1) as cluster:
        network = BigtableNetwork()
        place = Place(address, "bank-project", f"i{uuid.uuid4().hex}", scans_backwards=False)
        db = await connected(cluster.address, network, place, epoch)
        await _open(db, network, place)

        def start(number: int) -> subprocess.Popen[bytes]:
            name = f"client-{number}"
            arguments = [cluster.address, address, place.instance, str(epoch), name]
            program = [sys.executable, "-m", "tests.bigtable.bank_client", *arguments]
            return subprocess.Popen(program, cwd=ROOT)

        clients = [start(number) for number in range(CLIENTS)]
        try:
            for kill in range(KILLS):
                await _made(db, TRANSFERS_BETWEEN_KILLS)
                victim = kill % CLIENTS
                clients[victim].kill()
                assert clients[victim].wait() == -9, "it did not end by itself"
                clients[victim] = start(victim)
        finally:
            for client in clients:
                client.kill()
                client.wait()
        for _ in range(2):
            assert await _transfers(db) >= KILLS * TRANSFERS_BETWEEN_KILLS
        await db.close()
        await network.close()


async def _open(db: Database, network: BigtableNetwork, place: Place) -> None:
    await db.create_table(BANK)
    engine = db.internal.engine
    info = await engine.table(BANK, engine.now() + 30.0)
    await create_table(network, place, info.table_id, 30.0)
    async with db.transaction() as tx:
        for account in ACCOUNTS:
            await tx.set(account, BALANCE, START_BALANCE)


async def _made(db: Database, count: int) -> None:
    """Returns when that many more transfers were made. Each look checks the sum."""
    before = await _transfers(db)
    while await _transfers(db) < before + count:
        pass


async def _transfers(db: Database) -> int:
    """How many transfers there were, as of one moment, at which no money may be missing."""
    async with db.snapshot() as snapshot:
        rows = [row async for row in snapshot.scan(BANK)]
    balances = [row[BALANCE] for row in rows if BALANCE in row]
    assert len(balances) == len(ACCOUNTS)
    assert sum(balances) == START_BALANCE * len(ACCOUNTS)
    return sum(row[TRANSFERS] for row in rows if TRANSFERS in row)
