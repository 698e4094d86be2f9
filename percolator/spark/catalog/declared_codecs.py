"""Refuses to read or write values of another type than the table's schema keeps for their column.

What is written as another type, other programs would misread; what is read as another, this one
does: eight bytes of an integer are a number as a float, too. A type that is bytes reads and writes
every column, as `codecs.stored` does.
"""

from __future__ import annotations

from percolator.codec_names import CodecNames, other_codec
from percolator.key_codec import name_of
from percolator.spark.catalog.declared_catalogs import type_of
from percolator.spark.catalog.frame_catalog import FrameCatalog

_BYTES = "raw"
_CODECS = {"int": "integer"}
"""The codec of a type that is not named like it."""


def require_declared(table: str, names: CodecNames, catalogue: FrameCatalog) -> None:
    """Raises `SchemaError` with both codecs if a field or the key is of another type."""
    key = name_of(catalogue.key_codec)
    if names.key and key not in (_BYTES, names.key):
        raise other_codec(table, None, names.key, key)
    for field in catalogue.values:
        codec = names.columns.get(field.column)
        if codec is None or field.type == _BYTES:
            continue
        declared = _CODECS.get(field.type, field.type)
        if declared != type_of(codec):
            raise other_codec(table, field.column, codec, declared)
