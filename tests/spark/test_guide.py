"""What docs/spark.md shows does what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from percolator import Database, Table, codecs
from services.local.cluster import LocalCluster
from tests.documents.blocks import ROOT, blocks

pytestmark = pytest.mark.spark

GUIDE: Path = ROOT / "docs/spark.md"
PAGES = Table("pages-of-the-guide")  # the web index has tables of its own names in this cluster
TITLE = PAGES.column("title", codecs.text)
VISITS = PAGES.column("stats:visits", codecs.integer)


def test_the_programs_of_the_guide_read_write_and_load(
    spark: SparkSession,
    cluster: LocalCluster,
    db: Database,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Spark's processes have the surroundings of the first one, and a test's cluster any address.
    address = f'address="{cluster.address}", table='
    read, write, load = (
        block.text.replace("table=", address).replace('"pages"', f'"{PAGES.name}"')
        for block in blocks(GUIDE)
        if block.language == "python"
    )
    db.create_table(PAGES, ["m"])
    db.set_many([("com.example/a", {TITLE: "A", VISITS: 1}), ("org.example/b", {TITLE: "B"})])

    names: dict[str, Any] = {"spark": spark}
    exec(read, names)
    assert "com.example/a" in capsys.readouterr().out
    schema = "url string, title string, visits bigint"
    names["frame"] = spark.createDataFrame([("com.example/a", "new", 2)], schema)
    exec(write, names)
    with db.snapshot() as snapshot:
        assert snapshot.get("com.example/a", TITLE) == "new"
        assert snapshot.get("com.example/a", VISITS) == 2

    loaded = Table("loaded")
    db.create_table(loaded, ["m"])
    rows = [(f"net.example/{number}", "loaded", number) for number in range(10)]
    names["frame"] = spark.createDataFrame(rows, schema)
    exec(load.replace(PAGES.name, loaded.name), names)  # only what is empty can be loaded
    with db.snapshot() as snapshot:
        assert len(list(snapshot.scan(loaded))) == len(rows)
    db.drop_table(loaded)
    db.drop_table(PAGES)
