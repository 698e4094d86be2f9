"""Cost to one tablet of finding work for observers: CPU milliseconds, in this process, on LevelDB.

    python -m benchmarks.notification_scan [--rows N]

A hundred notified cells among N rows are looked for in several situations: with nothing else in the
tablet; after N notifications were deleted, before and after reopening the tablet; with N locks held
by one job; and with more notifications than fit into the index in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.tablet_core import COLUMN, SESSION, TARGET, Bench, encoded, row_name
from percolator.errors import CellAddress
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.tablet.cells import LOCK, NOTIFY, WRITE, encode
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb

OBSERVER = b"index"
DIRTY = 100
LOOKS = 20


async def store(bench: Bench, entries: Iterable[tuple[bytes, bytes | None]]) -> None:
    """Puts entries into the storage, or deletes them, in large batches."""
    batch, size = bench.storage.batch(), 0
    for key, value in entries:
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)
        size += 1
        if size == 10_000:
            await bench.storage.write(batch)
            batch, size = bench.storage.batch(), 0
    await bench.storage.write(batch)


def notification(row: bytes, at: int) -> bytes:
    return encode(NOTIFY, row, COLUMN, at, OBSERVER)


async def notify(bench: Bench, rows: Iterable[bytes]) -> None:
    at = bench.timestamps.next()
    put = pb.Change.KIND_PUT
    change = pb.Change(kind=put, space=cells_pb2.SPACE_NOTIFY, timestamp=at, qualifier=OBSERVER)
    mutations = [pb.Mutation(row=row, column=COLUMN, changes=[change]) for row in rows]
    await bench.mutate(encoded(mutations))


async def look(bench: Bench, name: str, *, locked: bytes = b"", found: int = DIRTY) -> None:
    """Prints the CPU time of a whole pass over the tablet, and of its most expensive response."""
    passes, longest, answers = [], 0.0, 0
    for _ in range(1 if locked or found > DIRTY else LOOKS):
        scan = pb.NotificationScan(target=TARGET, observers=[OBSERVER])
        if locked:
            scan.locked_columns.append(locked)
            scan.locks_before = bench.timestamps.next()
        rows, answers, spent = 0, 0, 0.0
        while True:
            before = time.process_time()
            result = await bench.tablet.scan_notifications(scan)
            result.SerializeToString()
            seconds = time.process_time() - before
            spent, longest, answers = spent + seconds, max(longest, seconds), answers + 1
            rows += len(result.notifications)
            if not result.HasField("rest"):
                break
            scan.range.CopyFrom(result.rest)
        if rows != found:
            raise RuntimeError(f"found {rows} of {found} notifications")
        passes.append(spent)
    median = sorted(passes)[len(passes) // 2]
    print(
        f"{name:44s} {median * 1e3:8.2f} ms CPU a pass, {answers} responses, "
        f"the longest {longest * 1e3:.2f} ms",
        flush=True,
    )


async def reopened(bench: Bench, directory: Path) -> Bench:
    await bench.tablet.close()
    last = bench.timestamps
    bench = Bench(directory)
    bench.timestamps = last
    before = time.process_time()
    await bench.tablet.open()
    print(f"reopened: {time.process_time() - before:.2f} s of CPU")
    return bench


async def run(directory: Path, rows: int) -> None:
    bench = Bench(directory)
    await bench.tablet.open()
    start, end = bench.timestamps.next(), bench.timestamps.next()
    record = WriteRecord(start, RecordKind.PUT, b"v" * 100).encode()
    names = [row_name(number) for number in range(rows)]
    await store(bench, ((encode(WRITE, row, COLUMN, end), record) for row in names))
    dirty = names[:: rows // DIRTY][:DIRTY]
    await notify(bench, dirty)
    await look(bench, f"{DIRTY} among {rows} clean cells")

    old = bench.timestamps.next()
    await store(bench, ((notification(row, old), b"") for row in names))
    await store(bench, ((notification(row, old), None) for row in names))
    await look(bench, f"and {rows} deleted notifications")
    bench = await reopened(bench, directory)
    await look(bench, "the same")

    primary = CellAddress(1, b"primary", COLUMN)
    lock = LockRecord(start, start + 1, 3000, RecordKind.PUT, SESSION, primary, b"v").encode()
    await store(bench, ((encode(LOCK, row, COLUMN), lock) for row in names))
    bench = await reopened(bench, directory)
    await look(bench, f"and {rows} locks, none asked for")
    await look(bench, f"and {rows} locks on other columns", locked=b"observed")
    await look(bench, f"and {rows} old locks, all reported", locked=COLUMN)
    await store(bench, ((encode(LOCK, row, COLUMN), None) for row in names))

    await store(bench, ((notification(row, old), b"") for row in names))
    bench = await reopened(bench, directory)
    await look(bench, f"{rows} notifications", found=rows)
    await bench.tablet.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="notification-scan-"))
    try:
        asyncio.run(run(directory, arguments.rows))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
