"""A view that is always up to date: how many orders each customer has, and for how much.

    make example-counter-view

Many threads add, change and cancel orders. An observer keeps the sums up to date, and never reads
more than the one order that has changed. At the end, the view is compared with the sum of all
orders. `--shards 1` shows why each sum is spread over several rows: otherwise all runs collide.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from rich.console import Console

import percolator
from percolator import (
    Database,
    Observer,
    OutcomeUnknown,
    PercolatorError,
    Snapshot,
    Table,
    aio,
    codecs,
    observes,
    transactional,
)

orders = Table("orders")
order = orders.column("order", codecs.json)  # {"customer": ..., "amount": ...}
counted = orders.column("counted", codecs.json)
"""The amount that the view includes for the order: [customer, amount, shard], or nothing."""

sums = Table("sums", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
number = sums.column("number", codecs.integer)
amount = sums.column("amount", codecs.integer)

EVERYBODY = "everybody"
CUSTOMERS = ["ann", "bob", "eve", "joe"]
SHARDS = 16
CLERKS = 8


class ViewIsWrong(Exception):
    """Raised when the view differs from the orders, which the observer must rule out."""


def view(shards: int = SHARDS) -> Observer:
    """The observer, with the sums of each customer spread over this many rows."""

    @observes(order, name="view")
    async def keep(tx: aio.Transaction, row: str) -> None:
        """Subtracts what was counted for the order before, and adds its current value."""
        now = await tx.get(row, order)
        before = await tx.get(row, counted)
        after = now and [now["customer"], now["amount"], zlib.crc32(row.encode()) % shards]
        if before == after:
            return  # changed and changed back, or handled by an earlier run
        if before is not None:
            await _add(tx, *before, factor=-1)
        if after is None:
            tx.delete(row, counted)
        else:
            await _add(tx, *after, factor=1)
            tx.set(row, counted, after)

    return keep


observers: Sequence[Observer] = [view()]
"""For `percolator worker --observers examples.counter_view:observers`."""


async def _add(tx: aio.Transaction, customer: str, value: int, shard: int, *, factor: int) -> None:
    for who in (customer, EVERYBODY):
        key = (who, shard)
        tx.set(key, number, await tx.get(key, number, default=0) + factor)
        tx.set(key, amount, await tx.get(key, amount, default=0) + factor * value)


def shown(snapshot: Snapshot) -> dict[str, tuple[int, int]]:
    """The view: the number of orders and their amount, by customer and in total."""
    numbers: Counter[str] = Counter()
    amounts: Counter[str] = Counter()
    for row in snapshot.scan(sums):
        numbers[row.key[0]] += row[number]
        amounts[row.key[0]] += row[amount]
    return {who: (numbers[who], amounts[who]) for who in numbers if numbers[who]}


def recomputed(snapshot: Snapshot) -> dict[str, tuple[int, int]]:
    """The view, computed from all orders, which is the work that the view saves."""
    found: dict[str, tuple[int, int]] = {}
    for row in snapshot.scan(orders, columns=[order]):
        for who in (row[order]["customer"], EVERYBODY):
            had, worth = found.get(who, (0, 0))
            found[who] = (had + 1, worth + row[order]["amount"])
    return found


@transactional
def change_something(tx: percolator.Transaction, chance: random.Random) -> None:
    """Makes a new order, changes its amount or customer, or cancels it."""
    row = f"order-{chance.randrange(500):03d}"
    if chance.random() < 0.2:
        tx.delete(row, order)
    else:
        new = {"customer": chance.choice(CUSTOMERS), "amount": chance.randint(1, 100)}
        tx.set(row, order, new)


def work(db: Database, seconds: float) -> int:
    """Lets many clerks work at once; returns how many changes they made."""
    closing = threading.Event()

    def clerk() -> int:
        chance = random.SystemRandom()
        changes = 0
        while not closing.is_set():
            try:
                change_something(db, chance)
            except OutcomeUnknown as unknown:
                db.resolve(unknown)  # whatever the outcome, the view follows what is stored
            changes += 1
        return changes

    with ThreadPoolExecutor(CLERKS) as threads:
        working = [threads.submit(clerk) for _ in range(CLERKS)]
        time.sleep(seconds)
        closing.set()
    return sum(one.result() for one in working)


def main(
    address: Annotated[str | None, typer.Option(help="host:port of a master.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to change orders.", min=0.1)] = 5.0,
    shards: Annotated[int, typer.Option(help="Rows per sum.", min=1)] = SHARDS,
) -> None:
    """Change orders with many threads while an observer keeps the view up to date."""
    console = Console()
    try:
        with percolator.connect(address, description="a view of orders") as db:
            db.create_table(orders, exist_ok=True)
            db.create_table(sums, exist_ok=True)
            with db.run_observers([view(shards)]) as worker:
                changes = work(db, seconds)
                db.wait_for_observers()
                (counters,) = worker.counters.values()
            with db.snapshot() as snapshot:
                found, right = shown(snapshot), recomputed(snapshot)
    except PercolatorError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if found != right:
        raise ViewIsWrong(f"the view has {found}, the orders add up to {right}")
    console.print(
        f"{changes:,} changes; {counters.commits:,} runs, {counters.conflicts:,} conflicts"
    )
    for who, (had, worth) in sorted(found.items()):
        console.print(f"{who:10} {had:5,} orders {worth:8,}")
    console.print("the view is what all orders add up to")


if __name__ == "__main__":
    typer.run(main)
