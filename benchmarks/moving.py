"""Exports a million cells from tablet servers, and imports them into Bigtable's emulator.

Prints the time of both, and that of an import of the same files into other tablet servers, and
fails unless all three have the same rows, columns and values.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from percolator import Table, codecs
from percolator.aio import Database
from percolator.aio.bulk_load import BulkLoad, LoadPlan
from percolator.aio.connecting import connect
from percolator.backup import exporter, importer
from percolator.bigtable.place import EMULATOR_VARIABLE
from percolator.services.local.cluster import LocalCluster
from tests.bigtable.emulator_process import emulator

CELLS = 1_000_000
_CELLS_AT_ONCE = 50_000
_ROWS_READ_AT_ONCE = 5_000
"""For each page of a scan, the emulator goes over all rows up to the end of its range."""
_STORE = "bigtable://moving/million-cells"
_ITEMS = Table("items", key=codecs.raw)


async def _fill(database: Database) -> None:
    """Two cells in each row, in four tablets."""
    rows = CELLS // 2
    splits = [b"%06d" % (rows * part // 4) for part in (1, 2, 3)]
    await database.create_table(_ITEMS, splits=splits)
    load = BulkLoad(database, LoadPlan("items", "fill", start=b"", end=b"", notify=False))
    timestamps = await load.begin()
    for first in range(0, rows, _CELLS_AT_ONCE // 2):
        await load.load(
            [
                (b"%06d" % row, column, b"value %d" % row * 3)
                for row in range(first, first + _CELLS_AT_ONCE // 2)
                for column in (b"a", b"b")
            ],
            timestamps,
        )
    await load.finish(timestamps)


async def _contents(database: Database) -> tuple[str, int]:
    """A hash of all rows, columns and values, and how many cells there are."""
    digest, cells = sha256(), 0
    bounds = [
        b"",
        *(b"%06d" % row for row in range(_ROWS_READ_AT_ONCE, CELLS // 2, _ROWS_READ_AT_ONCE)),
        b"",
    ]
    async with database.snapshot() as snapshot:
        for start, end in pairwise(bounds):
            async for page in snapshot.scan_cells(_ITEMS, start=start, end=end):
                cells += len(page.rows)
                for cell in zip(page.rows, page.columns, page.values, strict=True):
                    digest.update(repr(cell).encode())
    return digest.hexdigest(), cells


async def _timed(what: str, work: Callable[[], Awaitable[object]]) -> None:
    began = time.monotonic()
    await work()
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)


async def _imported(address: str, exported: Path, where: str) -> tuple[str, int]:
    async with connect(address) as database:
        await _timed(f"import into {where}", lambda: importer.import_tables(database, exported))
        return await _contents(database)


async def _move(source: str, rows: str, target: str, exported: Path) -> None:
    async with connect(source) as database:
        await _fill(database)
        await _timed("export from tablet servers", lambda: exporter.export(database, exported))
        expected = await _contents(database)
    for address, where in ((rows, "the emulator"), (target, "tablet servers")):
        found = await _imported(address, exported, where)
        if found != expected or found[1] != CELLS:
            raise SystemExit(f"{where}: {found}, expected {expected}")
    print(f"{CELLS:,} cells, the same in all three: {expected[0][:16]}")


def main() -> None:
    with tempfile.TemporaryDirectory() as there, emulator() as address:
        os.environ[EMULATOR_VARIABLE] = address
        here = Path(there)
        with (
            LocalCluster(here / "source", tablet_servers=1) as source,
            LocalCluster(here / "target", tablet_servers=1) as target,
            LocalCluster(here / "rows", store=_STORE, tablet_servers=0) as rows,
        ):
            asyncio.run(_move(source.address, rows.address, target.address, here / "export"))


if __name__ == "__main__":
    main()
