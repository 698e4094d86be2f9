"""Values are stored with the bytes of the codecs, and come back from Arrow unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

import percolator
from percolator import Table, codecs, errors
from percolator.errors import InvalidArgument, SchemaError
from percolator.limits import Limits
from percolator.routing.cells import CellPage
from percolator.routing.range_scan import JoinedBytes, joined_page
from percolator.spark import values
from percolator.spark.catalog import FrameCatalog, parse_type
from percolator.spark.change_rows import CellChanges
from percolator.spark.options import ReadOptions
from percolator.spark.shapes import TypedRows, shape_of
from percolator.spark.values import decoded, decoded_nested, encoded, encoded_nested, of_bytes
from percolator.tablet.scans import join_cells
from percolator.v1.tabletserver_pb2 import JoinedCells
from tests.spark.tables import CATALOG, PAGES, Pages, Read

pytestmark = pytest.mark.spark

MOMENT = pa.timestamp("us", tz="UTC")
texts = st.text(st.characters(codec="utf-8"), max_size=5)
KINDS: dict[str, tuple[pa.DataType, Any, Any]] = {
    "raw": (pa.binary(), st.binary(max_size=5), codecs.raw.encode),
    "text": (pa.string(), texts, codecs.text.encode),
    "integer": (pa.int64(), st.integers(-(2**63), 2**63 - 1), codecs.integer.encode),
    "float": (pa.float64(), st.floats(allow_nan=False), codecs.float.encode),
    "boolean": (pa.bool_(), st.booleans(), codecs.boolean.encode),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1), codecs.integer.encode),
    "timestamp": (MOMENT, st.datetimes(timezones=st.just(UTC)), codecs.timestamp.encode),
    "date": (pa.date32(), st.dates(), codecs.date.encode),
    "decimal(9,3)": (
        pa.decimal128(9, 3),
        st.integers(-(10**9) + 1, 10**9 - 1).map(lambda n: Decimal(n).scaleb(-3)),
        codecs.decimal(9, 3).encode,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_arrays_come_back_and_are_stored_as_the_codecs_store(kind: str, data: Any) -> None:
    target, values, encode = KINDS[kind]
    found = data.draw(st.lists(st.none() | values, max_size=6))
    skipped = data.draw(st.integers(0, len(found)))
    array = pa.array(found, target)[skipped:]  # a slice, as Spark passes them
    stored = encoded(array, kind)
    assert stored == [None if one is None else encode(one) for one in found[skipped:]]
    assert decoded(stored, kind, target).equals(pa.array(found[skipped:], target))
    present = [one for one in stored if one is not None]
    assert decoded(_joined(present), kind, target).equals(decoded(present, kind, target))


def _joined(values: list[bytes]) -> JoinedBytes:
    ends = accumulate(map(len, values), initial=0)
    return JoinedBytes(b"".join(values), b"".join(end.to_bytes(4, "little") for end in ends))


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=4))
def test_joined_values_are_refused_as_others_are(values: list[bytes]) -> None:
    for kind, (target, _, _) in KINDS.items():
        outcomes = []
        for stored in (values, _joined(values)):
            try:
                outcomes.append(decoded(stored, kind, target).to_string())
            except errors.SchemaError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_offsets_that_lead_elsewhere_make_no_array() -> None:
    wild = JoinedBytes(b"abc", b"".join(at.to_bytes(4, "little") for at in (0, 9, 3)))
    with pytest.raises(pa.ArrowInvalid):
        of_bytes(wild, pa.binary())


@given(st.lists(st.tuples(st.integers(0, 9), st.text(max_size=3)), max_size=5), st.booleans())
def test_rows_of_joined_pages_are_those_of_lists(found: list[Any], has_text: bool) -> None:
    catalogue = FrameCatalog.parse(
        json.dumps(
            {
                "key": {"name": "key", "type": "ordered_integer"},
                "columns": {"n": {"type": "integer"}, "t": {"type": "text"}},
            }
        )
    )
    shape = shape_of(catalogue)
    schema = shape.schema(None)
    target = to_arrow_schema(schema, timezone="UTC")
    cells = {}
    for number, text in found:
        row = codecs.ordered_integer.encode(number)
        cells[row, b"n"] = codecs.integer.encode(number)
        if has_text:
            cells[row, b"t"] = text.encode()
    ordered = sorted(cells)
    rows, columns = [row for row, _ in ordered], [column for _, column in ordered]
    values = [cells[one] for one in ordered]
    listed = CellPage(rows, columns, [7] * len(rows), values, [], [], b"", b"")
    message = JoinedCells()
    if join_cells(rows, columns, values, message):
        page = joined_page(message, b"", b"")
        assert page is not None
        joined = shape.batch(page, schema, target)
        assert joined.equals(shape.batch(listed, schema, target))


def test_json_is_stored_compactly_however_it_was_formatted() -> None:
    array = pa.array(['{"b": [1, 2],\n "a": null}', None])
    assert encoded(array, "json") == [codecs.json.encode({"b": [1, 2], "a": None}), None]
    assert json.loads(decoded(encoded(array, "json"), "json", pa.string())[0].as_py())["b"] == [
        1,
        2,
    ]


def test_moments_of_another_time_zone_are_stored_as_the_same_moments() -> None:
    moments = [datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), None]
    array = pa.array(moments, pa.timestamp("us", tz="Asia/Kathmandu"))
    stored = encoded(array, "timestamp")
    assert decoded(stored, "timestamp", MOMENT).to_pylist() == moments


@pytest.mark.parametrize(
    ("kind", "target", "stored", "reason"),
    [
        ("int", pa.int32(), codecs.integer.encode(2**31), "stored integer does not fit int"),
        ("date", pa.date32(), codecs.integer.encode(2**40), "beyond the year 9999"),
        ("decimal(4,2)", pa.decimal128(4, 2), b"123.45", "does not fit decimal"),
        ("decimal(4,2)", pa.decimal128(4, 2), b"1.234", "does not fit decimal"),
        ("decimal(4,2)", pa.decimal128(4, 2), b"1e1", "are not a decimal"),
    ],
)
def test_stored_values_that_do_not_fit_are_refused(
    kind: str, target: pa.DataType, stored: bytes, reason: str
) -> None:
    with pytest.raises(errors.SchemaError, match=reason):
        decoded([None, stored], kind, target)


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        ("timestamp", datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)),
        ("date", date.min, date.max),
    ],
)
def test_moments_and_days_that_python_does_not_have_are_not_stored(
    kind: str, first: Any, last: Any
) -> None:
    """Spark has them, but a program that meets one could not read the row."""
    target = KINDS[kind][0]
    ends = pa.array([first, None, last], target)
    assert decoded(encoded(ends, kind), kind, target).equals(ends)
    width = pa.int64() if kind == "timestamp" else pa.int32()
    for found, step in ((first, -1), (last, 1)):
        number = pa.array([found], target).cast(width)[0].as_py() + step
        beyond = pa.array([None, number], width).cast(target)
        with pytest.raises(errors.SchemaError, match=f"{number} .* beyond the years 1 to 9999"):
            encoded(beyond, kind)
        hidden = pa.Array.from_buffers(target, 2, [pa.py_buffer(b"\1"), beyond.buffers()[1]])
        assert encoded(hidden, kind)[1] is None, "what is null may be any number"


def test_a_batch_without_rows_may_have_no_blocks() -> None:
    for kind in ("integer", "float", "date", "timestamp"):
        target = KINDS[kind][0]
        assert encoded(pa.Array.from_buffers(target, 0, [None, None]), kind) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "raw"])
def test_stored_bytes_of_another_type_are_refused(kind: str) -> None:
    with pytest.raises(errors.SchemaError, match="stored bytes are not"):
        decoded([b"\xff\xfe"], kind, KINDS[kind][0])


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(errors.SchemaError, match="not JSON"):
        encoded(pa.array(["{"]), "json")


# Arrow arrays that are put together from blocks are those that `pa.array` makes.

LENGTHS = st.sampled_from([0, 1, 7, 8, 9, 17])


def _values(data: Any, values: Any) -> list[Any]:
    count = data.draw(LENGTHS)
    return list(data.draw(st.lists(st.none() | values, min_size=count, max_size=count)))


def _is(found: Any, values: list[Any], target: Any) -> None:
    found.validate(full=True)
    assert found.equals(pa.array(values, target))
    assert found.null_count == values.count(None)


@given(data=st.data())
def test_values_and_nulls_are_where_they_belong(data: Any) -> None:
    texts = _values(data, st.text(st.characters(codec="utf-8"), max_size=3))
    stored = [None if text is None else text.encode() for text in texts]
    _is(values.of_bytes(stored, pa.binary()), stored, pa.binary())
    _is(values.of_bytes(stored, pa.string()), texts, pa.string())
    blocks = _values(data, st.binary(min_size=8, max_size=8))
    _is(values.of_blocks(blocks, 8), blocks, pa.binary(8))
    flags = _values(data, st.booleans())
    _is(values.of_flags(flags), flags, pa.bool_())
    numbers = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9))
    _is(values.of_numbers(numbers, pa.int64()), numbers, pa.int64())


@given(data=st.data())
def test_bytes_are_those_of_each_value_wherever_the_array_begins(data: Any) -> None:
    texts = _values(data, st.text(st.characters(codec="utf-8"), max_size=3))
    stored = [None if text is None else text.encode() for text in texts]
    start = data.draw(st.integers(0, len(texts)))
    count = data.draw(st.integers(0, len(texts)))
    for kind in (pa.string(), pa.large_string()):
        part = pa.array(texts, kind).slice(start, count)
        assert values.bytes_in(part) == stored[start : start + count]
    for kind in (pa.binary(), pa.large_binary()):
        part = pa.array(stored, kind).slice(start, count)
        assert values.bytes_in(part) == stored[start : start + count]


def test_two_halves_of_a_character_in_neighbouring_values_are_not_text() -> None:
    first, second = "ü".encode()[:1], "ü".encode()[1:]
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        values.of_bytes([first, second], pa.string())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(pa.ArrowInvalid, match="8 bytes"):
        values.of_blocks([b"x" * 8, b"", b"x" * 16], 8)
    with pytest.raises(OverflowError):
        values.of_numbers([2**63], pa.int64())


READ = """
import json, sys
from pyspark.sql.pandas.types import to_arrow_schema
from percolator.routing.cells import CellPage
from percolator.spark.catalog import FrameCatalog
from percolator.spark.shapes import shape_of

types = {"a": "text", "b": "integer", "c": "boolean", "d": "float", "e": "timestamp", "f": "raw",
         "g": "int", "h": "date", "i": "json"}
columns = {name: {"type": kind} for name, kind in types.items()}
catalog = json.dumps({"key": {"name": "key", "type": "text"}, "columns": columns})
page = CellPage([b"k"], [b"b"], [7], [bytes(8)], [], [], b"", b"")
for catalogue in (FrameCatalog.parse(catalog), None):
    shape = shape_of(catalogue)
    schema = shape.schema(None)
    batch = shape.batch(page, schema, to_arrow_schema(schema, timezone="UTC"))
    assert batch.num_rows == 1
sys.exit("pandas" in sys.modules)
"""


def test_a_task_that_reads_does_not_import_pandas() -> None:
    """It takes 0.4 s of CPU, in each Python process that Spark starts."""
    subprocess.run([sys.executable, "-c", READ], check=True)


# Nested values come back from JSON as they were, and JSON of another form is refused.

nested_texts = st.text(st.characters(codec="utf-8"), max_size=4)
ATOMS: dict[str, Any] = {
    "string": nested_texts,
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "int": st.integers(-(2**31), 2**31 - 1),
    "boolean": st.booleans(),
    "double": st.floats(allow_nan=False, allow_infinity=False),
    "binary": st.binary(max_size=4),
    "date": st.dates(),
    "timestamp": st.datetimes().map(lambda moment: moment.replace(tzinfo=UTC)),
    "decimal(7,2)": st.decimals(-99999, 99999, places=2),
}


def types_and_values(depth: int) -> Any:
    """Draws a type and a strategy for its values, None among them."""
    atoms = st.sampled_from([(name, st.none() | values) for name, values in ATOMS.items()])
    if not depth:
        return atoms
    inner = types_and_values(depth - 1)
    return (
        atoms
        | inner.map(lambda one: (f"array<{one[0]}>", st.none() | st.lists(one[1], max_size=3)))
        | inner.map(
            lambda one: (
                f"map<string,{one[0]}>",
                st.none()
                | st.dictionaries(nested_texts, one[1], max_size=3).map(lambda d: list(d.items())),
            )
        )
        | st.lists(inner, min_size=1, max_size=3).map(
            lambda some: (
                f"struct<{','.join(f'f{n}:{one[0]}' for n, one in enumerate(some))}>",
                st.none() | st.fixed_dictionaries({f"f{n}": one[1] for n, one in enumerate(some)}),
            )
        )
    )


def arrow(kind: DataType) -> pa.DataType:
    return to_arrow_type(kind, timezone="UTC")


@given(drawn=types_and_values(3), data=st.data())
def test_values_of_any_type_come_back(drawn: tuple[str, Any], data: Any) -> None:
    text, values = drawn
    kind = parse_type(text)
    assert kind.simpleString() == text
    array = pa.array(data.draw(st.lists(values, max_size=3)), arrow(kind))
    stored = encoded_nested(array, kind)
    assert all(one is None or json.loads(one) is not ... for one in stored)
    assert decoded_nested(stored, kind, arrow(kind)).to_pylist() == array.to_pylist()


def test_what_is_stored_is_plain_json() -> None:
    kind = parse_type(
        "struct<at:timestamp,price:decimal(5,2),tags:array<string>,sizes:map<string,int>>"
    )
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    price = Decimal("1.50")
    row = {"at": moment, "price": price, "tags": ["ä", None], "sizes": [("m", 3)]}
    assert encoded_nested(pa.array([row, None], arrow(kind)), kind) == [
        '{"at":"2026-01-02T00:00:00+00:00","price":"1.50","tags":["ä",null],"sizes":{"m":3}}'.encode(),
        None,
    ]


@pytest.mark.parametrize(
    "zone", ["UTC", "Asia/Kathmandu", "+05:30", "GMT+01:00", "UTC+3", "PST", "Z"]
)
def test_moments_of_a_session_in_any_time_zone_are_stored_in_utc(zone: str) -> None:
    """Java knows more names of time zones than Python, and some moments have no local time."""
    kind = parse_type("struct<at:timestamp,all:array<timestamp>,by:map<string,timestamp>>")
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    rows = [{"at": first, "all": [last, None], "by": [("a", first)]}, None]
    array = pa.array(rows, arrow(kind)).cast(to_arrow_type(kind, timezone=zone))
    stored = encoded_nested(array, kind)
    assert stored == encoded_nested(pa.array(rows, arrow(kind)), kind)
    assert decoded_nested(stored, kind, arrow(kind)).to_pylist() == rows


def test_members_that_are_missing_are_null_and_unknown_ones_left_out() -> None:
    kind = parse_type("struct<a:int,b:string>")
    found = decoded_nested([b'{"c":1, "b":"x"}'], kind, arrow(kind))
    assert found.to_pylist() == [{"a": None, "b": "x"}]


@pytest.mark.parametrize(
    ("kind", "stored", "reason"),
    [
        ("struct<a:int>", "[1]", r"expected struct<a:int> in JSON, found \[1\]"),
        ("struct<a:struct<b:int>>", '{"a":{"b":"1"}}', "a.b: expected int in JSON, found '1'"),
        ("struct<a:array<int>>", '{"a":[1,2147483648]}', r"a\[\]: expected int"),
        ("array<bigint>", "[true]", "expected bigint in JSON, found True"),
        ("array<bigint>", "[1.0]", "expected bigint"),
        ("array<double>", '["1"]', "expected double"),
        ("array<double>", "[" + "9" * 400 + "]", "expected double"),
        ("map<string,date>", '{"x":"yesterday"}', r"\.\*: expected date"),
        ("array<timestamp>", '["2026-01-01T00:00:00"]', "expected timestamp"),
        ("array<decimal(3,1)>", '["1.25"]', "expected decimal"),
        ("array<binary>", '["?"]', "expected binary"),
        ("struct<a:int>", "{", "stored bytes are not JSON"),
        ("struct<a:string>", r'{"a":"\ud800"}', "text in JSON is not Unicode"),
        ("map<string,int>", r'{"\udc00":1}', "text in JSON is not Unicode"),
    ],
)
def test_json_of_another_form_is_refused_with_the_place(
    kind: str, stored: str, reason: str
) -> None:
    parsed = parse_type(kind)
    with pytest.raises(errors.SchemaError, match=reason):
        decoded_nested([stored.encode()], parsed, arrow(parsed))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "found 'nothing'"),
        ("integer", "found 'integer'"),
        ("array<int", "expected > after array"),
        ("array<int>>", "continues after the end"),
        ("map<int,int>", "keys of a map in JSON are string"),
        ("struct<>", "expected a field of a struct"),
        ("struct<a int>", "expected : after field"),
        ("struct<a:int b:int>", "expected , or >|found"),
        ("struct<a:int,A:int>", "two fields of one name"),
        ("decimal(39,2)", "found"),
        ("array<" * 40 + "int" + ">" * 40, "nested more than 32"),
    ],
)
def test_what_is_not_a_type_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_type(text)


# What cannot be stored or read as asked is refused by its name, and leaves nothing behind.

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
    """The result of `CAST(bytes AS STRING)` of text in another encoding: Spark keeps the bytes."""
    return pa.array(["é", text.encode("latin-1")], pa.binary())[1:].view(pa.string())


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
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


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_value_of_a_streamed_cell_cannot_be_declared_not_null() -> None:
    schema = StructType([StructField("value", BinaryType(), nullable=False)])
    with pytest.raises(SchemaError, match="'value' is declared not null"):
        CellChanges(ReadOptions.parse({"table": "x"}), schema, to_arrow_schema(schema))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_schema_and_columns_that_contradict_each_other_are_refused() -> None:
    shape = shape_of(FrameCatalog.parse(CATALOG))
    schema = StructType([StructField("url", StringType()), StructField("title", StringType())])
    assert shape.stored(schema, ("Title", "visits")) == (b"meta:title",)
    with pytest.raises(InvalidArgument, match="columns: leaves out 'title'"):
        shape.stored(schema, ("visits",))
    with pytest.raises(InvalidArgument, match=r"columns: .* no column 'titel'"):
        shape.stored(schema, ("titel",))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
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


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
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


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
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


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_row_whose_key_is_not_utf_8_is_not_looked_for() -> None:
    with pytest.raises(SchemaError, match="field 'url': text is not UTF-8"):
        shape_of(FrameCatalog.parse(CATALOG)).deletions(batch(url=latin("café")), None)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_read_of_nulls_that_were_declared_not_null_is_refused(
    read: Any, write: Any, spark: SparkSession, pages: Pages
) -> None:
    write(spark.createDataFrame([("a", "t")], "url string, title string"), pages.name,
          catalog=CATALOG).save()  # fmt: skip
    reader = read(pages.name, catalog=CATALOG)
    visits = reader.schema("url string not null, title string, visits bigint").load()
    assert visits.where("visits is null").count() == 1
    with pytest.raises(AnalysisException, match="'visits' is declared not null"):
        reader.schema("title string, visits bigint not null").load().collect()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_row_key_that_is_too_long_leaves_no_lock_in_the_way_of_others(
    write: Any, spark: SparkSession, pages: Pages
) -> None:
    # In several tablets, with the key that is too long as the first: it would be the primary.
    rows = [("b" * TOO_LONG, "t", 1), ("c1", "t", 2), ("d1", "t", 3)]
    frame = spark.createDataFrame(rows, PAGES).coalesce(1)
    with pytest.raises(PythonException, match="field 'url': a row key has 4097 bytes"):
        write(frame, pages.name, catalog=CATALOG, retry_seconds="5").save()
    assert pages.stored() == {}


# Every type of the catalogue makes the way from a DataFrame to the client and back.

TYPES_PLACE = "struct<lat:double,seen:timestamp,tags:array<string>,sizes:map<string,int>>"
ORDERS = Table("orders-of-types")
TYPES_MOMENT = datetime(2026, 3, 4, 5, 6, 7, 89, tzinfo=UTC)
FIELDS = {
    "seen": {"type": "timestamp"},
    "day": {"type": "date"},
    "price": {"type": "decimal(12, 2)"},
    "count": {"type": "int"},
    "place": {"type": "json", "schema": TYPES_PLACE},
    "notes": {"type": "json"},
}
TYPES_CATALOG = json.dumps({"key": {"name": "id", "type": "text"}, "columns": FIELDS})
SCHEMA = (
    f"id string, seen timestamp, day date, price decimal(12,2), count int, place {TYPES_PLACE}, "
    "notes string"
)


def _rows() -> list[tuple[Any, ...]]:
    place = {"lat": 1.5, "seen": TYPES_MOMENT, "tags": ["ä", None], "sizes": {"m": 3}}
    return [
        ("a", TYPES_MOMENT, date(2026, 3, 4), Decimal("-12.50"), -7, place, '{"x":1}'),
        ("b", None, None, None, None, None, "[]"),
    ]


@pytest.fixture(scope="module")
def written(spark: SparkSession, cluster: Any, db: percolator.Database) -> DataFrame:
    db.create_table(ORDERS, ["b"])
    frame = spark.createDataFrame(_rows(), SCHEMA)
    options = {"address": cluster.address, "table": ORDERS.name, "catalog": TYPES_CATALOG}
    frame.write.format("percolator").options(nulls="skip", **options).mode("append").save()
    return frame


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_client_reads_what_spark_has_written(
    written: DataFrame, db: percolator.Database
) -> None:
    kinds: dict[str, codecs.Codec[Any]] = {
        "seen": codecs.timestamp,
        "day": codecs.date,
        "price": codecs.decimal(12, 2),
        "count": codecs.integer,
        "place": codecs.json,
    }
    with db.snapshot() as snapshot:
        row = next(iter(snapshot.scan(ORDERS)))
    found = {name: row.get(ORDERS.column(name, codec)) for name, codec in kinds.items()}
    assert found == {
        "seen": TYPES_MOMENT,
        "day": date(2026, 3, 4),
        "price": Decimal("-12.50"),
        "count": -7,
        "place": {
            "lat": 1.5,
            "seen": TYPES_MOMENT.isoformat(),
            "tags": ["ä", None],
            "sizes": {"m": 3},
        },
    }


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_frame_reads_them_back_however_often_it_is_used(read: Read, written: DataFrame) -> None:
    frame = read(ORDERS.name, catalog=TYPES_CATALOG).load()
    assert [field.dataType for field in frame.schema] == [f.dataType for f in written.schema]
    expected = sorted(map(tuple, written.collect()))
    joined = frame.join(frame.where("price < 0").select("id"), "id")
    part = frame.where("place.lat > 1").cache()
    try:
        for _ in range(2):
            assert sorted(map(tuple, frame.collect())) == expected
            assert [tuple(row) for row in joined.collect()] == expected[:1]
            assert [row.place.sizes["m"] for row in part.collect()] == [3]
            assert frame.unionAll(part).where("day is null").count() == 1
    finally:
        part.unpersist()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_schema_may_ask_for_nested_fields_of_the_catalogue_only(
    read: Read, written: DataFrame
) -> None:
    frame = (
        read(ORDERS.name, catalog=TYPES_CATALOG).schema(f"id string, place {TYPES_PLACE}").load()
    )
    assert frame.select("place.tags").head(1)[0][0] == ["ä", None]
    with pytest.raises(Exception, match="'place' is struct<lat:double>; the catalogue has struct"):
        read(ORDERS.name, catalog=TYPES_CATALOG).schema("place struct<lat:double>").load().collect()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_value_that_does_not_fit_fails_the_read_with_its_field(
    read: Read, written: DataFrame, db: percolator.Database
) -> None:
    wrong = Table("orders-that-do-not-fit")
    db.create_table(wrong)
    with db.transaction() as tx:
        tx.set("c", wrong.column("place", codecs.json), {"lat": "north"})
    with pytest.raises(
        Exception, match="field 'place': lat: expected double in JSON, found 'north"
    ):
        read(wrong.name, catalog=TYPES_CATALOG).load().collect()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_narrower_decimals_are_written_and_wider_ones_refused(
    write: Any, spark: SparkSession, db: percolator.Database
) -> None:
    table = Table("prices")
    db.create_table(table)
    columns = {"price": {"type": "decimal(6,2)"}}
    catalog = json.dumps({"key": {"name": "id", "type": "text"}, "columns": columns})
    narrow = spark.createDataFrame([("a", Decimal("1.5"))], "id string, price decimal(3,1)")
    write(narrow, table.name, catalog=catalog).save()
    with db.snapshot() as snapshot:
        assert snapshot.get("a", table.column("price", codecs.decimal(6, 2))) == Decimal("1.50")
    wide = spark.createDataFrame([("a", Decimal("1.5"))], "id string, price decimal(7,3)")
    with pytest.raises(
        Exception, match=r"'price' is decimal\(7,3\); the catalogue has decimal\(6,2"
    ):
        write(wide, table.name, catalog=catalog).save()
