"""A table's schema is a catalogue for Spark."""

from __future__ import annotations

import json

import pytest

from percolator.codecs.names import CodecNames
from percolator.errors import InvalidArgument, SchemaError
from percolator.spark.catalog import FrameCatalog, declared_catalog, require_declared

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


def _catalogue(kind: str, key: str = "text") -> FrameCatalog:
    document = {"key": {"name": "id", "type": key}, "columns": {"price": {"type": kind}}}
    return FrameCatalog.parse(json.dumps(document))


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("integer", "integer"),
        ("int", "integer"),
        ("raw", "integer"),
        ("raw", "uuid"),
        ("json", "model(Price)"),
        ("decimal(10,2)", "decimal(10,2)"),
        ("text", ""),
    ],
)
def test_the_same_codec_or_none_or_bytes_are_written(kind: str, codec: str) -> None:
    names = CodecNames(key="text", columns={b"price": codec} if codec else {})
    require_declared("goods", names, _catalogue(kind))
    require_declared("goods", CodecNames(), _catalogue(kind, "ordered_integer"))


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("text", "integer"), ("int", "float"), ("decimal(10,3)", "decimal(10,2)"), ("text", "uuid")],
)
def test_another_codec_is_refused_with_both_names(kind: str, codec: str) -> None:
    names = CodecNames(key="text", columns={b"price": codec})
    with pytest.raises(SchemaError, match="table 'goods', column 'price': the program declares"):
        require_declared("goods", names, _catalogue(kind))


def test_another_key_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"row keys: .* ordered_integer, but the table has text"):
        require_declared("goods", CodecNames(key="text"), _catalogue("text", "ordered_integer"))
    require_declared("goods", CodecNames(key="text"), _catalogue("text", "raw"))


CATALOGUE = FrameCatalog.parse(
    """{"key": {"name": "url", "type": "text"},
        "columns": {"title": {"type": "text"}, "Visits": {"type": "integer"}}}"""
)


def test_names_ignore_case() -> None:
    found = CATALOGUE.chosen(("VISITS", "Title"))
    assert [field.name for field in found] == ["Visits", "title"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("TITEL",), "no column 'TITEL'; did you mean 'title'"),
        (("visit",), "did you mean 'Visits'"),
        (("Url",), "'Url' is the key, which every row has"),
        (("title", "TITLE"), "names a column twice: title, TITLE"),
    ],
)
def test_a_wrong_name_is_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        CATALOGUE.chosen(names)
