"""`saveAsTable` and its like are refused before a row is written, and `save()` nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import percolator
from percolator.spark.bulk_load import bulk_load
from tests.spark.tables import CATALOG, PAGES, Pages

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

NAME = "made_in_sparks_catalog"
ROWS = [("a", "title", 1), ("c", "title", 2)]


def _save_as_table(frame: DataFrame, options: dict[str, str]) -> None:
    frame.write.format("percolator").options(**options).mode("append").saveAsTable(NAME)


def _create(frame: DataFrame, options: dict[str, str]) -> None:
    frame.writeTo(NAME).using("percolator").options(**options).create()


def _load(frame: DataFrame, options: dict[str, str]) -> None:
    _save_as_table(frame, options | {"operation": "bulk_load"})


@pytest.mark.parametrize("create", [_save_as_table, _create, _load])
def test_a_table_in_sparks_catalog_is_refused_and_nothing_written(
    spark: SparkSession,
    cluster: Any,
    db: percolator.Database,
    create: Callable[[DataFrame, dict[str, str]], None],
) -> None:
    pages = Pages(db)
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    frame = spark.createDataFrame(ROWS, PAGES)
    with pytest.raises(Exception, match="nothing was written: saveAsTable and create"):
        create(frame, given)
    assert pages.stored() == {}
    assert not spark.catalog.tableExists(NAME)
    bulk_load(frame, **given)
    assert len(pages.stored()) == 2, "the range of a refused load is open"


def test_a_table_that_was_declared_says_why_it_cannot_be_read(
    spark: SparkSession, cluster: Any, db: percolator.Database
) -> None:
    pages = Pages(db, 4)
    with pytest.raises(Exception, match="table: is missing: Spark does not pass the options"):
        spark.sql(f"CREATE TABLE {NAME} USING percolator OPTIONS (table '{pages.name}')")
    spark.sql(f"CREATE TABLE {NAME} ({PAGES}) USING percolator OPTIONS (table '{pages.name}')")
    try:
        with pytest.raises(Exception, match="Spark does not pass the options of a table"):
            spark.table(NAME).collect()
    finally:
        spark.sql(f"DROP TABLE {NAME}")


def test_batches_of_a_stream_are_saved(
    spark: SparkSession, cluster: Any, db: percolator.Database, tmp_path: Path
) -> None:
    """They run inside the execution of their query, as the write of `saveAsTable` does."""
    pages = Pages(db)
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    spark.createDataFrame(ROWS, PAGES).write.json(str(tmp_path / "rows"))

    def save(batch: DataFrame, _: int) -> None:
        batch.write.format("percolator").options(**given).mode("append").save()

    stream = spark.readStream.schema(PAGES).json(str(tmp_path / "rows"))
    started = stream.writeStream.foreachBatch(save).trigger(availableNow=True)
    query = started.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    assert query.awaitTermination(120)
    assert query.exception() is None
    assert pages.stored() == {url: (title, visits) for url, title, visits in ROWS}
