"""What is wrong with an option is said in the words of the option, and nothing is started."""

from __future__ import annotations

import json

import pytest
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from percolator import errors
from percolator.spark.catalogue import Catalogue
from percolator.spark.data_source import PercolatorDataSource
from percolator.spark.options import ReadOptions, WriteOptions
from percolator.spark.shapes import shape_of

pytestmark = pytest.mark.spark

CATALOG = json.dumps(
    {
        "key": {"name": "url", "type": "text"},
        "columns": {"title": {"type": "text"}, "visits": {"type": "integer", "column": "s:v"}},
    }
)


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        ({"tabel": "x"}, "tabel", "'table' meant"),
        ({"snapshot_timestamp": "1"}, "snapshot_timestamp", "'snapshot_ts' meant"),
        ({}, "table", "missing"),
        ({"table": "x", "path": "y"}, "table", "load"),
        ({"table": "x", "operation": "delete"}, "operation", "no option of reading"),
        ({"table": "x", "snapshot_ts": "yesterday"}, "snapshot_ts", "expected a timestamp"),
        ({"table": "x", "snapshot_ts": "0"}, "snapshot_ts", "before every commit"),
        ({"paths": '["x", "y"]'}, "table", "load.. takes one"),
        ({"table": "x", "option.table": "x"}, "table", "use CREATE TEMPORARY VIEW"),
        ({"table": "x", "as_of": "2026-01-01T00:00:00"}, "as_of", "no time zone"),
        ({"table": "x", "as_of": "17"}, "as_of", "expected a date"),
        ({"table": "x", "as_of": "2026-01-01", "snapshot_ts": "1"}, "as_of", "together"),
        ({"table": "x", "columns": "a,,b"}, "columns", "names with commas"),
        (
            {"table": "x", "partition_bytes": "many"},
            "partition_bytes",
            "from 1048576 to 1099511627776",
        ),
        ({"table": "x", "pin_seconds": "-1"}, "pin_seconds", "a number from 0"),
        ({"table": "x", "timeout_seconds": "nan"}, "timeout_seconds", "a number from"),
        ({"table": "x", "address": "nowhere"}, "address", "nowhere"),
        ({"table": "x", "catalog": "{"}, "catalog", "not JSON"),
        ({"table": "x", "catalog": "[" * 100_000}, "catalog", "not JSON"),
        (
            {"table": "x", "catalog": '{"key": {"name": "k", "name": "l", "type": "text"}}'},
            "catalog",
            "'name' is there twice",
        ),
        ({"table": "x", "catalog": "[]"}, "catalog", "an object with key, columns"),
        ({"table": "x", "catalog": '{"key": {}}'}, "catalog", "'columns' is missing"),
    ],
)
def test_reading_names_the_option_that_is_wrong(
    options: dict[str, str], field: str, reason: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=reason) as raised:
        ReadOptions.parse(options)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        ({"operation": "insert"}, "operation", "upsert, delete, bulk_load"),
        ({"nulls": "ignore"}, "nulls", "refuse, skip, delete"),
        ({"skip_equal": "yes"}, "skip_equal", "false, true"),
        ({"transaction_rows": "0"}, "transaction_rows", "from 1 to 100000"),
        ({"columns": "title"}, "columns", "operation 'delete'"),
        ({"load_name": "crawl"}, "load_name", "operation 'bulk_load'"),
        ({"as_of": "2026-01-01"}, "as_of", "no option of writing"),
    ],
)
def test_writing_names_the_option_that_is_wrong(
    options: dict[str, str], field: str, reason: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=reason) as raised:
        WriteOptions.parse({"table": "x", **options})
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"key": [], "columns": {"a": {"type": "text"}}}, "key: has no parts"),
        ({"key": {"name": "k", "type": "integer"}, "columns": {}}, "key.type: expected one of"),
        ({"key": {"name": "k", "type": "text"}, "columns": {}}, "columns: expected fields"),
        (
            {"key": {"name": "k", "type": "text"}, "columns": {"a": {"type": "date"}}},
            "columns.a.type: expected one of raw, text",
        ),
        (
            {"key": {"name": "k", "type": "text"}, "columns": {"K": {"type": "text"}}},
            "two fields are named 'k'",
        ),
        (
            {
                "key": {"name": "k", "type": "text"},
                "columns": {"a": {"type": "text"}, "b": {"type": "text", "column": "a"}},
            },
            "two fields are stored in column b'a'",
        ),
        (
            {"key": {"name": "k", "type": "text"}, "columns": {"\ud800": {"type": "text"}}},
            "half of a surrogate pair",
        ),
        (
            {"key": {"name": "k", "type": "text"}, "columns": {"a": {"type": "text", "cf": "f"}}},
            "columns.a: 'cf' is not known",
        ),
    ],
)
def test_a_wrong_catalogue_says_where(document: object, reason: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=reason) as raised:
        Catalogue.parse(json.dumps(document))
    assert raised.value.field == "catalog"


KEY = StructField("url", StringType())
TITLE = StructField("title", StringType())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ([TITLE], "the key field 'url' is missing"),
        ([KEY], "nothing to write besides the key"),
        ([KEY, StructField("titel", StringType())], "'titel' is not in the catalogue"),
        ([KEY, StructField("visits", StringType())], "'visits' is string; .* bigint"),
        ([StructField("url", LongType()), TITLE], "'url' is bigint; .* string"),
        ([KEY, TITLE, StructField("Title", StringType())], "'Title' is there twice"),
        ([], "no fields"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused(fields: list[StructField], reason: str) -> None:
    shape = shape_of(Catalogue.parse(CATALOG))
    with pytest.raises(errors.SchemaError, match=reason):
        shape.check_write(StructType(fields), None, deletes=False)


@pytest.mark.parametrize(
    ("fields", "reason"), [([], "no fields"), ([TITLE, TITLE], "'title' is there twice")]
)
def test_a_schema_that_cannot_be_read_is_refused(fields: list[StructField], reason: str) -> None:
    with pytest.raises(errors.SchemaError, match=reason):
        shape_of(Catalogue.parse(CATALOG)).check_read(StructType(fields))


def test_streams_are_refused_with_what_to_do_instead() -> None:
    source = PercolatorDataSource({"table": "x", "checkpointLocation": "/somewhere"})
    with pytest.raises(errors.UsageError, match="observers"):
        source.streamReader(StructType([KEY]))
    with pytest.raises(errors.UsageError, match="foreachBatch"):
        source.streamWriter(StructType([KEY]), overwrite=False)


def test_smaller_numbers_are_widened() -> None:
    fields = [KEY, StructField("visits", IntegerType())]
    shape_of(Catalogue.parse(CATALOG)).check_write(StructType(fields), None, deletes=False)


def test_names_of_options_are_the_same_in_any_case() -> None:
    assert (
        ReadOptions.parse({"TABLE": "x", "Partition_Bytes": "2000000"}).partition_bytes == 2000000
    )


def test_the_data_source_is_found_under_its_module() -> None:
    import pyspark_percolator

    assert pyspark_percolator.DefaultSource is PercolatorDataSource
    assert PercolatorDataSource.name() == "percolator"
