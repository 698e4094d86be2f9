"""Catches a tablet server while LevelDB compacts, and removes its locks.

If a paused owner is deposed in the middle of a compaction and wakes up, it continues to write
tables under numbers that the new owner uses, too: a clone that shares such a file is corrupted.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from percolator import Table, aio, codecs
from percolator.errors import PercolatorError, TabletLocation
from percolator.services.local.process import ServiceProcess
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.world import Network

WRITE_BUFFERS_BYTES = 64 << 10
"""For all tablets of a server together: so small that LevelDB is always busy."""
_TABLETS = 6
_WRITERS = 4
_VALUE_BYTES = 8 << 10
_ROWS = 200
_CAUGHT_SECONDS = 30.0
_BEGUN = re.compile(r"Level-0 table #[0-9]+: started|Compacting [0-9]+@")
_ENDED = re.compile(r"Level-0 table #[0-9]+: [0-9]+ bytes|compacted to: |Compaction error")

filler = Table("filler")
content = filler.column("content", codecs.raw)


class NoEffect(Exception):
    """A fault could not be shown to have happened."""


def require_stopped(pid: int) -> None:
    """Waits until the process is stopped: a signal takes effect a little later than it is sent."""
    process = psutil.Process(pid)
    deadline = time.monotonic() + 5
    while process.status() != psutil.STATUS_STOPPED:
        if time.monotonic() > deadline:
            raise NoEffect(f"process {pid} did not stop")


async def _put(tx: aio.Transaction, row: str, value: bytes) -> None:
    await tx.set(row, content, value)


class Filler:
    """Overwrites rows with random data, and knows what was acknowledged."""

    def __init__(self, database: aio.Database) -> None:
        self.database = database
        self.known: dict[str, bytes] = {}
        self._going = asyncio.Event()

    @classmethod
    async def of(cls, database: aio.Database) -> Filler:
        splits = [f"{_ROWS * part // _TABLETS:04d}" for part in range(1, _TABLETS)]
        await database.create_table(filler, splits, exist_ok=True)
        return cls(database)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        self._going.set()
        tasks = [asyncio.create_task(self._write(number)) for number in range(_WRITERS)]
        try:
            yield
        finally:
            self._going.clear()
            await asyncio.gather(*tasks)

    async def _write(self, number: int) -> None:
        rows = [f"{row:04d}" for row in range(number, _ROWS, _WRITERS)]
        while self._going.is_set():
            for row in rows:
                value = secrets.token_bytes(_VALUE_BYTES)
                try:
                    await self.database.run(_put, row, value)
                except PercolatorError:
                    # It is not known whether this was done: either value is accepted.
                    self.known.pop(row, None)
                else:
                    self.known[row] = value
                if not self._going.is_set():
                    return

    async def require_intact(self) -> None:
        """Checks that every row has the last acknowledged value."""
        deadline = time.monotonic() + _CAUGHT_SECONDS
        while True:
            try:
                async with self.database.snapshot() as snapshot:
                    for row, value in self.known.items():
                        if (await snapshot.get(row, content)) != value:
                            raise AssertionError(f"row {row} of {filler.name}: a lost write")
            except PercolatorError:
                # Other faults may keep it from being read for a while.
                if time.monotonic() > deadline:
                    raise
            else:
                return

    async def tablets_of(self, address: str) -> list[TabletLocation]:
        engine = self.database._engine
        deadline = engine.now() + _CAUGHT_SECONDS
        info = await engine.catalog.table(filler.name, deadline)
        found = await engine.catalog.all_tablets(info.table_id, deadline)
        return [one for one in found if one.address == address]


def directory_of(store: Path, tablet: TabletLocation) -> Path:
    return store / str(tablet.table_id) / str(tablet.tablet_id) / f"e{tablet.epoch}"


def is_compacting(directory: Path) -> bool:
    """True if it is compacting, by LevelDB's own log; only for a stopped process."""
    begun = False
    try:
        log = (directory / "LOG").read_text(errors="replace")
    except FileNotFoundError:
        return False  # another server has just sealed it
    for line in log.splitlines():
        if _BEGUN.search(line):
            begun = True
        elif _ENDED.search(line):
            begun = False
    return begun


async def pause_in_compaction(
    victim: ServiceProcess, store: Path, tablets: list[TabletLocation]
) -> list[Path]:
    """Stops the process during a compaction. Returns the directories in which one is running."""
    deadline = time.monotonic() + _CAUGHT_SECONDS
    while time.monotonic() < deadline:
        victim.pause()
        require_stopped(victim.pid)
        directories = [directory_of(store, one) for one in tablets]
        found = [one for one in directories if is_compacting(one)]
        if found:
            return found
        victim.resume()
        await asyncio.sleep(0.005)
    raise NoEffect(f"{victim.name} never compacts")


def remove_locks(store: Path, tablets: list[TabletLocation]) -> int:
    """Removes LevelDB's LOCK files: they are a tripwire, and ownership must not depend on them."""
    removed = 0
    for tablet in tablets:
        lock = directory_of(store, tablet) / "LOCK"
        if lock.exists():
            lock.unlink()
            removed += 1
    return removed


async def require_deposed(network: Network, address: str, tablet: TabletLocation) -> None:
    """Checks that a former owner refuses a write to its former tablet, and even a read."""
    target = pb.TabletTarget(tablet_id=tablet.tablet_id, epoch=tablet.epoch, schema_version=1)
    mutation = pb.Mutation(row=tablet.start, column=b"content")
    batch = pb.MutationBatch(target=target, mutations=[mutation])
    request = pb.MutateRequest(batches=[batch])
    (answer,) = (await network.unary(address, methods.MUTATE)(request, 30.0)).batches
    if not answer.HasField("error"):
        outcomes = [one.result.outcome for one in answer.unapplied]
        if len(outcomes) < answer.mutations or pb.OUTCOME_REFUSED in outcomes:
            raise AssertionError(f"tablet {tablet.tablet_id}: a former owner answered {outcomes}")
