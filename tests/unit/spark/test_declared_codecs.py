"""A frame is not written with other types than the table's codecs."""

from __future__ import annotations

import json

import pytest

from percolator.codec_names import CodecNames
from percolator.errors import SchemaError
from percolator.spark.catalog import FrameCatalog, require_declared


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
