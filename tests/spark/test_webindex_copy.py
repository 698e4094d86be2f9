"""The Parquet copy of what is served is exact, also after its query was killed at some step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import percolator
from examples.webindex import spark_copy, tables
from percolator import Table
from percolator.services.local.cluster import LocalCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

TABLE = Table("serving-copied")
TITLE = TABLE.column("title", tables.title.codec)
SIZE = TABLE.column("documents", tables.size.codec)


def _served(db: percolator.Database) -> list[tuple[Any, ...]]:
    with db.snapshot() as snapshot:
        return [(row.key, row.get(TITLE), row.get(SIZE)) for row in snapshot.scan(TABLE)]


def _copy(spark: SparkSession, directory: Path) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, spark_copy.copied(spark, directory).collect()))


def test_the_copy_is_exact_however_its_last_batch_ended(
    spark: SparkSession, cluster: LocalCluster, db: percolator.Database, tmp_path: Path
) -> None:
    db.create_table(TABLE, ["http://m"])  # it gets its change feed from the copy

    def run() -> None:
        spark_copy.main(
            [str(tmp_path), "--address", cluster.address, "--table", TABLE.name, "--once"]
        )

    with pytest.raises(FileNotFoundError, match="no complete version"):
        spark_copy.copied(spark, tmp_path)
    db.set_many((f"http://{letter}", {TITLE: letter, SIZE: 1}) for letter in "abxyz")
    run()
    assert _copy(spark, tmp_path) == _served(db)

    with db.transaction() as tx:
        tx.set("http://a", SIZE, 2)
        tx.set("http://new", TITLE, "new")
    with db.transaction() as tx:
        tx.set("http://a", SIZE, 3)
        for column in (TITLE, SIZE):
            tx.delete("http://x", column)
    run()
    assert _copy(spark, tmp_path) == _served(db)

    # As if killed while the version was being written: the batch is repeated.
    _forget_commit(tmp_path, 1)
    (tmp_path / "version-1/_SUCCESS").unlink()
    assert len(_copy(spark, tmp_path)) == 5, "the version before is still the newest"
    run()
    assert _copy(spark, tmp_path) == _served(db)

    # As if killed when the version was complete, and before the checkpoint said so.
    complete = _files(tmp_path / "version-1")
    _forget_commit(tmp_path, 1)
    with db.transaction() as tx:
        tx.set("http://x", TITLE, "again")
    run()
    assert _copy(spark, tmp_path) == _served(db)
    assert _files(tmp_path / "version-1") == complete, "others may be reading it"
    assert {path.name for path in tmp_path.glob("version-*")} == {"version-1", "version-2"}


def _files(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


def _forget_commit(directory: Path, number: int) -> None:
    for name in (f"{number}", f".{number}.crc"):
        (directory / "checkpoint/commits" / name).unlink(missing_ok=True)
