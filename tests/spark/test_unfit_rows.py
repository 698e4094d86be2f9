"""What cannot be stored or read as asked is refused by its name, and leaves nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import percolator
from percolator import codecs
from percolator.errors import InvalidArgument, SchemaError
from percolator.limits import Limits
from percolator.spark.catalog import FrameCatalog, parse_type
from percolator.spark.change_rows import CellChanges
from percolator.spark.options import ReadOptions
from percolator.spark.shapes import TypedRows, shape_of
from tests.spark.tables import CATALOG, PAGES, Pages

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

PLACE = "struct<lat:double,tags:array<string>>"
NESTED = json.dumps(
    {
        "key": {"name": "url", "type": "text"},
        "columns": {"place": {"type": "json", "schema": PLACE}, "note": {"type": "json"}},
    }
)
PARTS = json.dumps(
    {
        "key": [{"name": "host", "type": "text"}, {"name": "at", "type": "ordered_integer"}],
        "columns": {"visits": {"type": "integer"}},
    }
)
TOO_LONG = Limits().row_bytes_max + 1
TOO_LARGE = Limits().value_bytes_max + 1


def batch(**columns: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def latin(text: str) -> pa.Array:
    """What `CAST(bytes AS STRING)` makes of text in another encoding: Spark keeps the bytes."""
    return pa.array(["é", text.encode("latin-1")], pa.binary())[1:].view(pa.string())


@pytest.mark.parametrize(
    "field",
    [
        StructField("place", parse_type(PLACE), nullable=False),
        StructField(
            "place",
            StructType([StructField("lat", parse_type("double"), nullable=False)])
            .add("tags", parse_type("array<string>")),
        ),
        StructField("note", StringType(), nullable=False),
    ],
)  # fmt: skip
def test_a_field_that_may_be_null_cannot_be_declared_not_null(field: StructField) -> None:
    with pytest.raises(SchemaError, match=rf"'{field.name}' is declared not null"):
        shape_of(FrameCatalog.parse(NESTED)).check_read(StructType([field]))


def test_the_value_of_a_streamed_cell_cannot_be_declared_not_null() -> None:
    schema = StructType([StructField("value", BinaryType(), nullable=False)])
    with pytest.raises(SchemaError, match="'value' is declared not null"):
        CellChanges(ReadOptions.parse({"table": "x"}), schema, to_arrow_schema(schema))


def test_a_schema_and_columns_that_contradict_each_other_are_refused() -> None:
    shape = shape_of(FrameCatalog.parse(CATALOG))
    schema = StructType([StructField("url", StringType()), StructField("title", StringType())])
    assert shape.stored(schema, ("Title", "visits")) == (b"meta:title",)
    with pytest.raises(InvalidArgument, match="columns: leaves out 'title'"):
        shape.stored(schema, ("visits",))
    with pytest.raises(InvalidArgument, match=r"columns: .* no column 'titel'"):
        shape.stored(schema, ("titel",))


@pytest.mark.parametrize(
    ("catalog", "rows", "message"),
    [
        (NESTED, batch(url=["a"], note=["{"]), "field 'note': a value of type json is not JSON"),
        (
            NESTED,
            batch(url=["a"], place=[{"lat": float("nan"), "tags": None}]),
            "field 'place': not a JSON value",
        ),
        (CATALOG, batch(url=["k" * TOO_LONG], visits=[1]), f"field 'url': .* {TOO_LONG} bytes"),
        (CATALOG, batch(url=["a"], title=["t" * TOO_LARGE]), f"'title': .* {TOO_LARGE} bytes"),
        (
            None,
            batch(row=[b"r"], column=[b"c"], value=[b"v" * TOO_LARGE]),
            f"field 'value': .* {TOO_LARGE} bytes",
        ),
        (
            None,
            batch(row=[b"r" * TOO_LONG], column=[b"c"], value=[b"v"]),
            f"field 'row': .* {TOO_LONG} bytes",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_with_the_name_of_its_field(
    catalog: str | None, rows: pa.RecordBatch, message: str
) -> None:
    shape = shape_of(None if catalog is None else FrameCatalog.parse(catalog))
    with pytest.raises(SchemaError, match=message):
        shape.cells(rows, "refuse")


@pytest.mark.parametrize(
    ("key", "row", "value", "message"),
    [
        (
            "text",
            b"\xff\xfe",
            b"1",
            r"key 'id': 2 stored bytes are not UTF-8 text, in row 'hex:fffe'",
        ),
        ("ordered_integer", b"ab", b"1", "key 'id': 2 stored bytes are not .*, in row 'ab'"),
        ("text", b"z", b"{", "field 'note': 1 stored bytes are not JSON, in row 'z'"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_field_and_row(
    key: str, row: bytes, value: bytes, message: str
) -> None:
    columns = {"note": {"type": "json", "schema": "bigint"}}
    catalog = json.dumps({"key": {"name": "id", "type": key}, "columns": columns})
    shape = TypedRows(FrameCatalog.parse(catalog))
    schema = shape.schema(None)
    good = codecs.text.encode("a") if key == "text" else codecs.ordered_integer.encode(7)
    target = to_arrow_schema(schema, timezone="UTC")
    with pytest.raises(SchemaError, match=message):
        shape.arrays([good, row], [[b"1", value]], shape.read_fields(schema), target)


@pytest.mark.parametrize(
    ("catalog", "columns", "field"),
    [
        (CATALOG, {"url": ["a"], "title": latin("café")}, "title"),
        (CATALOG, {"url": latin("café"), "title": ["t"]}, "url"),
        (PARTS, {"host": latin("café"), "at": [1], "visits": [1]}, "host"),
        (NESTED, {"url": ["a"], "note": latin('"café"')}, "note"),
        (
            NESTED,
            {
                "url": ["a"],
                "place": pa.StructArray.from_arrays(
                    [pa.array([1.5]), pa.ListArray.from_arrays([0, 1], latin("café"))],
                    ["lat", "tags"],
                ),
            },
            "place",
        ),
    ],
)
def test_text_that_is_not_utf_8_is_not_stored_since_nobody_could_read_it(
    catalog: str, columns: dict[str, Any], field: str
) -> None:
    shape = shape_of(FrameCatalog.parse(catalog))
    with pytest.raises(SchemaError, match=f"field '{field}': text is not UTF-8"):
        shape.cells(batch(**columns), "refuse")


def test_a_row_whose_key_is_not_utf_8_is_not_looked_for() -> None:
    with pytest.raises(SchemaError, match="field 'url': text is not UTF-8"):
        shape_of(FrameCatalog.parse(CATALOG)).deletions(batch(url=latin("café")), None)


def test_a_read_of_nulls_that_were_declared_not_null_is_refused(
    read: Any, write: Any, spark: SparkSession, db: percolator.Database
) -> None:
    pages = Pages(db)
    write(spark.createDataFrame([("a", "t")], "url string, title string"), pages.name,
          catalog=CATALOG).save()  # fmt: skip
    reader = read(pages.name, catalog=CATALOG)
    visits = reader.schema("url string not null, title string, visits bigint").load()
    assert visits.where("visits is null").count() == 1
    with pytest.raises(AnalysisException, match="'visits' is declared not null"):
        reader.schema("title string, visits bigint not null").load().collect()


def test_a_row_key_that_is_too_long_leaves_no_lock_in_the_way_of_others(
    write: Any, spark: SparkSession, db: percolator.Database
) -> None:
    pages = Pages(db)
    # In several tablets, with the key that is too long as the first: it would be the primary.
    rows = [("b" * TOO_LONG, "t", 1), ("c1", "t", 2), ("d1", "t", 3)]
    frame = spark.createDataFrame(rows, PAGES).coalesce(1)
    with pytest.raises(PythonException, match="field 'url': a row key has 4097 bytes"):
        write(frame, pages.name, catalog=CATALOG, retry_seconds="5").save()
    assert pages.stored() == {}
