"""The traffic of the tablet benchmark: prewrites, commits, reads and scans over real gRPC.

A slice is a fixed number of rows, sent in batches of one size with a few calls in flight, as the
dispatcher does. Its cost is the CPU time of both processes, including all their threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from percolator.errors import CellAddress, InvariantViolation
from percolator.formats.records import KIND_PUT
from percolator.protocol.write_set import WriteSteps
from percolator.routing.catalog import TableSchema
from percolator.routing.cells import CellMutation, ListedStep
from percolator.routing.lanes import fill_list
from percolator.services.local.process import ServiceProcess
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork

CALLS_IN_FLIGHT = 4
CALL_SECONDS = 60.0
COLUMN = b"c"
VALUE = b"v" * 100
TABLE_ID = 1
EPOCH = 2
"""Higher than the epoch of a populated directory."""
TTL_MILLISECONDS = 3_000
FIRST_TIMESTAMP = 1_760_000_000_000 << 18


@dataclass(frozen=True)
class Cost:
    """Cost of one slice."""

    rows: int
    seconds: float
    server_seconds: float
    client_seconds: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.rows + other.rows,
            self.seconds + other.seconds,
            self.server_seconds + other.server_seconds,
            self.client_seconds + other.client_seconds,
        )

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds

    @property
    def server_micros(self) -> float:
        """Server CPU per row."""
        return self.server_seconds / self.rows * 1e6

    @property
    def client_micros(self) -> float:
        """Client CPU per row."""
        return self.client_seconds / self.rows * 1e6


class Served:
    """A running tablet server with open tablets, and a client of it."""

    def __init__(self, process: ServiceProcess, network: GrpcNetwork, tablets: list[int]) -> None:
        self.process = process
        self.tablets = tablets
        self._mutate = network.unary(process.address, methods.MUTATE)
        self._read = network.unary(process.address, methods.READ)
        self._open = network.unary(process.address, methods.OPEN_TABLET)
        self._scan = network.stream(process.address, methods.SCAN)
        self._clock = FIRST_TIMESTAMP
        self._next_row = 0
        self._targets = {
            tablet: pb.TabletTarget(tablet_id=tablet, epoch=EPOCH) for tablet in tablets
        }

    async def open(self) -> None:
        """Opens all tablets. Each holds the whole key range: only their ids differ."""
        for tablet in self.tablets:
            request = pb.OpenTabletRequest(table_id=TABLE_ID, tablet_id=tablet, epoch=EPOCH)
            await self._open(request, CALL_SECONDS)

    def new_rows(self, count: int) -> list[bytes]:
        """Unused rows, spread over the key space."""
        first, self._next_row = self._next_row, self._next_row + count
        return [row_key(number) for number in range(first, first + count)]

    async def prewrite(self, rows: list[bytes], batch: int) -> tuple[Cost, int]:
        """Locks the rows; returns the cost, and the start timestamp of their transaction."""
        start = self._timestamp()
        write = _write(rows, start)

        def step(row: bytes) -> CellMutation:
            return write.prewrite_step(_cell(row), start + 1, TTL_MILLISECONDS)

        return await self._mutated(rows, batch, step), start

    async def commit(self, rows: list[bytes], batch: int, start: int) -> Cost:
        """Commits and unlocks what `prewrite` locked."""
        commit = self._timestamp()
        write, schema = _write(rows, start), TableSchema()

        def step(row: bytes) -> CellMutation:
            return write.commit_secondary_step(_cell(row), schema, commit)

        return await self._mutated(rows, batch, step)

    async def read(self, rows: list[bytes], batch: int, at: int | None = None) -> Cost:
        """Reads the value of each row: the newest one, or the one at a timestamp."""
        timestamp = self._timestamp() if at is None else at

        async def call(chunk: list[bytes]) -> None:
            request = pb.ReadRequest()
            for tablet, share in self._shares(chunk):
                cells = request.batches.add(target=self._targets[tablet]).cells
                cells.rows.extend(share)
                cells.columns.extend([COLUMN] * len(share))
                cells.timestamps.extend([timestamp] * len(share))
            response = await self._read(request, CALL_SECONDS)
            for result in response.batches:
                _require(not result.HasField("error"), result.error.message)
            found = sum(len(result.found.values) for result in response.batches)
            _require(found == len(chunk), f"found {found} of {len(chunk)} rows")

        return await self._measured(rows, batch, call)

    async def scan(self, rows_expected: int) -> Cost:
        """Reads the whole first tablet, page by page."""
        request = pb.ScanRequest(
            target=self._targets[self.tablets[0]], all_columns=True, timestamp=self._timestamp()
        )

        async def call(_: list[bytes]) -> None:
            rows = 0
            async for page in self._scan(request, CALL_SECONDS):
                _require(not page.HasField("error"), page.error.message)
                rows += len(page.found.rows)
            _require(rows == rows_expected, f"scanned {rows} of {rows_expected} rows")

        one_call = await self._measured([b""], 1, call)
        return Cost(
            rows_expected, one_call.seconds, one_call.server_seconds, one_call.client_seconds
        )

    async def _mutated(
        self, rows: list[bytes], batch: int, step: Callable[[bytes], CellMutation]
    ) -> Cost:
        async def call(chunk: list[bytes]) -> None:
            request = pb.MutateRequest()
            for tablet, share in self._shares(chunk):
                steps = [step(row).mutation for row in share]
                listed = request.batches.add(target=self._targets[tablet]).steps
                fill_list(listed, [one for one in steps if isinstance(one, ListedStep)])
            response = await self._mutate(request, CALL_SECONDS)
            for result in response.batches:
                _require(not result.HasField("error"), result.error.message)
                _require(not result.unapplied, "a step was not applied")
            applied = sum(result.mutations for result in response.batches)
            _require(applied == len(chunk), f"applied {applied} of {len(chunk)} steps")

        return await self._measured(rows, batch, call)

    def _shares(self, chunk: list[bytes]) -> Iterator[tuple[int, list[bytes]]]:
        """Splits a batch among the tablets; a row always goes to the same tablet."""
        if len(self.tablets) == 1:
            yield self.tablets[0], chunk
            return
        shares: dict[int, list[bytes]] = {}
        for row in chunk:
            shares.setdefault(self.tablets[int(row[-6:]) % len(self.tablets)], []).append(row)
        yield from shares.items()

    async def _measured(
        self, rows: list[bytes], batch: int, call: Callable[[list[bytes]], Awaitable[None]]
    ) -> Cost:
        chunks = iter([rows[at : at + batch] for at in range(0, len(rows), batch)])

        async def worker() -> None:
            for chunk in chunks:
                await call(chunk)

        clock = process_clock(self.process.pid)
        began = (time.perf_counter(), time.clock_gettime(clock), time.process_time())
        await asyncio.gather(*(worker() for _ in range(CALLS_IN_FLIGHT)))
        ended = (time.perf_counter(), time.clock_gettime(clock), time.process_time())
        wall, server, client = (b - a for a, b in zip(began, ended, strict=True))
        return Cost(len(rows), wall, server, client)

    def _timestamp(self) -> int:
        self._clock += 1 << 18
        return self._clock


def _cell(row: bytes) -> CellAddress:
    return CellAddress(TABLE_ID, row, COLUMN)


def _write(rows: list[bytes], start: int) -> WriteSteps:
    """A transaction that writes all these rows."""
    return WriteSteps(start, {_cell(row): (KIND_PUT, VALUE) for row in rows}, len(VALUE))


def row_key(number: int) -> bytes:
    """A unique key of 16 bytes; rows made one after another are not neighbours in the key space."""
    return b"%010d%06d" % (number * 2_654_435_761 % 10_000_000_000, number % 1_000_000)


def process_clock(pid: int) -> int:
    """The Linux clock of another process's CPU time, in nanoseconds (`psutil` only has ticks)."""
    return (~pid << 3) | 2


@asynccontextmanager
async def served(name: str, directory: Path, tablets: list[int]) -> AsyncIterator[Served]:
    """A tablet server on `directory`/store with these tablets open."""
    (directory / "store").mkdir(parents=True, exist_ok=True)
    process = ServiceProcess(
        name,
        "tabletserver",
        ["--store", str(directory / "store"), "--tablets-warn", "1000"],
        logs=directory,
        run=directory,
    )
    process.start()
    network = GrpcNetwork()
    try:
        process.wait_ready(30)
        server = Served(process, network, tablets)
        await server.open()
        yield server
    finally:
        await network.close()
        process.ask_to_stop()
        process.wait_stopped()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolation(f"the benchmark measures nothing: {message}")
