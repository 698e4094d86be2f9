"""Row keys with a hash before them, for keys that come in order.

Rows are stored in the order of their keys. So if new keys are the highest so far, as numbers and
times are, all writers meet in the last tablet. A hash in front spreads them over all tablets.
"""

from __future__ import annotations

import zlib
from typing import Generic, TypeVar

from percolator.errors import InvalidArgument, SchemaError
from percolator.key_codec import KeyCodec, is_key_codec, name_of

K = TypeVar("K")

HASH_BYTES = 2
HASHES = 1 << 16
"""How many hashes there are, and so the most tablets that keys can be spread over."""


def row_hash(data: bytes) -> bytes:
    """The hash that stands before these bytes: the first two bytes of their CRC-32."""
    return (zlib.crc32(data) >> 16).to_bytes(HASH_BYTES, "big")


class HashedCodec(Generic[K]):
    """Puts a hash before the rows of another codec, which must not be in order."""

    def __init__(self, keys: KeyCodec[K]) -> None:
        self._keys = keys
        inner = name_of(keys)
        self.name = f"hashed({inner})" if inner else ""

    @property
    def keys(self) -> KeyCodec[K]:
        """The codec of the keys behind the hash."""
        return self._keys

    def encode(self, key: K) -> bytes:
        """The row of a key."""
        row = self._keys.encode(key)
        return row_hash(row) + row

    def decode(self, row: bytes) -> K:
        """The key of a row. Raises `SchemaError` if the hash does not belong to it."""
        if row_hash(row[HASH_BYTES:]) != row[:HASH_BYTES]:
            raise SchemaError(f"{len(row)} stored bytes are not a hashed key")
        return self._keys.decode(row[HASH_BYTES:])

    def encode_prefix(self, prefix: K) -> bytes:
        """Raises `SchemaError`."""
        raise SchemaError("hashed keys have no prefixes: keys that are alike are far apart")

    def encode_part(self, key: K) -> bytes:
        """The key as part of a tuple, whose other parts are in order."""
        part = self._keys.encode_part(key)
        return row_hash(part) + part

    def decode_part(self, row: bytes, start: int) -> tuple[K, int]:
        """The part that begins at `start`, and where the next one begins."""
        key, end = self._keys.decode_part(row, start + HASH_BYTES)
        if row_hash(row[start + HASH_BYTES : end]) != row[start : start + HASH_BYTES]:
            raise SchemaError(f"{len(row)} stored bytes are not a hashed key")
        return key, end

    def __repr__(self) -> str:
        return f"codecs.hashed({self._keys!r})"


class SplitPoint:
    """A row that begins a tablet, and need not be that of a key."""

    __slots__ = ("row",)

    def __init__(self, row: bytes) -> None:
        self.row = row

    def __repr__(self) -> str:
        return f"SplitPoint({self.row!r})"


def hashed(codec: KeyCodec[K]) -> HashedCodec[K]:
    """Row keys in no order, spread evenly over all tablets: for keys that come in order.

    Single rows are read and written as before. A scan yields all rows, ordered by hash, so that
    `start`, `end` and `prefix` are of no use. As the first part of a tuple, it spreads groups of
    rows, each of which stays together: with `tuple_of(hashed(text), ordered_integer)`, a scan with
    the prefix `("sensor 7",)` yields one sensor's rows in order.
    """
    if not is_key_codec(codec):
        raise InvalidArgument("codec", f"expected a codec for row keys, got {codec!r:.80}")
    return HashedCodec(codec)


def splits_for(codec: object, tablets: int) -> list[SplitPoint]:
    """Where to split a new table with hashed keys into `tablets` tablets of the same size.

    >>> db.create_table(readings, codecs.splits_for(readings.key, 8))
    """
    first = next(iter(getattr(codec, "parts", ())), codec)
    if not isinstance(first, HashedCodec):
        raise InvalidArgument(
            "codec", f"expected hashed keys, or a tuple of which they are the first part: {codec!r}"
        )
    if not 1 <= tablets <= HASHES:
        raise InvalidArgument("tablets", f"expected an int from 1 to {HASHES}, got {tablets!r}")
    return [
        SplitPoint((number * HASHES // tablets).to_bytes(HASH_BYTES, "big"))
        for number in range(1, tablets)
    ]
