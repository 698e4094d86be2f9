"""Jobs and blocks that cannot do what they say are refused before they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import SparkSession

import percolator
import percolator.spark
from percolator import Table, Timestamp
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.services.local.cluster import LocalCluster
from percolator.spark.bulk_load import bulk_load
from percolator.spark.snapshots import SparkSnapshot
from percolator.spark.writers import merge_frame
from tests.spark.tables import CATALOG, PAGES, Pages

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def test_merging_is_the_only_operation_of_a_merge() -> None:
    with pytest.raises(InvalidArgument, match="operation: expected 'merge', found 'upsert'"):
        merge_frame(None, None, {"operation": "upsert"})  # type: ignore[arg-type]


def test_the_block_of_a_snapshot_is_entered_once() -> None:
    snapshot = SparkSnapshot(None, None, Timestamp(7))  # type: ignore[arg-type]
    with snapshot, pytest.raises(UsageError, match="begun already"):
        snapshot.__enter__()
    with pytest.raises(UsageError, match="make a new one"):
        snapshot.__enter__()


def test_another_type_than_the_columns_codec_is_refused_before_any_task(
    write: Any, spark: SparkSession, db: percolator.Database
) -> None:
    pages = Pages(db, 4)  # which declares the codecs
    frame = spark.createDataFrame([("a", "seven")], "url string, visits string")
    other = """{"key": {"name": "url", "type": "text"}, "columns": {"visits": {"type": "text"}}}"""
    with pytest.raises(AnalysisException, match="column 'visits': the program declares the codec"):
        write(frame, pages.name, catalog=other).save()


def test_a_read_as_another_type_than_the_columns_codec_is_refused(
    read: Any, spark: SparkSession, cluster: LocalCluster, db: percolator.Database
) -> None:
    pages = Pages(db, 4, change_feed=True)  # which declares the codecs
    other = """{"key": {"name": "url", "type": "text"}, "columns": {"visits": {"type": "float"}}}"""
    declares = "column 'visits': the program declares the codec float, but the table has integer"
    with pytest.raises(AnalysisException, match=declares):
        read(pages.name, catalog=other).load()
    given = {"address": cluster.address, "table": pages.name, "catalog": other}
    stream = spark.readStream.format("percolator").options(**given, starting_from="snapshot")
    with pytest.raises(AnalysisException, match=declares):
        stream.load()
    with pytest.raises(SchemaError, match=declares):
        percolator.spark.store_catalog(pages.table, other, address=cluster.address)
    assert read(pages.name, catalog=other.replace("float", "raw")).load().count() == 4


@pytest.mark.parametrize(("row", "option"), [("a", "load_from"), ("c", "load_to")])
def test_a_row_outside_of_the_range_of_a_bulk_load_is_refused_by_name(
    spark: SparkSession, cluster: LocalCluster, db: percolator.Database, row: str, option: str
) -> None:
    pages = Pages(db)
    frame = spark.createDataFrame([(row, "t", 1), ("b", "t", 1)], PAGES)
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    with pytest.raises(PythonException, match=f"{option}: row '{row}' of the frame is"):
        bulk_load(frame, **given, load_from="b", load_to="c")
    assert pages.stored() == {}


@pytest.mark.parametrize(
    "helper",
    [
        lambda: percolator.spark.store_catalog("pages", CATALOG),  # type: ignore[arg-type]
        lambda: percolator.spark.spark_catalog("pages", "url", {}),  # type: ignore[arg-type]
    ],
)
def test_helpers_that_take_a_table_say_so(helper: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="expected a Table, got str"):
        helper()


SPARK: Any = percolator.spark
A_TABLE, ANY_FRAME, ANY_SESSION = Table("pages"), None, None


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (
            SPARK.merge,
            {"frame": ANY_FRAME, "table": "p", "catalog": "c", "delete_where": []},
            "delete_where: expected a str, got list",
        ),
        (
            SPARK.merge,
            {"frame": ANY_FRAME, "table": A_TABLE, "catalog": "c"},
            "table: expected a str, got Table",
        ),
        (
            SPARK.merge,
            {"frame": ANY_FRAME, "table": "p", "catalog": {}},
            "catalog: expected a str, got dict",
        ),
        (SPARK.store_catalog, {"table": A_TABLE, "catalog": {}}, "catalog: expected a str"),
        (
            SPARK.spark_catalog,
            {"table": A_TABLE, "key": "url", "columns": []},
            "columns: expected a mapping from names of fields, got list",
        ),
        (
            SPARK.view,
            {"spark": ANY_SESSION, "name": "v", "frame_of": "SELECT 1"},
            "frame_of: expected a function",
        ),
        (
            SPARK.snapshot(ANY_SESSION, at=Timestamp(7)).table,
            {"name": A_TABLE},
            "name: expected a str, got Table",
        ),
    ],
)
def test_helpers_name_the_argument_of_another_type(
    function: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        function(**given)


def test_a_row_that_is_twice_in_a_conditional_frame_is_refused(
    write: Any, spark: SparkSession, db: percolator.Database
) -> None:
    pages = Pages(db)
    frame = spark.createDataFrame([("a", "t", 1), ("a", "t", 2)], PAGES).coalesce(1)
    writer = write(frame, pages.name, catalog=CATALOG, if_unchanged_since=int(db.timestamp()))
    with pytest.raises(PythonException, match=r"appears twice in the frame, .*: row 'a'"):
        writer.save()
    assert pages.stored() == {}
