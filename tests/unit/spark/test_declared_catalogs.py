"""A table's schema is a catalogue for Spark."""

from __future__ import annotations

import json

import pytest

from percolator.codec_names import CodecNames
from percolator.spark.catalog import FrameCatalog, declared_catalog

NAMES = (
    "raw",
    "text",
    "integer",
    "float",
    "boolean",
    "timestamp",
    "date",
    "decimal(10,2)",
    "json",
)


def test_each_column_with_a_codec_is_a_field_of_its_type() -> None:
    columns = {f"c:{name}".encode(): name for name in NAMES}
    made = declared_catalog(CodecNames("ordered_integer", columns))
    assert made is not None
    found = FrameCatalog.parse(made)
    assert [(field.name, field.type) for field in found.key] == [("key", "ordered_integer")]
    assert {field.column: field.type for field in found.values} == columns


@pytest.mark.parametrize(
    ("codec", "kind"),
    [("model(Order)", "json"), ("message(shop.Order)", "raw"), ("uuid", "raw"), ("money", "raw")],
)
def test_what_spark_has_no_type_for_is_json_or_bytes(codec: str, kind: str) -> None:
    made = declared_catalog(CodecNames("text", {b"a": codec}))
    assert made is not None
    assert json.loads(made)["columns"] == {"a": {"type": kind}}
    FrameCatalog.parse(made)


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("", [("key", "raw")]),
        ("text", [("key", "text")]),
        ("uuid", [("key", "raw")]),
        ("hashed(text)", [("key", "raw")]),
        ("tuple_of(text, ordered_integer)", [("key_1", "text"), ("key_2", "ordered_integer")]),
        ("tuple_of(text, uuid)", [("key", "raw")]),
    ],
)
def test_the_parts_of_a_key_are_fields_if_spark_can_have_all_of_them(
    key: str, fields: list[tuple[str, str]]
) -> None:
    made = declared_catalog(CodecNames(key, {b"a": "text"}))
    assert made is not None
    found = FrameCatalog.parse(made)
    assert [(field.name, field.type) for field in found.key] == fields


def test_without_a_column_that_a_frame_can_have_there_is_no_catalogue() -> None:
    assert declared_catalog(CodecNames("text")) is None
    assert declared_catalog(CodecNames("text", {b"\xff": "text"})) is None


@pytest.mark.parametrize(
    ("key", "columns", "fields"),
    [
        ("text", ["Key", "key_1"], ["row_key"]),
        ("text", ["key", "row_key"], ["row_row_key"]),
        ("tuple_of(text, text)", ["key_2"], ["row_key_1", "row_key_2"]),
    ],
)
def test_a_column_may_have_the_name_of_the_key(
    key: str, columns: list[str], fields: list[str]
) -> None:
    made = declared_catalog(CodecNames(key, {name.encode(): "text" for name in columns}))
    assert made is not None
    found = FrameCatalog.parse(made)
    assert [field.name for field in found.key] == fields
    assert [field.name for field in found.values] == columns
