"""Values pass between Arrow and cells without change, and with the bytes of the codecs."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import codecs, errors
from percolator.spark.values import decoded, encoded

pytestmark = pytest.mark.spark

texts = st.text(st.characters(codec="utf-8"), max_size=5)
KINDS: dict[str, tuple[pa.DataType, Any, Any]] = {
    "raw": (pa.binary(), st.binary(max_size=5), codecs.raw.encode),
    "text": (pa.string(), texts, codecs.text.encode),
    "integer": (pa.int64(), st.integers(-(2**63), 2**63 - 1), codecs.integer.encode),
    "float": (pa.float64(), st.floats(allow_nan=False), codecs.float.encode),
    "boolean": (pa.bool_(), st.booleans(), codecs.boolean.encode),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_arrays_come_back_and_are_stored_as_the_codecs_store(kind: str, data: Any) -> None:
    target, values, encode = KINDS[kind]
    found = data.draw(st.lists(st.none() | values, max_size=6))
    skipped = data.draw(st.integers(0, len(found)))
    array = pa.array(found, target)[skipped:]  # a part of an array: what Spark hands over
    stored = encoded(array, kind)
    assert stored == [None if one is None else encode(one) for one in found[skipped:]]
    assert decoded(stored, kind, target).equals(pa.array(found[skipped:], target))


def test_json_is_stored_compactly_however_it_was_written() -> None:
    array = pa.array(['{"b": [1, 2],\n "a": null}', None])
    assert encoded(array, "json") == [codecs.json.encode({"b": [1, 2], "a": None}), None]
    assert json.loads(decoded(encoded(array, "json"), "json", pa.string())[0].as_py())["b"] == [
        1,
        2,
    ]


@pytest.mark.parametrize("kind", ["text", "integer", "float", "boolean"])
def test_stored_bytes_of_another_type_are_said_to_be_so(kind: str) -> None:
    with pytest.raises(errors.SchemaError, match="stored bytes are not"):
        decoded([b"\xff\xfe"], kind, KINDS[kind][0])


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(errors.SchemaError, match="not JSON"):
        encoded(pa.array(["{"]), "json")
