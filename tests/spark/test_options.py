"""A wrong option is refused by its name before anything starts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import SparkSession
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

import percolator
import percolator.spark
from percolator import Table, Timestamp, errors
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.services.local.cluster import LocalCluster
from percolator.spark.bulk_load import bulk_load
from percolator.spark.catalog import FrameCatalog
from percolator.spark.change_rows import stream_schema
from percolator.spark.chosen_rows import ENTRIES_MAX, RowRanges, RowsBetween, chosen_rows
from percolator.spark.data_source import PercolatorDataSource
from percolator.spark.options import ReadOptions, StreamOptions, WriteOptions
from percolator.spark.shapes import shape_of
from percolator.spark.snapshots import SparkSnapshot
from percolator.spark.values import decoded
from percolator.spark.writers import merge_frame
from tests.spark.tables import CATALOG as PAGES_CATALOG
from tests.spark.tables import PAGES, Pages

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
        ({"atomic": "true", "operation": "bulk_load"}, "atomic", "a bulk load appears at once"),
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
    for option, begun in (
        ("Snapshot", "snapshot"),
        ("now", "now"),
        ("77", 77),
        (moment, Timestamp.parse_to_read(moment)),
    ):
        assert StreamOptions.parse({"table": "x", "starting_from": option}).starting_from == begun


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


# Options about keys choose exactly the rows that they describe, in the types of the catalogue.


def _catalog(*types: str) -> FrameCatalog:
    key = [{"name": f"part{number}", "type": kind} for number, kind in enumerate(types)]
    return FrameCatalog.parse(json.dumps({"key": key, "columns": {"value": {"type": "text"}}}))


TEXT, INTEGER, RAW = _catalog("text"), _catalog("ordered_integer"), _catalog("raw")
PAIR = _catalog("text", "ordered_integer")
texts = st.text(st.characters(codec="utf-8"), max_size=3)
integers = st.integers(-(2**63), 2**63 - 1)
few = st.integers(-3, 3)


def _contains(rows: RowRanges, row: bytes) -> bool:
    found = [one for one in rows.ranges if one.start <= row and (not one.end or row < one.end)]
    assert len(found) <= 1, "the row would be read twice"
    return bool(found)


def _chosen(catalogue: FrameCatalog | None, stored: Any, **options: Any) -> bool:
    """True if these options choose the row with this key."""
    row = stored if catalogue is None else catalogue.key_codec.encode(stored)
    return _contains(chosen_rows(options, catalogue), row)


@given(first=texts, last=texts, key=texts)
def test_bounds_of_text_choose_what_lies_between_them_in_bytes(
    first: str, last: str, key: str
) -> None:
    if first.encode() < last.encode():
        expected = first.encode() <= key.encode() < last.encode()
        assert _chosen(TEXT, key, key_from=first, key_to=last) is expected
    assert _chosen(TEXT, key, key_from=first) is (first.encode() <= key.encode())


@given(bound=integers, key=integers)
def test_bounds_of_integers_are_in_the_order_of_numbers(bound: int, key: int) -> None:
    assert _chosen(INTEGER, key, key_from=str(bound)) is (key >= bound)
    assert _chosen(INTEGER, key, key_to=str(bound)) is (key < bound)
    assert _chosen(INTEGER, key, key=str(bound)) is (key == bound)


@given(prefix=texts.filter(bool), key=texts)
def test_a_prefix_chooses_the_keys_that_begin_with_it(prefix: str, key: str) -> None:
    assert _chosen(TEXT, key, key_prefix=prefix) is key.startswith(prefix)


@given(keys=st.lists(texts, max_size=4), key=texts)
def test_keys_choose_themselves_and_nothing_between_them(keys: list[str], key: str) -> None:
    assert _chosen(TEXT, key, keys=json.dumps(keys)) is (key in keys)


@given(first=st.tuples(texts, few), last=st.tuples(texts, few), key=st.tuples(texts, few))
def test_keys_of_several_parts_are_compared_part_by_part(
    first: tuple[str, int], last: tuple[str, int], key: tuple[str, int]
) -> None:
    def order(one: tuple[Any, ...]) -> tuple[Any, ...]:
        return (one[0].encode(), *one[1:])

    assert _chosen(PAIR, key, key=json.dumps(first)) is (key == first)
    assert _chosen(PAIR, key, key_prefix=json.dumps(first[:1])) is (key[0] == first[0])
    assert _chosen(PAIR, key, key_from=json.dumps(first)) is (order(key) >= order(first))
    assert _chosen(PAIR, key, key_to=json.dumps(last)) is (order(key) < order(last))
    assert _chosen(PAIR, key, key_from=json.dumps(first[:1])) is (
        order(key[:1]) >= order(first[:1])
    )
    assert _chosen(PAIR, key, key_to=json.dumps(last[:1])) is (order(key[:1]) < order(last[:1]))


bounds = st.binary(max_size=2)
ranges = st.builds(RowsBetween, bounds, bounds).filter(
    lambda one: not one.end or one.start < one.end
)


@given(some=st.lists(ranges, max_size=5), cut=st.lists(bounds.filter(bool), max_size=3), row=bounds)
def test_ranges_cut_into_tablets_have_each_row_once(
    some: list[RowsBetween], cut: list[bytes], row: bytes
) -> None:
    wanted = RowRanges(some)
    expected = any(one.start <= row and (not one.end or row < one.end) for one in some)
    assert _contains(wanted, row) is expected
    edges = [b"", *sorted(set(cut)), b""]
    tablets = [RowsBetween(a, b) for a, b in itertools.pairwise(edges)]
    parts = [RowRanges(wanted.within(tablet)) for tablet in tablets]
    assert sum(_contains(part, row) for part in parts) == expected


def test_ranges_of_all_kinds_are_combined_and_overlaps_are_read_once() -> None:
    entries = [{"to": "b"}, {"from": "a", "to": "c"}, {"key": "d"}, {"prefix": "e"}, {"key": "e1"}]
    rows = chosen_rows({"key_ranges": json.dumps(entries)}, TEXT)
    assert rows.ranges == (
        RowsBetween(b"", b"c"),
        RowsBetween(b"d", b"d\0"),
        RowsBetween(b"e", b"f"),
    )


def test_bytes_are_given_as_text_or_in_hexadecimal() -> None:
    assert _chosen(None, b"\x00\xff", key="hex:00ff")
    assert _chosen(RAW, b"abc", keys='["abc", "hex:00"]')
    assert _chosen(TEXT, "hex:00ff", key="hex:00ff"), "text is text"


def test_lists_without_entries_choose_nothing() -> None:
    assert chosen_rows({"keys": "[]"}, TEXT).ranges == ()
    assert chosen_rows({"key_ranges": "[]"}, None).ranges == ()


@pytest.mark.parametrize(
    ("catalogue", "options", "field", "reason"),
    [
        (TEXT, {"key": "a", "keys": "[]"}, "keys", "together with key; key_ranges takes several"),
        (TEXT, {"key_prefix": "a", "key_from": "a"}, "key_from", "together with key_prefix"),
        (TEXT, {"key_from": "b", "key_to": "b"}, "key_to", "'b' is not above key_from, 'b'"),
        (INTEGER, {"key_from": "10", "key_to": "9"}, "key_to", "9 is not above key_from, 10"),
        (TEXT, {"key_to": ""}, "key_to", "'' is not above key_from, ''"),
        (TEXT, {"key_prefix": ""}, "key_prefix", "is empty; leave it out"),
        (INTEGER, {"key": "seven"}, "key", "expected an integer key, found 'seven'"),
        (INTEGER, {"key": "9223372036854775808"}, "key", "64"),
        (INTEGER, {"keys": '["7"]'}, "keys", "entry 1: expected an integer .* found '7'"),
        (INTEGER, {"keys": "[1, true]"}, "keys", "entry 2: expected an integer .* found True"),
        (INTEGER, {"keys": "[1.0]"}, "keys", "entry 1: expected an integer .* found 1.0"),
        (INTEGER, {"key_prefix": "1"}, "key_prefix", "integers have no prefix; give key_from"),
        (TEXT, {"keys": "[7]"}, "keys", "entry 1: expected text for a key of type text, found 7"),
        (TEXT, {"keys": "['a']"}, "keys", "is not JSON"),
        (TEXT, {"keys": '"a"'}, "keys", "expected a JSON list"),
        (TEXT, {"keys": '["\\ud800"]'}, "keys", "entry 1: the text cannot be encoded as UTF-8"),
        (None, {"keys": '["\\ud800"]'}, "keys", "entry 1: .* cannot be encoded as UTF-8"),
        (None, {"key": "hex:0g"}, "key", "hexadecimal digits, found '0g'"),
        (None, {"key": "b'\\x00'"}, "key", r"Python shows bytes; write 'hex:' \+ key.hex\(\)"),
        (TEXT, {"key": "a" * 5_000}, "key", "has 5000 bytes; a row key has at most 4096"),
        (PAIR, {"key": "a"}, "key", "is not JSON"),
        (PAIR, {"key": '["a"]'}, "key", r"expected a JSON list of 2 parts \(text, ordered_integer"),
        (PAIR, {"key_from": "[]"}, "key_from", "expected a JSON list of 1 to 2 parts"),
        (PAIR, {"key_prefix": '["a", 1, 2]'}, "key_prefix", "a JSON list of 1 to 2 parts"),
        (PAIR, {"keys": '[["a", 1], ["a", "1"]]'}, "keys", "entry 2: expected an integer"),
        (PAIR, {"key_to": '"a"'}, "key_to", "expected a JSON list of 1 to 2 parts"),
        (TEXT, {"key_ranges": '{"key": "a"}'}, "key_ranges", "expected a JSON list"),
        (TEXT, {"key_ranges": '["a"]'}, "key_ranges", 'entry 1: expected {"key": …}'),
        (TEXT, {"key_ranges": '[{"key": "a", "to": "b"}]'}, "key_ranges", "entry 1: expected"),
        (TEXT, {"key_ranges": "[{}]"}, "key_ranges", "entry 1: expected"),
        (TEXT, {"key_ranges": '[{"from": "a", "from": "b"}]'}, "key_ranges", "'from' appears twi"),
        (
            TEXT,
            {"key_ranges": '[{"key": "x"}, {"from": "b", "to": "a"}]'},
            "key_ranges",
            "entry 2: 'a' is not above from, 'b'",
        ),
        (TEXT, {"keys": json.dumps(["a"] * (ENTRIES_MAX + 1))}, "keys", "join with a frame"),
    ],
)
def test_what_is_wrong_with_a_key_is_said_of_its_option(
    catalogue: FrameCatalog | None, options: dict[str, str], field: str, reason: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=reason) as raised:
        chosen_rows(options, catalogue)
    assert raised.value.field == field


def test_key_options_are_for_reads_and_load_options_have_the_same_syntax() -> None:
    with pytest.raises(errors.InvalidArgument, match="not an option of writing"):
        WriteOptions.parse({"table": "x", "key": "a"})
    assert ReadOptions.parse({"table": "x", "KEY": "a"}).rows.ranges == (RowsBetween.only(b"a"),)
    catalog = json.dumps(
        {
            "key": [{"name": "a", "type": "text"}, {"name": "b", "type": "ordered_integer"}],
            "columns": {"value": {"type": "text"}},
        }
    )
    options = {"table": "x", "catalog": catalog, "operation": "bulk_load", "load_from": '["m"]'}
    encoded = PAIR.key_codec.encode_prefix(("m",))
    assert WriteOptions.parse(options).load_rows == RowsBetween(encoded)


# What cannot work fails on the driver before any task, with an error that names the mistake.


@pytest.fixture(scope="module")
def filled(db: percolator.Database) -> Pages:
    """A table with a row in each tablet."""
    return Pages(db, 4)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
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
        ({"catalog": PAGES_CATALOG, "columns": "titel"}, None, "did you mean 'title'"),
        ({"catalog": PAGES_CATALOG}, "url string, titel string", "'titel' is not in the catalogue"),
        ({"catalog": PAGES_CATALOG}, "url string, visits string", "'visits' is string"),
        ({}, "row string", "'row' is string"),
        ({"table": "nowhere"}, "row binary", "table: there is no table 'nowhere'"),
        ({"catalog": "stored", "table": "nowhere"}, "row binary", "there is no table 'nowhere'"),
        ({"as_of": "2999-01-01T00:00:00Z"}, "row binary", "as_of: .* is in the future"),
        ({"nulls": "skip"}, "row binary", "nulls: is not an option of reading"),
    ],
)
def test_a_read_that_cannot_work(
    spark: SparkSession, cluster: Any, filled: Pages, options: dict[str, str],
    schema: str | None, message: str,
) -> None:  # fmt: skip
    given = {"address": cluster.address, "table": filled.name, **options}
    reader = spark.read.format("percolator").options(**given)
    before = _jobs(spark)
    with pytest.raises(AnalysisException, match=message) as raised:
        (reader.schema(schema) if schema else reader).load().collect()
    assert "pickl" not in str(raised.value), "it would look like a bug in the data source"
    assert _jobs(spark) == before


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
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
    spark: SparkSession, cluster: Any, filled: Pages, options: dict[str, str],
    schema: str, message: str,
) -> None:  # fmt: skip
    given = {"address": cluster.address, "table": filled.name, "catalog": PAGES_CATALOG, **options}
    frame = spark.createDataFrame([], schema)
    before = _jobs(spark)
    with pytest.raises(AnalysisException, match=message):
        frame.write.format("percolator").options(**given).mode("append").save()
    assert _jobs(spark) == before


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
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
    spark: SparkSession, cluster: Any, filled: Pages, mode: str, options: dict[str, str],
    message: str,
) -> None:  # fmt: skip
    given = {"address": cluster.address, "table": filled.name, "catalog": PAGES_CATALOG, **options}
    frame = spark.createDataFrame([("a", "b", 1)], PAGES)
    before = filled.stored()
    with pytest.raises(AnalysisException, match=message):
        frame.write.format("percolator").options(**given).mode(mode).save()
    assert filled.stored() == before


def _jobs(spark: SparkSession) -> int:
    """The number of jobs started so far."""
    tracker = spark.sparkContext.statusTracker()
    return len(tracker.getJobIdsForGroup(None))


# Jobs and blocks that cannot do what they say are refused before they begin.


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_merging_is_the_only_operation_of_a_merge() -> None:
    with pytest.raises(InvalidArgument, match="operation: expected 'merge', found 'upsert'"):
        merge_frame(None, None, {"operation": "upsert"})  # type: ignore[arg-type]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_block_of_a_snapshot_is_entered_once() -> None:
    snapshot = SparkSnapshot(None, None, Timestamp(7))  # type: ignore[arg-type]
    with snapshot, pytest.raises(UsageError, match="begun already"):
        snapshot.__enter__()
    with pytest.raises(UsageError, match="make a new one"):
        snapshot.__enter__()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_another_type_than_the_columns_codec_is_refused_before_any_task(
    write: Any, spark: SparkSession, db: percolator.Database
) -> None:
    pages = Pages(db, 4)  # which declares the codecs
    frame = spark.createDataFrame([("a", "seven")], "url string, visits string")
    other = """{"key": {"name": "url", "type": "text"}, "columns": {"visits": {"type": "text"}}}"""
    with pytest.raises(AnalysisException, match="column 'visits': the program declares the codec"):
        write(frame, pages.name, catalog=other).save()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
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


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("row", "option"), [("a", "load_from"), ("c", "load_to")])
def test_a_row_outside_of_the_range_of_a_bulk_load_is_refused_by_name(
    spark: SparkSession, cluster: LocalCluster, pages: Pages, row: str, option: str
) -> None:
    frame = spark.createDataFrame([(row, "t", 1), ("b", "t", 1)], PAGES)
    given = {"address": cluster.address, "table": pages.name, "catalog": PAGES_CATALOG}
    with pytest.raises(PythonException, match=f"{option}: row '{row}' of the frame is"):
        bulk_load(frame, **given, load_from="b", load_to="c")
    assert pages.stored() == {}


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "helper",
    [
        lambda: percolator.spark.store_catalog("pages", PAGES_CATALOG),  # type: ignore[arg-type]
        lambda: percolator.spark.spark_catalog("pages", "url", {}),  # type: ignore[arg-type]
    ],
)
def test_helpers_that_take_a_table_say_so(helper: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="expected a Table, got str"):
        helper()


SPARK: Any = percolator.spark
A_TABLE, ANY_FRAME, ANY_SESSION = Table("pages"), None, None


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
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


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_row_that_is_twice_in_a_conditional_frame_is_refused(
    write: Any, spark: SparkSession, pages: Pages, db: percolator.Database
) -> None:
    frame = spark.createDataFrame([("a", "t", 1), ("a", "t", 2)], PAGES).coalesce(1)
    writer = write(frame, pages.name, catalog=PAGES_CATALOG, if_unchanged_since=int(db.timestamp()))
    with pytest.raises(PythonException, match=r"appears twice in the frame, .*: row 'a'"):
        writer.save()
    assert pages.stored() == {}
