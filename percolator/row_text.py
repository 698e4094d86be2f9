"""Row keys as people read and write them: as text, or as `hex:00ff`."""

from __future__ import annotations

import string

from percolator.errors import InvalidArgument

HEX = "hex:"


def row_bytes(field: str, text: str) -> bytes:
    """The row that `text` stands for: its UTF-8 bytes, or the bytes after "hex:"."""
    if not text.startswith(HEX):
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                field, f"{text!r} cannot be encoded as UTF-8; write bytes as hex:00ff"
            ) from None
    digits = text.removeprefix(HEX)
    if len(digits) % 2 or not set(digits) <= set(string.hexdigits):
        raise InvalidArgument(field, f"expected pairs of hexadecimal digits, found {digits[:40]!r}")
    return bytes.fromhex(digits)


def row_text(row: bytes) -> str:
    """The text that `row_bytes` turns into this row."""
    try:
        text = row.decode()
    except UnicodeDecodeError:
        return HEX + row.hex()
    return text if text.isprintable() and not text.startswith(HEX) else HEX + row.hex()


def quoted(name: bytes) -> str:
    """A row key or a column name in an error message: 'o4', or 'hex:00ff'; never b'o4'."""
    return repr(row_text(name))
