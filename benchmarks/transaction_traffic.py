"""The traffic of the transaction benchmark: raw, transactional and blocking, on the same tables.

Raw means without transactions: the same rows go through the same dispatchers to the same tablets,
as one conditional mutation or one read of one cell. The cells of a slice are distinct, so nothing
conflicts, and all of them exist.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

import percolator
from benchmarks.transaction_cost import Cost, Meter
from percolator import aio, codecs
from percolator.errors import InvariantViolation
from percolator.formats.records import KIND_PUT, WRITE_HEADER, timestamp_bytes
from percolator.routing.cells import APPLIED, CellMutation, ListedStep, RowRequest
from percolator.schema import Column, Table
from percolator.v1.cells_pb2 import SPACE_WRITE
from percolator.v1.tabletserver_pb2 import Change, Condition, Mutation, RowRead, StepList

CALL_SECONDS = 60.0
STEPS_PER_FILL = 4_000
FILLS_IN_FLIGHT = 2
COLUMN = "balance"
VALUES = 100
"""Each of so many balances is that of an equal share of the rows."""

Operation = Callable[[int], Awaitable[None]]


@dataclass(frozen=True)
class Accounts:
    """A table with `rows` rows, whose values are numbers."""

    table: Table[str]
    balance: Column[int]
    rows: int

    @classmethod
    def of(cls, name: str, rows: int) -> Accounts:
        table = Table(name)
        return cls(table, table.column(COLUMN, codecs.integer), rows)

    def splits(self, tablets: int) -> list[str]:
        """Where to split it into this many tablets of equal size."""
        return [row_key(self.rows * number // tablets) for number in range(1, tablets)]

    def some(self, count: int, chance: random.Random) -> list[int]:
        """Distinct rows in random order."""
        return chance.sample(range(self.rows), count)


def row_key(number: int) -> str:
    return f"{number:016d}"


class Traffic:
    """Slices of one kind of work each, shared by a number of tasks."""

    def __init__(self, db: aio.Database, meter: Meter) -> None:
        self._db = db
        # Raw operations need internals that users of transactions never see.
        self._engine = db._engine
        self._meter = meter
        self._chance = random.Random(1)

    async def fill(self, accounts: Accounts) -> None:
        """Commits a value for every row, as a bulk load would."""
        table_id = await self._table_id(accounts)
        commit = await self._db.timestamp()
        numbers = iter(range(accounts.rows))

        async def worker() -> None:
            while portion := list(islice(numbers, STEPS_PER_FILL)):
                steps = [
                    CellMutation(table_id, RawWrite.of(row_key(number), commit, number % VALUES))
                    for number in portion
                ]
                answers = await self._engine.env.cells.mutate(steps, self._deadline())
                _require(answers.count(APPLIED) == len(steps), "a row was not filled")

        await asyncio.gather(*(worker() for _ in range(FILLS_IN_FLIGHT)))

    # ------------------------------------------------------------------ raw

    async def raw_writes(self, accounts: Accounts, count: int, in_flight: int) -> Cost:
        """One condition (no newer version), and one put of the bytes that a commit writes."""
        table_id = await self._table_id(accounts)
        commit = await self._db.timestamp()
        cells = self._engine.env.cells

        async def write(number: int) -> None:
            step = CellMutation(table_id, RawWrite.of(row_key(number), commit))
            (answer,) = await cells.mutate((step,), self._deadline())
            _require(answer is APPLIED, "a raw write was refused")

        return await self._measured(accounts, count, in_flight, write)

    async def raw_reads(self, accounts: Accounts, count: int, in_flight: int) -> Cost:
        table_id = await self._table_id(accounts)
        timestamp = await self._db.timestamp()
        cells = self._engine.env.cells
        column = accounts.balance.name

        async def read(number: int) -> None:
            row = row_key(number).encode()
            request = RowRead(row=row, columns=(column,), timestamp=timestamp)
            (answer,) = await cells.read((RowRequest(table_id, request),), self._deadline())
            _require(column in answer.found, "a row was not found")

        return await self._measured(accounts, count, in_flight, read)

    # ------------------------------------------------------------------ transactions

    async def write_only(self, accounts: Accounts, count: int, in_flight: int) -> Cost:
        db, balance = self._db, accounts.balance

        async def write(number: int) -> None:
            async with db.transaction() as tx:
                tx.set(row_key(number), balance, number)

        return await self._measured(accounts, count, in_flight, write)

    async def write_two(self, accounts: Accounts, count: int, in_flight: int) -> Cost:
        """Two cells in each transaction, half of the table apart: in different tablets."""
        db, balance, half = self._db, accounts.balance, accounts.rows // 2

        async def write(number: int) -> None:
            async with db.transaction() as tx:
                tx.set(row_key(number), balance, number)
                tx.set(row_key(number + half), balance, number)

        return await self._measured(replace(accounts, rows=half), count, in_flight, write)

    async def read_write(self, accounts: Accounts, count: int, in_flight: int) -> Cost:
        db, balance = self._db, accounts.balance

        async def add_one(number: int) -> None:
            row = row_key(number)
            async with db.transaction() as tx:
                tx.set(row, balance, (await tx.get(row, balance, default=0)) + 1)

        return await self._measured(accounts, count, in_flight, add_one)

    async def read_write_with_entry(
        self, accounts: Accounts, entries: Table[str], count: int, in_flight: int
    ) -> Cost:
        """As `read_write`, with an entry by value, kept by hand in another table."""
        db, balance, entry = self._db, accounts.balance, entries.column("row", codecs.text)

        async def add_one(number: int) -> None:
            row = row_key(number)
            async with db.transaction() as tx:
                before = await tx.get(row, balance, default=0)
                tx.set(row, balance, before + 1)
                tx.delete(f"{before:08d}{row}", entry)
                tx.set(f"{before + 1:08d}{row}", entry, row)

        return await self._measured(accounts, count, in_flight, add_one)

    async def snapshot_reads(self, accounts: Accounts, count: int, in_flight: int) -> Cost:
        """All reads at one timestamp."""
        balance = accounts.balance
        async with self._db.snapshot() as snapshot:

            async def read(number: int) -> None:
                _require(await snapshot.get(row_key(number), balance) is not None, "no such row")

            return await self._measured(accounts, count, in_flight, read)

    async def lone_reads(self, accounts: Accounts, count: int, in_flight: int) -> Cost:
        """Each read in its own snapshot."""
        db, balance = self._db, accounts.balance

        async def read(number: int) -> None:
            async with db.snapshot() as snapshot:
                _require(await snapshot.get(row_key(number), balance) is not None, "no such row")

        return await self._measured(accounts, count, in_flight, read)

    async def single_reads(self, accounts: Accounts, count: int, in_flight: int) -> Cost:
        """Each read with `db.get`, which needs no timestamp."""
        db, balance = self._db, accounts.balance

        async def read(number: int) -> None:
            _require(await db.get(row_key(number), balance) is not None, "no such row")

        return await self._measured(accounts, count, in_flight, read)

    async def round_trips(self, accounts: Accounts) -> tuple[int, int]:
        """Round trips of a single transaction that only writes, and of one that reads first."""
        row, balance = row_key(0), accounts.balance
        async with self._db.transaction() as writing:
            writing.set(row, balance, 1)
        async with self._db.transaction() as reading:
            reading.set(row, balance, (await reading.get(row, balance, default=0)) + 1)
        return writing.statistics.round_trips, reading.statistics.round_trips

    # ------------------------------------------------------------------ slices

    async def _measured(
        self, accounts: Accounts, count: int, in_flight: int, operation: Operation
    ) -> Cost:
        numbers = iter(accounts.some(count, self._chance))

        async def worker() -> None:
            for number in numbers:
                await operation(number)

        with self._meter.measured(count) as cost:
            await asyncio.gather(*(worker() for _ in range(in_flight)))
        return cost

    async def _table_id(self, accounts: Accounts) -> int:
        return (await self._engine.table(accounts.table, self._deadline())).table_id

    def _deadline(self) -> float:
        return self._engine.now() + CALL_SECONDS


class RawWrite(ListedStep):
    """A commit record written without a transaction, unless there is one that is as new."""

    __slots__ = ()

    kind = StepList.KIND_WRITE

    @classmethod
    def of(cls, row: str, commit: int, value: int = 1) -> RawWrite:
        record = WRITE_HEADER.pack(commit - 1, KIND_PUT) + timestamp_bytes(value)
        return cls(row.encode(), COLUMN.encode(), record, 0, commit)

    def mutation(self) -> Mutation:
        step = Mutation(row=self.row, column=self.column)
        step.conditions.add(
            space=SPACE_WRITE,
            expectation=Condition.EXPECTATION_ABSENT,
            from_timestamp=self.commit,
        )
        step.changes.add(
            kind=Change.KIND_PUT, space=SPACE_WRITE, timestamp=self.commit, value=self.value
        )
        return step


def scans_of_one_percent(address: str, meter: Meter, accounts: Accounts) -> dict[str, Cost]:
    """Finds, and counts, the rows with one of the balances."""
    table, balance, wanted = accounts.table, accounts.balance, VALUES - 1
    costs: dict[str, Cost] = {}
    with percolator.connect(address) as db, db.snapshot() as snapshot:
        ways: dict[str, Callable[[], int]] = {
            "filtered in the client": lambda: sum(
                row[balance] >= wanted for row in snapshot.scan(table, columns=[balance])
            ),
            "filtered by tablet servers": lambda: sum(
                1 for _ in snapshot.scan(table, columns=[balance], where=balance >= wanted)
            ),
            "counted by tablet servers": lambda: snapshot.count(table, where=balance >= wanted),
        }
        for name, find in ways.items():
            with meter.measured(accounts.rows) as cost:
                found = find()
            costs[name] = cost
            _require(found == accounts.rows // VALUES, f"{name}: {found} rows")
    return costs


def threads_read_write(
    address: str, meter: Meter, accounts: Accounts, count: int, threads: int
) -> Cost:
    """Runs blocking transactions in `threads` threads of this process."""
    rows = accounts.some(count, random.Random(1))
    balance = accounts.balance
    with percolator.connect(address) as db, ThreadPoolExecutor(threads) as pool:

        def add_one(row: str) -> None:
            with db.transaction() as tx:
                tx.set(row, balance, tx.get(row, balance, default=0) + 1)

        def worker(numbers: Iterator[int]) -> None:
            for number in numbers:
                add_one(row_key(number))

        add_one(row_key(rows[0]))  # from here on the table is cached
        with meter.measured(count) as cost:
            # Each thread has its own share, because an iterator cannot be shared by threads.
            shares = [pool.submit(worker, iter(rows[first::threads])) for first in range(threads)]
            for share in shares:
                share.result()
    return cost


def lone_latencies(address: str, accounts: Accounts, count: int) -> list[float]:
    """Seconds taken by each of `count` blocking read-write transactions, one after another."""
    rows = accounts.some(count + 1, random.Random(2))
    balance, seconds = accounts.balance, []
    with percolator.connect(address) as db:
        for number in rows:
            began = time.perf_counter()
            with db.transaction() as tx:
                row = row_key(number)
                tx.set(row, balance, tx.get(row, balance, default=0) + 1)
            seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolation(f"the benchmark measures nothing: {message}")
