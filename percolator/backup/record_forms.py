"""Row keys and values of one table as JSON, exactly: what is written is read as the same bytes.

A value is what its codec reads: a number, a text, a list. What JSON cannot hold exactly, or what
the codec would write in another way, is the text "hex:" with its bytes; so is everything that no
codec here can read. What has no codec at all is text, or such bytes. As on the command line, a text
that begins with "hex:" always means bytes, and so is itself written as bytes.
"""

from __future__ import annotations

import math
from typing import Any

from percolator import codecs, named_codecs
from percolator.backup.exported import ExportedCodecs
from percolator.codecs import Codec
from percolator.errors import InvalidArgument
from percolator.row_text import HEX, row_bytes

_LEVELS_MAX = 100
"""Deeper values are written as bytes. How deep JSON may be for whoever reads it differs between
programs, and in Python with the version and with how many functions are being run."""


class RecordForms:
    """How the rows and values of a table are written, and read back."""

    def __init__(self, kept: ExportedCodecs | None) -> None:
        kept = ExportedCodecs("", ()) if kept is None else kept
        self._key_name = kept.key
        self._key = named_codecs.key_codec(kept.key)
        self._names = {bytes.fromhex(column): codec for column, codec in kept.columns}
        self._codecs = {
            column: named_codecs.value_codec(name) for column, name in self._names.items()
        }

    def row_data(self, row: bytes) -> object:
        if self._key is None and self._key_name:
            return HEX + row.hex()
        shown = named_codecs.key_data(self._key, row)
        return shown if self._is_read_as(row, shown) else HEX + row.hex()

    def _is_read_as(self, row: bytes, shown: object) -> bool:
        try:
            return self.row_bytes(shown) == row
        except InvalidArgument:
            return False

    def row_bytes(self, written: object) -> bytes:
        """Raises `InvalidArgument` about the row."""
        if isinstance(written, str) and written.startswith(HEX):
            return row_bytes("row", written)
        if self._key is None and self._key_name:
            raise _expected("row", HEX, written)
        return named_codecs.key_from_data("row", self._key, written)

    def value_data(self, column: bytes, value: bytes) -> object:
        codec = self._codecs.get(column)
        if codec is None and column in self._names:
            return HEX + value.hex()
        shown = _shown(codec, value)
        if _is_deeper(shown, _LEVELS_MAX) or not _is_read_as(codec, value, shown):
            return HEX + value.hex()
        return shown

    def cell(self, name: str, written: object) -> tuple[bytes, bytes]:
        """The column and the stored bytes. Raises `InvalidArgument` about the column."""
        column = row_bytes("column", name)
        field = f"column {name!r}"
        if not column or column[0] == 0:
            raise InvalidArgument(field, "is not the name of a column")
        if isinstance(written, str) and written.startswith(HEX):
            return column, row_bytes(field, written)
        codec = self._codecs.get(column)
        if codec is None and column in self._names:
            raise _expected(field, HEX, written)
        return column, named_codecs.value_from_data(field, codec, written)


def _shown(codec: Codec[Any] | None, value: bytes) -> object:
    if codec is codecs.text:
        # JSON can hold every text, even one of several lines; a terminal cannot.
        try:
            return value.decode()
        except UnicodeDecodeError:
            return HEX + value.hex()
    return named_codecs.value_data(codec, value)


def _is_deeper(shown: object, levels: int) -> bool:
    """Whether lists and objects are nested in more levels than that."""
    if not isinstance(shown, dict | list):
        return False
    parts = shown.values() if isinstance(shown, dict) else shown
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def _is_read_as(codec: Codec[Any] | None, value: bytes, shown: object) -> bool:
    if isinstance(shown, float) and not math.isfinite(shown):
        return False
    try:
        if isinstance(shown, str) and shown.startswith(HEX):
            return row_bytes("value", shown) == value
        return named_codecs.value_from_data("value", codec, shown) == value
    except InvalidArgument:
        return False


def _expected(field: str, what: str, written: object) -> InvalidArgument:
    return InvalidArgument(field, f"expected {what}..., found {str(written)[:80]!r}")
