"""The client process of a soak run: `python -m tests.soak.client SETTINGS`, which are JSON.

It works until SIGTERM, and writes a line of JSON per interval about itself and about how long its
operations took. What it needs is sampled like every other process: the library may leak as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, TextIO

import psutil

from percolator import Table, Transaction, aio, codecs, observes
from percolator.errors import PercolatorError
from percolator.v1 import gateway_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.world import Random
from tests.soak.series import MEBIBYTE

# The tables of a soak run, and the observers that its workers run: a chain of two.

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)

orders = Table("orders")
placed = orders.column("placed", codecs.integer)
packed = orders.column("packed", codecs.integer)
shipped = orders.column("shipped", codecs.integer)

arrivals = Table("arrivals")
"""Rows come and go: as many are deleted as are written."""
item = arrivals.column("item", codecs.raw)

notes = Table("notes")
"""Written by way of a gateway's own transactions, as programs in other languages do."""
text = notes.column("text", codecs.raw)


@observes(placed, name="pack")
async def pack(tx: aio.Transaction, row: str) -> None:
    await tx.set(row, packed, await tx.get(row, placed, default=0))


@observes(packed, name="ship")
def ship(tx: Transaction, row: str) -> None:
    """A blocking one, so that workers use threads."""
    tx.set(row, shipped, tx.get(row, packed, default=0))


observers = [pack, ship]


_P99_OPERATIONS_MIN = 20


@dataclass(frozen=True)
class Settings:
    """Where the cluster is, and where to report."""

    address: str
    gateway: str
    report: str
    interval_seconds: float

    def argument(self) -> str:
        return json.dumps(asdict(self))


async def prepare(address: str) -> None:
    """Creates the tables, so that workers can begin."""
    async with aio.connect(address) as database:
        for table, splits in TABLES:
            await database.create_table(table, splits)


async def live(settings: Settings, report: TextIO) -> None:
    async with (
        aio.connect(settings.address, description="soak") as near,
        aio.connect(settings.gateway, description="soak by gateway") as far,
    ):
        traffic = Traffic(near, far, settings.address, settings.gateway)
        await traffic.fill()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, traffic.stop)
        reporting = asyncio.create_task(_report(traffic, report, settings.interval_seconds))
        try:
            await traffic.run()
        finally:
            reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reporting


async def _report(traffic: Traffic, file: TextIO, interval_seconds: float) -> None:
    process = psutil.Process()
    while True:
        await asyncio.sleep(interval_seconds)
        took, traffic.took = traffic.took, {}
        line: dict[str, Any] = {
            "at": time.monotonic(),
            "memory": process.memory_info().rss / MEBIBYTE,
            "descriptors": process.num_fds(),
            "tasks": len(asyncio.all_tasks()),
            "threads": len(os.listdir("/proc/self/task")),
            "milliseconds": {name: _percentiles(seconds) for name, seconds in took.items()},
            "done": traffic.done,
            "failed": traffic.failed,
        }
        file.write(json.dumps(line) + "\n")
        file.flush()


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """The median and, if there are enough, the 99th percentile, in milliseconds."""
    found = {"median": 1000 * median(seconds)}
    if len(seconds) >= _P99_OPERATIONS_MIN:
        found["p99"] = 1000 * quantiles(seconds, n=100, method="inclusive")[98]
    return found


# The operations of a soak run, each repeated at a steady pace by a few sessions.
#
# All work on a fixed set of rows, so that what is stored, and what is remembered, has a size to
# level off at. Whatever is seen is checked where it costs nothing: the sum of all accounts never
# changes.

ACCOUNTS = 500
OPENING_BALANCE = 100
ORDERS = 100
NOTES = 200
ARRIVALS = 300
ARRIVAL_ROWS = 1_200
"""Rows that come again: a tablet remembers 16,384 recently written cells, and with new ones all
the time that would take half an hour to fill."""

_OBSERVED_SECONDS_MAX = 30.0
_CALL_SECONDS = 10.0
_PAST = timedelta(seconds=4)
_PIN_SECONDS = 3.0


class BrokenPromise(Exception):
    """Something was read that must never be read."""


class Operation(NamedTuple):
    """One kind of work."""

    name: str
    sessions: int
    pause_seconds: float
    run: Callable[[int], Awaitable[None]]
    """Called with the number of the session."""


class Traffic:
    """The sessions of one client process, and what they have measured since the last report."""

    def __init__(self, near: aio.Database, far: aio.Database, address: str, gateway: str) -> None:
        """`near` is connected to the cluster, `far` to its gateways."""
        self._near = near
        self._far = far
        self._addresses = (address, gateway)
        self._gateways = gateway.split(",")
        self._network = GrpcNetwork()
        self._random = Random("soak")
        self._arrived: deque[str] = deque()
        self._arrivals = iter(range(1 << 60))
        self._numbers = iter(range(1 << 60))
        self._stopped = asyncio.Event()
        self.took: dict[str, list[float]] = {}
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        """Errors of the cluster, which is disturbed: by operation and type."""
        self.operations = (
            Operation("transfer", 4, 0.04, lambda _: self._transfer(self._near)),
            Operation("transfer by gateway", 2, 0.08, lambda _: self._transfer(self._far)),
            Operation("read", 2, 0.02, lambda _: self._read()),
            Operation("scan", 1, 0.5, lambda _: self._scan(None)),
            Operation("scan of the past", 1, 1.0, lambda _: self._scan(_PAST)),
            Operation("lock", 2, 0.1, lambda _: self._lock()),
            Operation("observed", 2, 0.1, self._order),
            Operation("arrival", 1, 0.05, lambda _: self._arrive()),
            Operation("gateway transaction", 2, 0.1, self._note),
            Operation("table", 1, 3.0, lambda _: self._table()),
            Operation("connection", 1, 2.0, lambda _: self._connection()),
            Operation("pin", 1, 5.0, lambda _: self._pin()),
        )

    # ------------------------------------------------------------------ sessions

    async def run(self) -> None:
        """Returns when stopped."""
        try:
            async with asyncio.TaskGroup() as sessions:
                for operation in self.operations:
                    for number in range(operation.sessions):
                        sessions.create_task(self._repeat(operation, number))
        finally:
            await self._network.close()

    def stop(self) -> None:
        self._stopped.set()

    async def _repeat(self, operation: Operation, number: int) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                await operation.run(number)
            except PercolatorError as error:
                self.failed[f"{operation.name}: {type(error).__name__}"] += 1
            else:
                self.done[operation.name] += 1
                self.took.setdefault(operation.name, []).append(time.monotonic() - began)
            # Not at one beat, which all would share.
            pause = operation.pause_seconds * (0.5 + self._random.random())
            try:
                async with asyncio.timeout(pause):
                    await self._stopped.wait()
            except TimeoutError:
                continue

    # ------------------------------------------------------------------ operations

    async def fill(self) -> None:
        """Writes the rows that all others work on, until they are in the past that is scanned."""
        rows = [f"{number:04d}" for number in range(ACCOUNTS)]
        await self._near.set_many((row, {balance: OPENING_BALANCE}) for row in rows)
        await asyncio.sleep(2 * _PAST.total_seconds())

    def _account(self) -> str:
        return f"{self._random.randrange(ACCOUNTS):04d}"

    async def _transfer(self, database: aio.Database) -> None:
        source, target = self._account(), self._account()

        async def body(tx: aio.Transaction) -> None:
            await tx.set(source, balance, await tx.get(source, balance, default=0) - 1)
            await tx.set(target, balance, await tx.get(target, balance, default=0) + 1)

        await database.run(body)

    async def _read(self) -> None:
        async with self._near.snapshot() as snapshot:
            await snapshot.get(self._account(), balance)

    async def _scan(self, ago: timedelta | None) -> None:
        at = None if ago is None else datetime.now(UTC) - ago
        async with self._near.snapshot(at) as snapshot:
            found = [row[balance] async for row in snapshot.scan(accounts)]
        if (len(found), sum(found)) != (ACCOUNTS, ACCOUNTS * OPENING_BALANCE):
            raise BrokenPromise(f"{len(found)} accounts with {sum(found)} in all at {at or 'now'}")

    async def _lock(self) -> None:
        row, others = self._account(), [self._account() for _ in range(2)]

        async def body(tx: aio.Transaction) -> None:
            for other in others:
                await tx.lock(other, balance)
            await tx.set(row, balance, await tx.get(row, balance, default=0))

        await self._near.run(body)

    async def _order(self, session: int) -> None:
        """Until both observers have run."""
        row = f"{session}-{self._random.randrange(ORDERS):04d}"
        number = next(self._numbers)

        async def body(tx: aio.Transaction) -> None:
            await tx.set(row, placed, number)

        await self._near.run(body)
        deadline = time.monotonic() + _OBSERVED_SECONDS_MAX
        while time.monotonic() < deadline:
            async with self._near.snapshot() as snapshot:
                if await snapshot.get(row, shipped) == number:
                    return
            await asyncio.sleep(0.01)
        raise BrokenPromise(f"order {row} was not shipped within {_OBSERVED_SECONDS_MAX:g} s")

    async def _arrive(self) -> None:
        row = f"{next(self._arrivals) % ARRIVAL_ROWS:04d}"
        self._arrived.append(row)
        leaving = self._arrived.popleft() if len(self._arrived) > ARRIVALS else None

        async def body(tx: aio.Transaction) -> None:
            await tx.set(row, item, b"x" * 200)
            if leaving is not None:
                await tx.delete(leaving, item)

        await self._near.run(body)

    async def _note(self, session: int) -> None:
        address = self._gateways[session % len(self._gateways)]
        row = b"%d-%04d" % (session, self._random.randrange(NOTES))
        begin, get, commit = (
            self._network.unary(address, method)
            for method in (methods.BEGIN, methods.GET, methods.COMMIT)
        )
        start = (await begin(pb.BeginRequest(), _CALL_SECONDS)).start_timestamp
        query = pb.RowQuery(table=notes.name, row=row, columns=[text.name])
        await get(pb.GetRequest(start_timestamp=start, rows=[query]), _CALL_SECONDS)
        write = pb.CellWrite(
            kind=pb.CellWrite.KIND_PUT,
            table=notes.name,
            row=row,
            column=text.name,
            value=b"y" * 100,
        )
        await commit(pb.CommitRequest(start_timestamp=start, writes=[write]), _CALL_SECONDS)

    async def _table(self) -> None:
        table = Table(f"for-a-moment-{next(self._numbers)}")
        column = table.column("value", codecs.integer)
        await self._near.create_table(table, ["5"])
        await self._near.set_many((str(number), {column: number}) for number in range(10))
        async with self._near.snapshot() as snapshot:
            found = [row[column] async for row in snapshot.scan(table)]
        if found != list(range(10)):
            raise BrokenPromise(f"{table.name} has {found}")
        await self._near.drop_table(table)

    async def _connection(self) -> None:
        address = self._addresses[next(self._numbers) % 2]
        async with (
            aio.connect(address, description="soak: for a moment") as database,
            database.snapshot() as snapshot,
        ):
            await snapshot.get(self._account(), balance)

    async def _pin(self) -> None:
        async with self._near.pin(ttl=_PIN_SECONDS, description="soak") as pin:
            await asyncio.sleep(_PIN_SECONDS / 2)
            async with self._near.snapshot(pin.at) as snapshot:
                await snapshot.get(self._account(), balance)


TABLES: tuple[tuple[Table[str], list[str]], ...] = (
    (accounts, [f"{ACCOUNTS * part // 4:04d}" for part in range(1, 4)]),
    (orders, ["1"]),
    (arrivals, []),
    (notes, ["1"]),
)
"""The tables, and where they are split."""


if __name__ == "__main__":
    given = Settings(**json.loads(sys.argv[1]))
    with Path(given.report).open("a") as opened:
        asyncio.run(live(given, opened))
