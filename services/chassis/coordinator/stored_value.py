"""The bytes of a value in a file: a line with its length and checksum, and the value.

A file that is not exactly what was written is refused: half a map of tablets is worse than none.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from percolator.errors import StoreFault, StoreUnusable
from percolator.services.chassis.coordinator.interface import VALUE_BYTES_MAX
from percolator.services.chassis.store.files import Files

FORMAT = 1
_HEADER = re.compile(rb"percolator-value ([0-9]{1,9}) ([0-9]{1,12}) ([0-9a-f]{8})\n")
_HEADER_BYTES_MAX = 64


def encode(value: bytes) -> bytes:
    """The content of the file."""
    return b"percolator-value %d %d %08x\n" % (FORMAT, len(value), zlib.crc32(value)) + value


def decode(data: bytes, where: object) -> bytes:
    """The value that was written; `StoreUnusable` for any other content."""
    header = _HEADER.match(data)
    if header is None:
        raise _damaged(where, "it does not begin with the header of a value")
    if int(header[1]) != FORMAT:
        raise _damaged(where, f"it has format {int(header[1])}, this release knows {FORMAT}")
    value = data[header.end() :]
    if len(value) != int(header[2]) or zlib.crc32(value) != int(header[3], 16):
        raise _damaged(where, "its checksum is wrong")
    return value


async def read(files: Files, path: Path) -> bytes:
    """The value in a file; `FileNotFoundError` if there is none."""
    data = await files.read(path, bytes_max=VALUE_BYTES_MAX + _HEADER_BYTES_MAX)
    return decode(data, path)


def _damaged(where: object, reason: str) -> StoreUnusable:
    return StoreUnusable(f"{where} is damaged: {reason}", fault=StoreFault.DAMAGED)
