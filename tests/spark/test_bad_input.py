"""What cannot work fails on the driver before any task, with an error that names the mistake."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

import percolator
from tests.spark.tables import CATALOG, PAGES, Pages

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def pages(db: percolator.Database) -> Pages:
    return Pages(db, 4)


@pytest.mark.parametrize(
    ("options", "schema", "message"),
    [
        ({"transaction_row": "7"}, None, "did you mean 'transaction_rows'"),
        ({"table": "nowhere"}, None, "table: there is no table 'nowhere'"),
        ({"address": "127.0.0.1:1", "timeout_seconds": "0.2"}, None, "address: no cluster answers"),
        (
            {"as_of": "2999-01-01T00:00:00Z"},
            None,
            "as_of: 2998-12-31T23:59:59.999.* is in the future",
        ),
        ({"catalog": CATALOG, "columns": "titel"}, None, "did you mean 'title'"),
        ({"catalog": CATALOG}, "url string, titel string", "'titel' is not in the catalogue"),
        ({"catalog": CATALOG}, "url string, visits string", "'visits' is string"),
        ({}, "row string", "'row' is string"),
        ({"table": "nowhere"}, "row binary", "table: there is no table 'nowhere'"),
        ({"catalog": "stored", "table": "nowhere"}, "row binary", "there is no table 'nowhere'"),
        ({"as_of": "2999-01-01T00:00:00Z"}, "row binary", "as_of: .* is in the future"),
        ({"nulls": "skip"}, "row binary", "nulls: is not an option of reading"),
    ],
)
def test_a_read_that_cannot_work(
    spark: SparkSession, cluster: Any, pages: Pages, options: dict[str, str],
    schema: str | None, message: str,
) -> None:  # fmt: skip
    given = {"address": cluster.address, "table": pages.name, **options}
    reader = spark.read.format("percolator").options(**given)
    before = _jobs(spark)
    with pytest.raises(AnalysisException, match=message) as raised:
        (reader.schema(schema) if schema else reader).load().collect()
    assert "pickl" not in str(raised.value), "it would look like a bug in the data source"
    assert _jobs(spark) == before


@pytest.mark.parametrize(
    ("options", "schema", "message"),
    [
        ({"nulls": "keep"}, PAGES, "nulls: expected one of refuse, skip, delete"),
        ({"table": "nowhere"}, PAGES, "table: there is no table 'nowhere'"),
        ({"address": "127.0.0.1:1", "timeout_seconds": "0.2"}, PAGES, "address: no cluster"),
        ({}, "title string, visits bigint", "the key field 'url' is missing"),
        ({}, "url string, title string, visits string", "'visits' is string; .* bigint"),
        ({}, "url string, title string, owner string", "'owner' is not in the catalogue"),
        ({"transaction_rows": "100000"}, PAGES, "transaction_rows: .* 100000 cells"),
    ],
)
def test_a_write_that_cannot_work(
    spark: SparkSession, cluster: Any, pages: Pages, options: dict[str, str],
    schema: str, message: str,
) -> None:  # fmt: skip
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG, **options}
    frame = spark.createDataFrame([], schema)
    before = _jobs(spark)
    with pytest.raises(AnalysisException, match=message):
        frame.write.format("percolator").options(**given).mode("append").save()
    assert _jobs(spark) == before


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("errorifexists", {}, 'cannot be written in the "ErrorIfExists" mode. .* "Append"'),
        (
            "overwrite",
            {"atomic": "false"},
            'atomic: mode\\("overwrite"\\) is always atomic: leave it out',
        ),
        ("overwrite", {"operation": "delete"}, 'mode: operation=delete needs mode\\("append"\\)'),
        ("overwrite", {"operation": "bulk_load"}, "mode: operation=bulk_load needs"),
        ("overwrite", {"skip_equal": "true"}, "skip_equal: looks at rows in transactions of its"),
    ],
)
def test_a_mode_that_cannot_work(
    spark: SparkSession, cluster: Any, pages: Pages, mode: str, options: dict[str, str],
    message: str,
) -> None:  # fmt: skip
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG, **options}
    frame = spark.createDataFrame([("a", "b", 1)], PAGES)
    before = pages.stored()
    with pytest.raises(AnalysisException, match=message):
        frame.write.format("percolator").options(**given).mode(mode).save()
    assert pages.stored() == before


def _jobs(spark: SparkSession) -> int:
    """The number of jobs started so far."""
    tracker = spark.sparkContext.statusTracker()
    return len(tracker.getJobIdsForGroup(None))
