"""A million cells are exported while they are written, collected, split and moved, and servers and
the export itself are killed. Imported elsewhere, they are as they were at that time."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from percolator import Table, Timestamp, codecs
from percolator.aio import Database, Transaction
from percolator.aio.bulk_load import BulkLoad, LoadPlan
from percolator.aio.connecting import connect
from percolator.backup import export_files, importer
from percolator.errors import PercolatorError
from percolator.services.local.cluster import LocalCluster
from percolator.world import Random

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

CELLS = 1_000_000
SPARE = 20_000
"""Rows that may be deleted."""
TABLETS = 8
WRITERS = 4
PIN_TTL = 15.0
SETTINGS = {
    "PERCOLATOR_LOCKSERVICE_TTL_MILLISECONDS_MAX": "15000",
    "PERCOLATOR_MASTER_COLLECTION_SECONDS": "1",
    "PERCOLATOR_MASTER_RETENTION_SECONDS": "5",
    "PERCOLATOR_MASTER_RETENTION_MIN_SECONDS": "1",
}
SECONDS = 240.0
items = Table("items", key=codecs.raw)
a, b = items.column("a", codecs.raw), items.column("b", codecs.raw)

console = Console()


@pytest.fixture(name="source")
def _source(tmp_path: Path) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        with LocalCluster(tmp_path / "source", tablet_servers=2) as started:
            yield started


@pytest.fixture(name="target")
def _target(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "target", tablet_servers=1) as started:
        yield started


async def test_a_million_cells_come_back_as_of_one_timestamp(
    source: LocalCluster, target: LocalCluster, tmp_path: Path
) -> None:
    directory = tmp_path / "export"
    async with connect(source.address) as db:
        await fill(db)
        async with Writers(db) as writers, db.pin(ttl=PIN_TTL) as pin:
            before = writers.commits
            seconds = await exported(source, directory, pin.at)
            wanted, cells = await scan_hash(db, pin.at)
            pin.check()
        commits = writers.commits - before
        now, _ = await scan_hash(db)
    assert now != wanted
    assert commits > 10
    console.print(f"\n{cells:,} cells exported in {seconds:.1f} s, beside {commits:,} commits")
    made = await asyncio.to_thread(importer.verify, directory)
    assert made.cells == cells >= CELLS
    seconds = await imported(target, directory)
    async with connect(target.address) as db:
        assert await scan_hash(db) == (wanted, cells)
    console.print(f"imported in {seconds:.1f} s")


async def fill(db: Database) -> None:
    rows = CELLS // 2 + SPARE
    await db.create_table(items, [b"%09d" % (rows * part // TABLETS) for part in range(1, TABLETS)])
    load = BulkLoad(db, LoadPlan(items.name, "fill", b"", b"", notify=False))
    timestamps = await load.begin()
    for start in range(0, rows, 10_000):
        cells = [
            (b"%09d" % row, column, b"%050d" % row)
            for row in range(start, min(start + 10_000, rows))
            for column in (b"a", b"b")
        ]
        await load.load(cells, timestamps)
    await load.finish(timestamps)


class Writers:
    """Writers that overwrite, delete and add cells while the block runs."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._random = Random("writers")
        self._tasks: list[asyncio.Task[None]] = []
        self.commits = 0

    async def _write(self) -> None:
        while True:
            try:
                await self._db.run(self._change)
                self.commits += 1
            except PercolatorError:
                continue  # its server has just been killed

    async def _change(self, tx: Transaction) -> None:
        rows = CELLS // 2
        for _ in range(5):
            row, value = self._random.randrange(rows), self._random.randbytes(40)
            await tx.set(b"%09d" % row, self._random.choice([a, b]), value)
        await tx.delete(b"%09d" % (rows + self._random.randrange(SPARE)), a)
        await tx.set(b"new %09d" % self._random.randrange(1 << 29), b, b"")

    async def __aenter__(self) -> Writers:
        self._tasks = [asyncio.create_task(self._write()) for _ in range(WRITERS)]
        await until(lambda: self.commits > 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# ---------------------------------------------------------------------------- killed, and resumed


async def exported(cluster: LocalCluster, directory: Path, at: Timestamp) -> float:
    """Exports while faults occur. Returns how long it took."""
    began = time.monotonic()
    arguments = ("export", "--at", str(int(at)), "--pin-ttl", str(PIN_TTL), str(directory))

    def some_parts() -> bool:
        return len(list(directory.glob("*/part-*.json"))) >= 2

    async with command(cluster, *arguments) as first:
        await until(some_parts)
        first.kill()
        assert await first.wait() == -signal.SIGKILL
    assert not (directory / export_files.MANIFEST).exists()
    async with command(cluster, *arguments) as second:
        tablets = await asked(cluster, "tablets")
        last = [one for one in tablets if one["table"] == items.name][-1]
        await asked(cluster, "tablets", "split", str(last["tablet_id"]))
        server = cluster.processes["tabletserver-1"]
        server.kill()
        await asyncio.to_thread(cluster.restart, server.name)
        assert await asyncio.wait_for(second.wait(), SECONDS) == 0
    return time.monotonic() - began


async def imported(cluster: LocalCluster, directory: Path) -> float:
    began = time.monotonic()
    noted = directory / importer.NAME

    def some_parts() -> bool:
        return noted.exists() and noted.read_bytes().count(b'"part"') >= 2

    async with command(cluster, "import", str(directory)) as first:
        await until(some_parts)
        first.kill()
        assert await first.wait() == -signal.SIGKILL
    async with command(cluster, "import", str(directory)) as second:
        assert await asyncio.wait_for(second.wait(), SECONDS) == 0
    return time.monotonic() - began


@asynccontextmanager
async def command(cluster: LocalCluster, *arguments: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "percolator.cli", "--address", cluster.address, "--timeout", "30", "--json"),
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def asked(cluster: LocalCluster, *arguments: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "percolator.cli", "--address", cluster.address, "--json"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 0
    return json.loads(output)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def scan_hash(db: Database, at: Timestamp | None = None) -> tuple[str, int]:
    """The hash of all rows, columns and values, and the number of cells."""
    digest, cells = sha256(), 0
    async with db.snapshot(at, timeout=60.0) as snapshot:
        async for page in snapshot.scan_cells(items):
            cells += len(page.rows)
            for cell in zip(page.rows, page.columns, page.values, strict=True):
                digest.update(repr(cell).encode())
    return digest.hexdigest(), cells
