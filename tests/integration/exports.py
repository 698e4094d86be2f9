"""Two clusters and an export of the first, for tests of exports and imports."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import pytest

import percolator
from percolator import Table, Timestamp, codecs
from percolator.aio import Database
from percolator.services.local.cluster import LocalCluster
from tests.integration.command_line import CommandLine

ROWS = 1_500
shop = Table("shop.items", key=codecs.text)
price = shop.column("price", codecs.integer)
label = shop.column("label", codecs.text)
empty = Table("empty")


class Interrupted(Exception):
    """Stands in for anything that ends a process."""


def break_off(_cells: int, done: int, _all: int) -> None:
    """A progress callback that interrupts after two parts."""
    if done == 2:
        raise Interrupted


@pytest.fixture(scope="module", name="cluster")
def source_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("source"), tablet_servers=2) as started:
        with percolator.connect(started.address) as db:
            db.create_table(shop, splits=["g", "r"])
            db.create_table(empty, retention=timedelta(hours=2))
            rows = (
                (f"{'abcxyz'[at % 6]}{at:05}", {price: at, label: "l" * 50}) for at in range(ROWS)
            )
            db.set_many(rows)
            with db.transaction() as tx:
                tx.set("long", label, "v" * 5_000)
        yield started


@pytest.fixture(scope="module", name="target")
def target_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("target"), tablet_servers=1) as started:
        yield started


@pytest.fixture(scope="module", name="exported")
def whole_export(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an export that was never interrupted; tests damage copies of it."""
    directory = tmp_path_factory.mktemp("exports") / "whole"
    CommandLine(cluster.address).run("export", str(directory))
    return directory


async def scan_hash(db: Database, at: Timestamp | None = None) -> str:
    """A hash of all rows, columns and values."""
    digest = sha256()
    async with db.snapshot(at) as snapshot:
        async for page in snapshot.scan_cells(shop):
            for cell in zip(page.rows, page.columns, page.values, strict=True):
                digest.update(repr(cell).encode())
    return digest.hexdigest()


def copied(exported: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", str(exported), str(to)], check=True)
    return to


async def rows_of(db: Database) -> int:
    async with db.snapshot() as snapshot:
        return sum([len(page.rows) async for page in snapshot.scan_cells(shop)])
