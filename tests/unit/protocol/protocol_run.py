"""One random run: writers, readers and second committers, then a quiet phase that settles all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from percolator.errors import CellAddress
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT
from percolator.protocol.write_set import Write
from tests.simulation.virtual_time import run_virtually

from .invariants import Read, violations
from .protocol_world import NO_FAULTS, OBSERVED, Client, Faults, Transaction, World

CELLS = [
    CellAddress(1, b"a", b"x"),
    CellAddress(1, b"a", OBSERVED),
    CellAddress(1, b"b", b"x"),
    CellAddress(2, b"a", b"x"),
    CellAddress(2, b"a", OBSERVED),
]


@dataclass
class Run:
    """What happened in the run of one seed."""

    violations: list[str] = field(default_factory=list)
    committed: int = 0
    aborted: int = 0
    buried_alive: int = 0


def run(
    seed: int,
    faults: Faults | None = None,
    *,
    second_committers: int = 2,
    one_round_share: float = 0.0,
) -> Run:
    return run_virtually(_run(seed, faults or Faults(), second_committers, one_round_share))


async def _run(seed: int, faults: Faults, second_committers: int, one_round_share: float) -> Run:
    world = World(seed, faults, one_round_share)
    transactions: list[Transaction] = []
    reads: list[Read] = []
    work = [_write(world, transactions) for _ in range(8)]
    work += [_read(world, reads) for _ in range(3)]
    work += [_commit_again(world, transactions) for _ in range(second_committers)]
    tasks = [asyncio.create_task(one) for one in work]
    await asyncio.wait(tasks, timeout=15.0)
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()  # its client has died, so it would wait forever
    await asyncio.gather(*left, return_exceptions=True)
    buried_alive = world.buried_alive
    errors = [task.exception() for task in tasks if task not in left]
    world.faults = NO_FAULTS
    await asyncio.sleep(1.0)  # late messages arrive, background work ends, locks expire
    witness = world.client()
    for cell in CELLS:
        await witness.write_stubbornly({cell: (KIND_LOCK_ONLY, b"")})
    found = violations(world.store, [*transactions, *_unlisted(world, transactions)], reads)
    found += [repr(error) for error in errors if error is not None]
    for client in world.clients:
        client.heartbeats.close()
        await client.env.background.drain(0.0)
    outcomes = [outcome for transaction in transactions for outcome in transaction.outcomes]
    return Run(found, sum(map(bool, outcomes)), outcomes.count(0), buried_alive)


def _unlisted(world: World, transactions: list[Transaction]) -> list[Transaction]:
    """The witness's own transactions: lock-only, one for each cell."""
    known = {transaction.start for transaction in transactions}
    found = []
    for cell in CELLS:
        for _, record in world.store.commits(cell):
            if record.start_timestamp not in known:
                found.append(Transaction(record.start_timestamp, {cell: (KIND_LOCK_ONLY, b"")}))
    return found


async def _write(world: World, transactions: list[Transaction]) -> None:
    chance = world.random
    await asyncio.sleep(chance.uniform(0, 0.04))
    client = world.client()
    if chance.random() < world.faults.crash:
        world.later(client.crash, chance.uniform(0, 0.02))
    start = await client.start_timestamp()
    transaction = Transaction(start, {}, world.clock.monotonic_seconds())
    for cell in chance.sample(CELLS, chance.randint(0, 2)):
        transaction.reads[cell] = await client.read(cell, start)
    for cell in chance.sample(CELLS, chance.randint(1, 3)):
        transaction.writes[cell] = _some_write(world, cell, start)
    if chance.random() < 0.4:
        transaction.weak = [CellAddress(1, b"weakly", OBSERVED)]
    transactions.append(transaction)
    await client.commit_and_settle(transaction)


def _some_write(world: World, cell: CellAddress, start: int) -> Write:
    kind = world.random.choice([KIND_PUT, KIND_PUT, KIND_PUT, KIND_DELETE, KIND_LOCK_ONLY])
    if kind != KIND_PUT:
        return kind, b""
    value = f"{cell.row!r}{start}".encode()
    return kind, value if world.random.random() < 0.5 else value[-4:]


async def _read(world: World, reads: list[Read]) -> None:
    await asyncio.sleep(world.random.uniform(0, 0.06))
    client = world.client()
    timestamp = await client.start_timestamp()
    for cell in world.random.choices(CELLS, k=8):
        value = await client.read(cell, timestamp)
        reads.append((timestamp, cell, value))


async def _commit_again(world: World, transactions: list[Transaction]) -> None:
    """Commits again, like a gateway whose caller got no answer from another one."""
    await asyncio.sleep(world.random.uniform(0.005, 0.06))
    open_ones = [transaction for transaction in transactions if not transaction.outcomes]
    if open_ones:
        client: Client = world.client()
        await client.commit_and_settle(world.random.choice(open_ones))
