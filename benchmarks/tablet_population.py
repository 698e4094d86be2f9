"""Tablets with history, written straight into LevelDB; through the API it would take minutes.

The result is what transactions leave: for each commit a lock that was put and deleted again, and a
write record with its value. A real tablet creates the store and makes one commit at a timestamp
above all that follow, so that its bounds on what was written (recent_writes.py) hold.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.tablet_traffic import COLUMN, FIRST_TIMESTAMP, TABLE_ID, VALUE, row_key
from percolator.errors import CellAddress
from percolator.formats.records import (
    KIND_PUT,
    LOCK_HEADER,
    WRITE_HEADER,
    RecordKind,
    WriteRecord,
    shared_part,
)
from percolator.services.chassis.files import DiskThreads
from percolator.services.tabletserver.storage import LevelDBStorage
from percolator.tablet.cells import L, W, cell_prefix, inverted
from percolator.tablet.state import TabletIdentity, TimestampGuard
from percolator.tablet.tablet import Tablet
from percolator.testing.memory_storage import MemoryOwnership
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import MachineClock

EPOCH = 1
CELLS_PER_BATCH = 1_000
NEIGHBOURS = 1_000
LAST_COMMIT = FIRST_TIMESTAMP - 1
FIRST_START = FIRST_TIMESTAMP - (60_000 << 18)
"""All commits of the population lie between `FIRST_START` and `LAST_COMMIT`."""


async def populate(
    directory: Path, tablet_id: int, rows: int, *, versions: int = 1, locked: bool = True
) -> None:
    """Creates the tablet at epoch 1 with `versions` commits of each of `rows` rows.

    Unless `locked`, it has the write records without the deleted locks, as after a bulk load.
    """
    epoch = directory / "store" / str(TABLE_ID) / str(tablet_id) / f"e{EPOCH}"
    epoch.mkdir(parents=True)
    with DiskThreads(1, "populate") as threads:
        await _found(LevelDBStorage(epoch, threads, create=True), tablet_id)
        storage = LevelDBStorage(epoch, threads)
        for version in range(versions):
            start = FIRST_START + (version << 4)
            for first in range(0, rows, CELLS_PER_BATCH):
                batch = range(first, min(first + CELLS_PER_BATCH, rows))
                if locked:
                    await _lock(storage, batch, start)
                await _commit(storage, batch, start, locked)
        await storage.close()


async def populate_locked(directory: Path, tablet_id: int, row: bytes, locks: int) -> None:
    """Creates the tablet at epoch 1 with one value in the row, `locks` lock-only commits above it,
    and one value in each of `NEIGHBOURS` rows beside it."""
    epoch = directory / "store" / str(TABLE_ID) / str(tablet_id) / f"e{EPOCH}"
    epoch.mkdir(parents=True)
    with DiskThreads(1, "populate") as threads:
        await _found(LevelDBStorage(epoch, threads, create=True), tablet_id)
        storage = LevelDBStorage(epoch, threads)
        batch = storage.batch()
        value = WRITE_HEADER.pack(FIRST_START - 2, KIND_PUT) + VALUE
        for one in (row, *(b"%s/%d" % (row, number) for number in range(NEIGHBOURS))):
            cell = W + cell_prefix(one, COLUMN)
            batch.put(cell + inverted(FIRST_START - 1), value)
        await storage.write(batch)
        cell = W + cell_prefix(row, COLUMN)
        for first in range(0, locks, CELLS_PER_BATCH):
            batch = storage.batch()
            for at in range(first, min(first + CELLS_PER_BATCH, locks)):
                start = FIRST_START + (at << 4)
                record = WriteRecord(start, RecordKind.LOCK_ONLY, last_change=FIRST_START - 1)
                batch.put(cell + inverted(start + 1), record.encode())
            await storage.write(batch)
        await storage.close()


async def _found(storage: LevelDBStorage, tablet_id: int) -> None:
    clock = MachineClock()
    tablet = Tablet(
        TabletIdentity(TABLE_ID, tablet_id, EPOCH, b"", b""),
        schema_version=0,
        storage=storage,
        clock=clock,
        ownership=MemoryOwnership(),
        on_closed=lambda error: None,
        guard=TimestampGuard.by_own_clock(clock),
    )
    await tablet.open()
    change = pb.Change(
        kind=pb.Change.KIND_PUT,
        space=cells_pb2.SPACE_WRITE,
        timestamp=LAST_COMMIT,
        value=WRITE_HEADER.pack(LAST_COMMIT - 1, KIND_PUT) + VALUE,
    )
    mutation = pb.Mutation(row=row_key(0), column=COLUMN, changes=[change])
    target = pb.TabletTarget(tablet_id=tablet_id, epoch=EPOCH)
    await tablet.mutate(
        pb.MutationBatch(target=target, mutations=[mutation]),
        deadline_seconds=clock.monotonic_seconds() + 60,
    )
    await tablet.close()


async def _lock(storage: LevelDBStorage, rows: range, start: int) -> None:
    primary = shared_part(b"", CellAddress(TABLE_ID, row_key(rows[0]), COLUMN))
    lock = LOCK_HEADER.pack(start, start + 1, 3_000, KIND_PUT) + primary + VALUE
    batch = storage.batch()
    for number in rows:
        batch.put(L + cell_prefix(row_key(number), COLUMN), lock)
    await storage.write(batch)


async def _commit(storage: LevelDBStorage, rows: range, start: int, locked: bool) -> None:
    record = WRITE_HEADER.pack(start, KIND_PUT) + VALUE
    batch = storage.batch()
    for number in rows:
        cell = cell_prefix(row_key(number), COLUMN)
        if locked:
            batch.delete(L + cell)
        batch.put(W + cell + inverted(start + 1), record)
    await storage.write(batch)
