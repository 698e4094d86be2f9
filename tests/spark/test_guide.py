"""Code of docs/spark.md, which does what the text says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from percolator import Database, Table, codecs
from percolator.services.local.cluster import LocalCluster
from tests.documents.commands import ROOT, blocks

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

GUIDE: Path = ROOT / "docs/spark.md"
PAGES = Table("pages-of-the-guide")  # the web index has tables of its own names in this cluster
TITLE = PAGES.column("title", codecs.text)
VISITS = PAGES.column("stats:visits", codecs.integer)


def _programs(cluster_address: str, files: Path) -> list[str]:
    """A test's cluster has any address, and Spark's processes keep their first environment."""
    address = f'address="{cluster_address}"'
    return [
        block.text.replace("table=", f"{address}, table=")
        .replace('"pages"', f'"{PAGES.name}"')
        .replace('"changes/', f'"{files}/')
        .replace('"arriving', f'"{files}/arriving')
        .replace("spark.database()", f'spark.database("{cluster_address}")')
        .replace("spark.together()", f"spark.together({address})")
        .replace(f"**job.options, {address}, ", "**job.options, ")
        .replace("spark.snapshot(spark)", f"spark.snapshot(spark, {address})")
        .replace('.where("visits > 1")\n)', f'.where("visits > 1"), {address}\n)')
        for block in blocks(GUIDE)
        if block.language == "python"
    ]


def test_the_programs_of_the_guide_read_write_and_load(
    spark: SparkSession,
    cluster: LocalCluster,
    db: Database,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (
        make_catalog, read, at_one_instant, show, write, write_atomic, overwrite, together,
        unchanged, merge_changes, stream, sink, transact, map_batches, load,
    ) = _programs(cluster.address, tmp_path)  # fmt: skip
    db.create_table(PAGES, ["m"], change_feed=True)
    db.set_many([("com.example/a", {TITLE: "A", VISITS: 1}), ("org.example/b", {TITLE: "B"})])

    names: dict[str, Any] = {"spark": spark}
    exec(make_catalog, names)
    assert '"schema": "struct<lat:double,lon:double>"' in names["catalog_of_pages"]
    exec(read, names)
    assert "com.example/a" in capsys.readouterr().out
    schema = "url string, title string, visits bigint"
    names["frame"] = spark.createDataFrame([("com.example/a", "new", 2)], schema)
    exec(write, names)
    with db.snapshot() as snapshot:
        assert snapshot.get("com.example/a", TITLE) == "new"
        assert snapshot.get("com.example/a", VISITS) == 2
    names["frame"] = spark.createDataFrame([("com.example/a", "newer", 2)], schema)
    exec(write_atomic, names)
    with db.snapshot() as snapshot:
        assert snapshot.get("com.example/a", TITLE) == "newer"
    _overwrite(overwrite, together, names, db)
    db.set_many([("org.example/b", {TITLE: "B"})])

    exec(stream, names)
    copied = spark.read.parquet(f"{tmp_path}/rows").select("url", "title", "change_kind")
    assert sorted(map(tuple, copied.collect())) == [
        ("com.example/a", "newer", "snapshot"),
        ("org.example/b", "B", "snapshot"),
    ]
    exec(at_one_instant, names)
    assert capsys.readouterr().out.endswith(" 1\n")
    exec(show, names)
    assert "|       1|" in capsys.readouterr().out
    names["shown"].drop()
    exec(unchanged, names)
    with db.snapshot() as snapshot:
        assert snapshot.get("com.example/a", VISITS) == 3
    exec(merge_changes, names)
    with db.snapshot() as snapshot:
        assert [(row.key, row.get(VISITS)) for row in snapshot.scan(PAGES)] == [
            ("com.example/a", 7)
        ]
    db.set_many([("com.example/a", {VISITS: 2}), ("org.example/b", {TITLE: "B"})])

    rows = [("com.example/a", "-", 1), ("org.example/b", "-", 5)]
    names["frame"] = spark.createDataFrame(rows, schema)
    exec(transact, names)
    exec(map_batches, names)
    assert sorted(map(tuple, names["titles"].collect())) == [
        ("com.example/a", "newer"),
        ("org.example/b", "B"),
    ]
    with db.snapshot() as snapshot:
        assert [row.get(VISITS) for row in snapshot.scan(PAGES)] == [2, 5]
    _sink(sink, names, tmp_path)
    with db.snapshot() as snapshot:
        assert snapshot.get("com.example/c", TITLE) == "arrived"
    _bulk_load(load, names, db)
    db.drop_table(PAGES)


def _overwrite(overwrite: str, together: str, names: dict[str, Any], db: Database) -> None:
    """Runs the programs, of which the second one has a table of its own."""
    exec(overwrite, names)
    with db.snapshot() as snapshot:
        assert [row.key for row in snapshot.scan(PAGES)] == ["com.example/a"]
    copies = Table("copies")
    db.create_table(copies)
    exec(together, names)
    with db.snapshot() as snapshot:
        assert [row.key for row in snapshot.scan(copies)] == ["com.example/a"]
    db.drop_table(copies)


def _sink(program: str, names: dict[str, Any], files: Path) -> None:
    """Runs the program with one file to stream."""
    (files / "arriving").mkdir()
    (files / "arriving/1.json").write_text(
        '{"url": "com.example/c", "title": "arrived", "visits": 1}'
    )
    exec(program, names)


def _bulk_load(load: str, names: dict[str, Any], db: Database) -> None:
    """Runs the program with a table that is empty: only that can be loaded."""
    loaded = Table("loaded")
    db.create_table(loaded, ["m"])
    rows = [(f"net.example/{number}", "loaded", number) for number in range(10)]
    names["frame"] = names["spark"].createDataFrame(rows, names["frame"].schema)
    exec(load.replace(PAGES.name, loaded.name), names)
    with db.snapshot() as snapshot:
        assert len(list(snapshot.scan(loaded))) == len(rows)
    db.drop_table(loaded)
