"""Failover under load: 3 tablet servers, steady transfers, kill -9 of one (the paper's figure 10).

Each transfer also writes its own row in the same transaction, so that the audit can find it
afterwards. A transfer reported as committed whose row is missing was lost. A transfer reported as
failed whose row exists would be done twice by a program that retries it.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import failover_tablets
from benchmarks.report import Report
from percolator import Table, aio, codecs
from percolator.errors import OutcomeUnknown, PercolatorError
from percolator.services.local.cluster import LocalCluster

TABLETS = 12
ACCOUNTS = 1_200
OPENING = 1_000
CLIENTS = 24
SECONDS = 24
KILL_AT = 8
RECOVERED = 0.8

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)
transfers = Table("transfers")
amount_of = transfers.column("amount", codecs.integer)


@dataclass
class Traffic:
    """Transactions of the clients, and the outcomes they saw."""

    started: float = field(default_factory=time.monotonic)
    committed_at: Counter[int] = field(default_factory=Counter)
    committed: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)
    stopped: bool = False


async def transfer_forever(db: aio.Database, traffic: Traffic, number: int) -> None:
    chance = random.Random(number)
    count = 0
    while not traffic.stopped:
        count += 1
        name = f"{number:02d}-{count:06d}"
        source, target = (f"{account:06d}" for account in chance.sample(range(ACCOUNTS), 2))

        async def move(tx: aio.Transaction, name: str, source: str, target: str) -> None:
            first, second = await tx.get_many(accounts, [source, target], [balance])
            tx.set(source, balance, first[balance] - 1)
            tx.set(target, balance, second[balance] + 1)
            tx.set(row_of(name), amount_of, 1)

        try:
            await db.run(move, name, source, target)
        except OutcomeUnknown as error:
            traffic.errors[type(error).__name__] += 1
            traffic.unknown.add(name)
        except PercolatorError as error:
            traffic.errors[type(error).__name__] += 1
            traffic.aborted.add(name)
        else:
            traffic.committed.add(name)
            traffic.committed_at[int(time.monotonic() - traffic.started)] += 1


def row_of(name: str) -> str:
    """A row key that spreads transfers over all tablets of their table."""
    return f"{zlib.crc32(name.encode()) % ACCOUNTS:06d}/{name}"


async def under_load(cluster: LocalCluster, report: Report) -> None:
    async with aio.connect(cluster.address) as db:
        splits = [f"{ACCOUNTS * part // TABLETS:06d}" for part in range(1, TABLETS)]
        await db.create_table(accounts, splits)
        await db.create_table(transfers, splits)
        rows = [(f"{number:06d}", {balance: OPENING}) for number in range(ACCOUNTS)]
        await db.set_many(rows)
        traffic = Traffic()
        clients = [
            asyncio.create_task(transfer_forever(db, traffic, number)) for number in range(CLIENTS)
        ]
        await asyncio.sleep(KILL_AT)
        cluster.processes["tabletserver-1"].kill()
        await asyncio.sleep(SECONDS - KILL_AT)
        traffic.stopped = True
        await asyncio.gather(*clients)
        show(traffic, report)
        await audit(db, traffic, report)


def show(traffic: Traffic, report: Report) -> None:
    rates = [traffic.committed_at[second] for second in range(SECONDS)]
    peak = max(*rates, 1)
    for second, rate in enumerate(rates):
        mark = "  <- kill -9" if second == KILL_AT else ""
        print(f"{second:3d} s {rate:6d}/s {'#' * (60 * rate // peak)}{mark}")
    print("errors seen by the application:", dict(traffic.errors) or "none")
    # Single seconds vary; the capacity of the survivors is the mean of the last six.
    surviving = sum(rates[-6:]) / 6
    reached = next(
        (
            second
            for second in range(KILL_AT + 1, SECONDS)
            if rates[second] >= RECOVERED * surviving
        ),
        SECONDS,
    )
    report.add("transfers before the kill", sum(rates[2:KILL_AT]) / (KILL_AT - 2), "1/s")
    report.add("transfers at the end, on two servers", surviving, "1/s")
    report.add("back at 80 % of the surviving capacity within", reached + 1 - KILL_AT, "s")


async def audit(db: aio.Database, traffic: Traffic, report: Report) -> None:
    total, found = 0, set()
    async with db.snapshot() as snapshot:
        async for row in snapshot.scan(accounts):
            total += row[balance]
        async for row in snapshot.scan(transfers):
            found.add(row.key.split("/")[1])
    lost = traffic.committed - found
    doubled = traffic.aborted & found
    report.add("commits", len(traffic.committed), "")
    report.add("outcomes unknown", len(traffic.unknown), "")
    report.add("commits lost", len(lost), "", must=0)
    report.add("commits reported as failed that took effect", len(doubled), "", must=0)
    report.add("money created or lost", abs(total - ACCOUNTS * OPENING), "", must=0)


def main() -> int:
    """Measures and reports; returns the exit code."""
    report = Report("failover")
    with tempfile.TemporaryDirectory() as directory:
        with LocalCluster(Path(directory) / "load") as cluster:
            asyncio.run(under_load(cluster, report))
        asyncio.run(failover_tablets.idle(Path(directory) / "idle", report))
        asyncio.run(failover_tablets.with_full_logs(Path(directory) / "full", report))
        asyncio.run(failover_tablets.a_thousand(Path(directory) / "thousand", report))
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
