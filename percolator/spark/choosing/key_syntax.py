"""How options write row keys: plainly, or in JSON, and always as the types of the catalogue say.

A text key is given as it is, an integer in digits, bytes as text or as `hex:00ff`. A key of several
parts is a JSON list. Where a key is a bound or a prefix, its last parts may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from percolator import codecs
from percolator.errors import InvalidArgument, SchemaError
from percolator.limits import Limits
from percolator.row_text import row_bytes
from percolator.spark.catalog import strict_json
from percolator.spark.catalog.frame_catalog import FrameCatalog
from percolator.spark.choosing.row_ranges import RowsBetween

_EXPECTED = {"text": "text", "raw": "text, or hex:… for bytes", "ordered_integer": "an integer"}
_PYTHON_BYTES = re.compile(r"""b(['"]).*\1""", re.DOTALL)


class KeySyntax:
    """Turns what options say into row keys. Everything raises `InvalidArgument` for the option."""

    def __init__(self, catalogue: FrameCatalog | None) -> None:
        key = () if catalogue is None else catalogue.key
        self._types = tuple(part.type for part in key) or ("raw",)
        self._codec: Any = codecs.raw if catalogue is None else catalogue.key_codec

    def parsed(self, option: str, text: str) -> object:
        """An option that is one key, as JSON would have it."""
        if len(self._types) > 1:
            return strict_json.parsed(option, text)
        if self._types[0] != "ordered_integer":
            return text
        try:
            return int(text)
        except ValueError:
            raise InvalidArgument(option, f"expected an integer key, found {text!r}") from None

    def row(self, option: str, value: object) -> bytes:
        """A whole key."""
        return self._encoded(option, value, least=len(self._types))

    def bound(self, option: str, value: object) -> bytes:
        """The first row at or above a key, or above the first parts of one."""
        return self._encoded(option, value, least=1)

    def prefix(self, option: str, value: object) -> RowsBetween:
        """The rows whose keys begin like this."""
        if self._types == ("ordered_integer",):
            raise InvalidArgument(option, "integers have no prefix; give key_from and key_to")
        start = self._encoded(option, value, least=1)
        if not start:
            raise InvalidArgument(option, "is empty; leave it out to read all rows")
        return RowsBetween.with_prefix(start)

    def _encoded(self, option: str, value: object, *, least: int) -> bytes:
        parts = tuple(
            self._part(option, kind, part)
            for kind, part in zip(self._types, self._parts(option, value, least), strict=False)
        )
        try:
            if len(self._types) == 1:
                row: bytes = self._codec.encode(parts[0])
            else:
                row = self._codec.encode_prefix(parts)
        except SchemaError as error:
            raise InvalidArgument(option, error.message) from None
        most = Limits().row_bytes_max
        if len(row) > most:
            raise InvalidArgument(option, f"has {len(row)} bytes; a row key has at most {most}")
        return row

    def _parts(self, option: str, value: object, least: int) -> Sequence[object]:
        most = len(self._types)
        if most == 1:
            return (value,)
        if not isinstance(value, list) or not least <= len(value) <= most:
            parts = f"{least} to {most}" if least < most else f"{most}"
            raise InvalidArgument(
                option,
                f"expected a JSON list of {parts} parts ({', '.join(self._types)}), "
                f"found {value!r}",
            )
        return value

    def _part(self, option: str, kind: str, value: object) -> object:
        expected = int if kind == "ordered_integer" else str
        if not isinstance(value, expected) or isinstance(value, bool):
            raise InvalidArgument(
                option, f"expected {_EXPECTED[kind]} for a key of type {kind}, found {value!r}"
            )
        if kind != "raw" or not isinstance(value, str):
            return value
        if _PYTHON_BYTES.fullmatch(value):
            raise InvalidArgument(
                option, f"{value} is how Python shows bytes; write 'hex:' + key.hex()"
            )
        return row_bytes(option, value)
