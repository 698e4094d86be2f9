"""Values are stored with the bytes of the codecs, and come back from Arrow unchanged."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from percolator import codecs, errors
from percolator.routing.cells import CellPage
from percolator.routing.range_scan import JoinedBytes, joined_page
from percolator.spark.catalog import FrameCatalog
from percolator.spark.shapes import shape_of
from percolator.spark.values import decoded, encoded, of_bytes
from percolator.tablet.scans import join_cells
from percolator.v1.tabletserver_pb2 import JoinedCells

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
