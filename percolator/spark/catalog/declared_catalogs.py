"""The catalogue of a table, made from the codecs that its schema keeps.

The key is the field `key`, or `key_1`, `key_2` and so on for the parts of a tuple; if a column is
named like that, `row_key` and so on. A column that has a codec is a field of its name. Columns
without one are left out, because nothing says what they hold.
"""

from __future__ import annotations

import json

from percolator.codec_names import CodecNames
from percolator.codecs import TupleCodec
from percolator.key_codec import name_of
from percolator.named_codecs import key_codec
from percolator.spark.catalog.frame_catalog import DECIMAL, KEY_CODECS, VALUE_TYPES

_BYTES = "raw"


def declared_catalog(names: CodecNames) -> str | None:
    """The option `catalog`; None if the table has no column that a frame could have."""
    columns = {}
    for column, codec in sorted(names.columns.items()):
        try:
            columns[column.decode()] = {"type": type_of(codec)}
        except UnicodeDecodeError:
            continue  # a catalogue is JSON, which cannot name it
    if not columns:
        return None
    key, taken = _key_fields(names.key), {name.lower() for name in columns}
    while any(field["name"] in taken for field in key):
        key = [field | {"name": f"row_{field['name']}"} for field in key]
    document = {"key": key if len(key) > 1 else key[0], "columns": columns}
    return json.dumps(document, ensure_ascii=False)


def type_of(codec: str) -> str:
    if codec.startswith("model("):
        return "json"
    return codec if codec in VALUE_TYPES or DECIMAL.fullmatch(codec) else _BYTES


def _key_fields(name: str) -> list[dict[str, str]]:
    codec = key_codec(name)
    if isinstance(codec, TupleCodec):
        parts = [name_of(part) for part in codec.parts]
        if all(part in KEY_CODECS for part in parts):
            return [{"name": f"key_{at}", "type": part} for at, part in enumerate(parts, 1)]
    return [{"name": "key", "type": name if name in KEY_CODECS else _BYTES}]
