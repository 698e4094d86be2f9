"""A bank: many threads transfer money while others keep checking that none is lost.

    make cluster-up
    .venv/bin/python -m examples.bank --seconds 10

It shows the blocking API: a `@transactional` function, one `Database` for all threads, snapshots,
and what to do about a commit whose outcome is unknown. You can run it as often as you like, and in
several processes at once; they all work on the same accounts.
"""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Annotated

import typer
from rich.console import Console

import percolator
from percolator import (
    Database,
    OutcomeUnknown,
    PercolatorError,
    Table,
    Transaction,
    codecs,
    transactional,
)

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)

NAMES = [f"account-{number:03d}" for number in range(120)]
OPENING_BALANCE = 100
TOTAL = OPENING_BALANCE * len(NAMES)

TELLERS = 16
AUDITORS = 2


class MoneyLost(Exception):
    """Raised when an audit finds a wrong total, which a transactional store must rule out."""


@transactional
def open_accounts(tx: Transaction) -> None:
    """Opens all accounts or none, so an interruption never leaves a bank with half its money."""
    if tx.get(NAMES[0], balance) is not None:
        return  # an earlier run opened them and left its balances
    for name in NAMES:
        tx.set(name, balance, OPENING_BALANCE)


@transactional
def transfer(tx: Transaction, source: str, target: str, amount: int) -> bool:
    """Moves money if there is enough. After a conflict, it is retried on a fresh snapshot."""
    has = tx.get(source, balance, default=0)
    if has < amount:
        return False
    tx.set(source, balance, has - amount)
    tx.set(target, balance, tx.get(target, balance, default=0) + amount)
    return True


def total(db: Database) -> int:
    """Adds up all accounts at one snapshot, however much is transferred meanwhile."""
    with db.snapshot() as snapshot:
        return sum(row.get(balance, 0) for row in snapshot.scan(accounts, columns=[balance]))


class Bank:
    """Tellers and auditors at work."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._closing = threading.Event()
        self._counting = threading.Lock()
        self.transfers = 0
        self.audits = 0
        # The table is split into six tablets, which the cluster spreads over its tablet servers.
        db.create_table(accounts, splits=NAMES[20::20], exist_ok=True)
        open_accounts(db)

    def work(self, seconds: float) -> None:
        """Returns when all threads are done; raises the error of the first that failed."""
        with ThreadPoolExecutor(TELLERS + AUDITORS) as threads:
            working = [threads.submit(self._transfer_money) for _ in range(TELLERS)]
            working += [threads.submit(self._audit) for _ in range(AUDITORS)]
            wait(working, seconds, FIRST_EXCEPTION)
            self._closing.set()
        for one in working:
            one.result()

    def _transfer_money(self) -> None:
        chance = random.SystemRandom()
        while not self._closing.is_set():
            source, target = chance.sample(NAMES, 2)
            try:
                transfer(self._db, source, target, chance.randint(1, 10))
            except OutcomeUnknown as unknown:
                # The servers fell silent in the middle of the commit. Retrying could transfer the
                # money twice, so ask first. Here, either outcome is fine once it is known.
                self._db.resolve(unknown)
            with self._counting:
                self.transfers += 1

    def _audit(self) -> None:
        while not self._closing.is_set():
            found = total(self._db)
            if found != TOTAL:
                raise MoneyLost(f"an audit found {found} instead of {TOTAL}")
            with self._counting:
                self.audits += 1


def main(
    address: Annotated[str | None, typer.Option(help="host:port of a master.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to transfer.", min=0.1)] = 10.0,
) -> None:
    """Transfer money with many threads, and audit it."""
    console = Console()
    try:
        with percolator.connect(address, description="the bank") as db:
            bank = Bank(db)
            bank.work(seconds)
            console.print(f"{bank.transfers:,} transfers, {bank.audits:,} audits")
            console.print(f"{total(db):,} in all accounts together: nothing was made or lost")
    except PercolatorError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
