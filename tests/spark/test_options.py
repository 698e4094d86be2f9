"""A wrong option is refused by its name before anything starts."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ByteType,
    DataType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from percolator import errors
from percolator.spark.catalog import FrameCatalog
from percolator.spark.change_rows import stream_schema
from percolator.spark.data_source import PercolatorDataSource
from percolator.spark.options import ReadOptions, StreamOptions, WriteOptions
from percolator.spark.shapes import shape_of
from percolator.spark.values import decoded
from percolator.timestamps import Timestamp

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
        ({"tabel": "x"}, "tabel", "did you mean 'table'"),
        ({"snapshot_timestamp": "1"}, "snapshot_timestamp", "did you mean 'snapshot_ts'"),
        ({"versionAsOf": "7"}, "versionasof", "to read the past, give snapshot_ts"),
        ({"timestampAsOf": "now"}, "timestampasof", "to read the past, give as_of"),
        ({"q": "7"}, "q", "not an option of percolator; there are address, as_of, atomic, catalog"),
        ({}, "table", "missing"),
        ({"table": "x", "path": "y"}, "table", "load"),
        ({"table": "x", "operation": "delete"}, "operation", "not an option of reading"),
        ({"table": "x", "snapshot_ts": "yesterday"}, "snapshot_ts", "expected a timestamp"),
        ({"table": "x", "snapshot_ts": "0"}, "snapshot_ts", "before every commit"),
        ({"paths": '["x", "y"]'}, "table", "load.. takes one"),
        ({"table": "x", "option.table": "x"}, "table", "or CREATE TEMPORARY VIEW"),
        ({"table": "x", "as_of": "2026-01-01T00:00:00"}, "as_of", "no time zone"),
        ({"table": "x", "as_of": "17"}, "as_of", "expected a date"),
        ({"table": "x", "as_of": "2026-01-01", "snapshot_ts": "1"}, "as_of", "together"),
        ({"table": "x", "columns": "a,,b"}, "columns", "different names, separated by commas"),
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
            "'name' appears twice",
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
        ({"operation": "insert"}, "operation", "upsert, delete, merge, bulk_load"),
        ({"nulls": "ignore"}, "nulls", "refuse, skip, delete"),
        ({"skip_equal": "yes"}, "skip_equal", "false, true"),
        ({"transaction_rows": "0"}, "transaction_rows", "from 1 to 100000"),
        ({"columns": "title"}, "columns", "operation 'delete'"),
        ({"load_name": "crawl"}, "load_name", "operation 'bulk_load'"),
        ({"as_of": "2026-01-01"}, "as_of", "not an option of writing"),
        ({"atomic": "yes"}, "atomic", "false, true"),
        ({"atomic": "true", "operation": "bulk_load"}, "atomic", "a bulk load appears at one"),
        ({"atomic": "true", "operation": "merge", "catalog": CATALOG}, "atomic", "upsert and del"),
        ({"atomic": "true", "if_unchanged_since": "7"}, "if_unchanged_since", "leave it out, or"),
        ({"atomic": "true", "skip_equal": "true"}, "skip_equal", "transactions of its own"),
        ({"atomic": "true", "transaction_rows": "7"}, "transaction_rows", "many transactions"),
        ({"keep_seconds": "60"}, "keep_seconds", "needs atomic=true"),
        ({"notify": "changed"}, "notify", "needs operation=bulk_load, atomic=true, or mode"),
        ({"atomic": "true", "notify": "none"}, "notify", "none is not possible.* Bulk load the"),
        ({"atomic": "true", "notify": "true"}, "notify", "expected one of all, changed, none"),
        ({"operation": "bulk_load", "notify": "changed"}, "notify", "false, true"),
        ({"atomic": "true", "keep_seconds": "1"}, "keep_seconds", "a number from 15"),
    ],
)
def test_writing_names_the_option_that_is_wrong(
    options: dict[str, str], field: str, reason: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=reason) as raised:
        WriteOptions.parse({"table": "x", **options})
    assert raised.value.field == field


def test_true_and_false_ignore_case() -> None:
    parsed = WriteOptions.parse({"table": "x", "atomic": "True", "skip_equal": "False"})
    assert (parsed.atomic, parsed.skip_equal) == (True, False)
    with pytest.raises(errors.InvalidArgument, match="is always atomic"):
        WriteOptions.parse({"table": "x", "atomic": "False"}, overwrite=True)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"key": [], "columns": {"a": {"type": "text"}}}, "key: has no parts"),
        ({"key": {"name": "k", "type": "integer"}, "columns": {}}, "key.type: expected one of"),
        ({"key": {"name": "k", "type": "text"}, "columns": {}}, "columns: expected fields"),
        (
            {"key": {"name": "k", "type": "text"}, "columns": {"a": {"type": "datetime"}}},
            r"columns.a.type: expected one of raw, text, .*, json, decimal.digits,places., found",
        ),
        (
            {"key": {"name": "k", "type": "text"}, "columns": {"a": {"type": "decimal(5, 6)"}}},
            "columns.a.type: .*no more places than digits",
        ),
        (
            {
                "key": {"name": "k", "type": "text"},
                "columns": {"a": {"type": "text", "schema": "array<int>"}},
            },
            "columns.a.schema: is for type json only",
        ),
        (
            {
                "key": {"name": "k", "type": "text"},
                "columns": {"a": {"type": "json", "schema": "struct<a:integer>"}},
            },
            "columns.a.schema: expected bigint, .*, found 'integer'",
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
            "cannot be encoded as UTF-8",
        ),
        (
            {"key": {"name": "k", "type": "text"}, "columns": {"a": {"type": "text", "cf": "f"}}},
            "columns.a: 'cf' is not known",
        ),
    ],
)
def test_a_wrong_catalogue_is_refused_with_the_place_of_the_mistake(
    document: object, reason: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=reason) as raised:
        FrameCatalog.parse(json.dumps(document))
    assert raised.value.field == "catalog"


KEY = StructField("url", StringType())
TITLE = StructField("title", StringType())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ([TITLE], "the key field 'url' is missing"),
        ([KEY], "nothing to write: the frame has only the key"),
        ([KEY, StructField("titel", StringType())], "'titel' is not in the catalogue"),
        ([KEY, StructField("visits", StringType())], "'visits' is string; .* bigint"),
        ([StructField("url", LongType()), TITLE], "'url' is bigint; .* string"),
        ([KEY, TITLE, StructField("Title", StringType())], "'Title' appears twice"),
        ([], "no fields"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused(fields: list[StructField], reason: str) -> None:
    shape = shape_of(FrameCatalog.parse(CATALOG))
    with pytest.raises(errors.SchemaError, match=reason):
        shape.check_write(StructType(fields), None, deletes=False)


@pytest.mark.parametrize(
    ("fields", "reason"), [([], "no fields"), ([TITLE, TITLE], "'title' appears twice")]
)
def test_a_schema_that_cannot_be_read_is_refused(fields: list[StructField], reason: str) -> None:
    with pytest.raises(errors.SchemaError, match=reason):
        shape_of(FrameCatalog.parse(CATALOG)).check_read(StructType(fields))


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        ({}, "checkpointLocation", "give it as an option of the query"),
        ({"checkpointLocation": "x", "atomic": "false"}, "atomic", "each batch of a stream is"),
        ({"checkpointLocation": "x", "skip_equal": "true"}, "skip_equal", "leave it out"),
        ({"checkpointLocation": "x", "key": "a"}, "key", "not an option of writing"),
    ],
)
def test_a_sink_names_the_option_that_is_wrong(
    options: dict[str, str], field: str, reason: str
) -> None:
    source = PercolatorDataSource({"table": "x", **options})
    with pytest.raises(errors.InvalidArgument, match=reason) as raised:
        source.streamWriter(StructType([KEY]), overwrite=False)
    assert raised.value.field == field


def test_a_sink_does_not_replace_its_table_by_each_batch() -> None:
    source = PercolatorDataSource({"table": "x", "checkpointLocation": "x"})
    with pytest.raises(errors.InvalidArgument, match="complete would delete the table"):
        source.streamWriter(StructType([KEY]), overwrite=True)


def test_a_stream_has_the_fields_of_the_table_and_what_has_happened_to_them() -> None:
    typed = ReadOptions.parse({"table": "x", "catalog": CATALOG, "columns": "visits"})
    assert stream_schema(typed).simpleString() == (
        "struct<url:string,visits:bigint,change_kind:string,commit_timestamp:bigint>"
    )
    assert stream_schema(ReadOptions.parse({"table": "x"})).simpleString() == (
        "struct<row:binary,column:binary,value:binary,change_kind:string,commit_timestamp:bigint>"
    )


@pytest.mark.parametrize("name", ["change_kind", "Commit_Timestamp"])
def test_a_catalogue_cannot_have_the_fields_that_a_stream_adds(name: str) -> None:
    columns = {name: {"type": "text"}}
    catalog = json.dumps({"key": {"name": "url", "type": "text"}, "columns": columns})
    with pytest.raises(errors.InvalidArgument, match=f"'{name}', which a stream adds"):
        stream_schema(ReadOptions.parse({"table": "x", "catalog": catalog}))


@pytest.mark.parametrize(
    ("catalog", "field", "reason"),
    [
        (CATALOG, StructField("change_kind", LongType()), "'change_kind' is bigint; .* string"),
        (CATALOG, StructField("titel", StringType()), "'titel' is not in the catalogue"),
        ("", StructField("url", StringType()), "'url' is not in raw cells"),
    ],
)
def test_a_schema_that_a_stream_cannot_have_is_refused(
    catalog: str, field: StructField, reason: str
) -> None:
    given = {"table": "x", "starting_from": "now", **({"catalog": catalog} if catalog else {})}
    with pytest.raises(errors.SchemaError, match=reason):
        PercolatorDataSource(given).streamReader(StructType([field]))


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        ({}, "starting_from", "say where the stream begins"),
        ({"starting_from": "yesterday"}, "starting_from", "neither a number nor"),
        ({"starting_from": "0"}, "starting_from", "before every commit"),
        ({"starting_from": "now", "rows_per_batch": "0"}, "rows_per_batch", "from 1 to"),
        ({"starting_from": "now", "failOnDataLoss": "no"}, "failondataloss", "true, false"),
        ({"starting_from": "now", "snapshot_ts": "7"}, "snapshot_ts", "not an option of streams"),
    ],
)
def test_streaming_names_the_option_that_is_wrong(
    options: dict[str, str], field: str, reason: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=reason) as raised:
        StreamOptions.parse({"table": "x", **options})
    assert raised.value.field == field


def test_a_stream_begins_at_a_snapshot_now_or_an_instant() -> None:
    moment = "1970-01-01T00:00:01Z"
    for given, begun in (
        ("Snapshot", "snapshot"),
        ("now", "now"),
        ("77", 77),
        (moment, Timestamp.parse_to_read(moment)),
    ):
        assert StreamOptions.parse({"table": "x", "starting_from": given}).starting_from == begun


def test_options_of_streams_and_of_batches_are_told_apart() -> None:
    with pytest.raises(errors.InvalidArgument, match="starting_from: is missing"):
        PercolatorDataSource({"table": "x"}).streamReader(StructType([KEY]))
    with pytest.raises(errors.InvalidArgument, match="not an option of reading"):
        ReadOptions.parse({"table": "x", "starting_from": "now"})


@pytest.mark.parametrize(
    ("kind", "spark_type", "small", "wide"),
    [
        ("integer", ByteType(), pa.array([-128, None, 127], pa.int8()), pa.int64()),
        ("integer", ShortType(), pa.array([-(2**15), None, 2**15 - 1], pa.int16()), pa.int64()),
        ("integer", IntegerType(), pa.array([-(2**31), None, 2**31 - 1], pa.int32()), pa.int64()),
        ("float", FloatType(), pa.array([-0.1, None, 1e38], pa.float32()), pa.float64()),
    ],
)
def test_smaller_numbers_are_widened(
    kind: str, spark_type: DataType, small: pa.Array, wide: pa.DataType
) -> None:
    """They are accepted, and stored as the same numbers of 64 bits are."""
    columns = {"number": {"type": kind}}
    catalog = json.dumps({"key": {"name": "url", "type": "text"}, "columns": columns})
    shape = shape_of(FrameCatalog.parse(catalog))
    shape.check_write(StructType([KEY, StructField("number", spark_type)]), None, deletes=False)
    urls = pa.array(["a", "b", "c"])
    stored = shape.cells(pa.record_batch([urls, small], ["url", "number"]), "delete")
    expected = shape.cells(pa.record_batch([urls, small.cast(wide)], ["url", "number"]), "delete")
    assert stored == expected
    values = [value for _, _, value in stored]
    assert decoded(values, kind, wide).to_pylist() == small.to_pylist()


def test_names_of_options_ignore_case() -> None:
    assert (
        ReadOptions.parse({"TABLE": "x", "Partition_Bytes": "2000000"}).partition_bytes == 2000000
    )


def test_the_data_source_is_found_under_its_module() -> None:
    import pyspark_percolator

    assert pyspark_percolator.DefaultSource is PercolatorDataSource
    assert PercolatorDataSource.name() == "percolator"
