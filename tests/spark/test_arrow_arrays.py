"""Arrow arrays that are put together from blocks are those that `pa.array` makes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.spark import values

pytestmark = pytest.mark.spark

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
