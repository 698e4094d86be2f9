"""The rows of a queue: entries by the hash of their key, and buckets, which wake the observer.

    e HASH KEY START PLACE      an entry; START and PLACE make it unique, and may give it its number
    v HASH KEY                  the value that the key's entries make (CombineQueue)
    w FIRST LAST                wakes the observer for entries with a hash from FIRST to LAST

A bucket is a range of hashes, and its row names that range. So entries do not depend on the number
of buckets: programs with different numbers of them work on one queue at the same time. Their
observers may then meet at the same entries. They delete them, so only one of them commits.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from percolator.arguments import require_whole
from percolator.codecs import KeyCodec, after_prefix, raw
from percolator.errors import InvalidArgument, SchemaError
from percolator.hashed_keys import HASH_BYTES, HASHES, row_hash
from percolator.key_codec import is_key_codec
from percolator.schema import Table

K = TypeVar("K")

BUCKETS_MAX = 4_096
TABLETS_MAX = 1_024
_ENTRY, _VALUE, _WAKE = b"e", b"v", b"w"
_START_BYTES, _PLACE_BYTES = 8, 4

Range = tuple[bytes, bytes]
"""The first row, and the first row after it."""


class HashedParts(Generic[K]):
    """Keys with their hash before them, so that keys in order are spread over all tablets."""

    def __init__(self, name: str, key: KeyCodec[K]) -> None:
        if not is_key_codec(key):
            raise InvalidArgument("key", f"expected a codec for row keys, got {key!r:.80}")
        self.table = Table(name, key=raw)
        self._key = key

    def part(self, key: K) -> bytes:
        """The hash of the key and the key, as all of its rows have them."""
        try:
            encoded: bytes = self._key.encode_part(key)
        except SchemaError as error:
            raise SchemaError(
                f"table {self.table.name!r}, key {key!r:.100}: {error.message}"
            ) from None
        return row_hash(encoded) + encoded

    def key(self, part: bytes) -> K:
        """The key of a part."""
        return self._key.decode_part(part, HASH_BYTES)[0]

    def splits(self, tablets: int) -> list[bytes]:
        """Where to split all parts, for `tablets` tablets."""
        require_whole(tablets, "tablets", 1)
        if tablets > TABLETS_MAX:
            raise InvalidArgument("tablets", f"at most {TABLETS_MAX}, got {tablets}")
        return [
            (number * HASHES // tablets).to_bytes(HASH_BYTES, "big") for number in range(1, tablets)
        ]


class BucketRows(HashedParts[K]):
    """Makes and reads the rows of one queue."""

    def __init__(self, name: str, key: KeyCodec[K], buckets: int) -> None:
        super().__init__(name, key)
        require_whole(buckets, "buckets", 1)
        if buckets > BUCKETS_MAX:
            raise InvalidArgument("buckets", f"at most {BUCKETS_MAX}, got {buckets}")
        self._buckets = buckets

    # ------------------------------------------------------------------ entries and values

    def entry(self, part: bytes, start: int, place: int) -> bytes:
        """The row of an entry. No two transactions have the same start timestamp, and `place` is
        different for each entry of one."""
        return (
            _ENTRY
            + part
            + start.to_bytes(_START_BYTES, "big")
            + place.to_bytes(_PLACE_BYTES, "big")
        )

    def entries(self, part: bytes) -> bytes:
        """The prefix of the rows of a key's entries."""
        return _ENTRY + part

    def all_entries(self) -> bytes:
        """The prefix of the rows of all entries."""
        return _ENTRY

    def part_of_entry(self, row: bytes) -> bytes:
        """The part in an entry's row."""
        return row[len(_ENTRY) : -_START_BYTES - _PLACE_BYTES]

    def start_of_entry(self, row: bytes) -> int:
        """The start timestamp, in an entry's row, of the transaction that has added it."""
        return int.from_bytes(row[-_START_BYTES - _PLACE_BYTES : -_PLACE_BYTES], "big")

    def place_of_entry(self, row: bytes) -> int:
        """The place in an entry's row."""
        return int.from_bytes(row[-_PLACE_BYTES:], "big")

    def value(self, part: bytes) -> bytes:
        """The row of a key's value."""
        return _VALUE + part

    def values(self) -> bytes:
        """The prefix of the rows of all values."""
        return _VALUE

    def part_of_value(self, row: bytes) -> bytes:
        """The part in a value's row."""
        return row[len(_VALUE) :]

    # ------------------------------------------------------------------ buckets

    def bucket(self, part: bytes) -> bytes:
        """The row of the bucket that the part belongs to."""
        number = int.from_bytes(part[:HASH_BYTES], "big") * self._buckets // HASHES
        first = -(-number * HASHES // self._buckets)
        last = -(-(number + 1) * HASHES // self._buckets) - 1
        return _WAKE + first.to_bytes(HASH_BYTES, "big") + last.to_bytes(HASH_BYTES, "big")

    def entries_of(self, bucket: bytes) -> Range:
        """The rows of a bucket's entries."""
        hashes = bucket[len(_WAKE) :]
        first, last = hashes[:HASH_BYTES], hashes[HASH_BYTES:]
        return _ENTRY + first, after_prefix(_ENTRY + last)

    # ------------------------------------------------------------------ tablets

    def queue_splits(self, tablets: int, *, values: bool) -> list[bytes]:
        """Where to split entries, and values if there are any, for `tablets` tablets each."""
        parts = self.splits(tablets)
        if not parts:
            return []
        splits = [_ENTRY + part for part in parts]
        if values:
            splits += [_VALUE, *(_VALUE + part for part in parts)]
        return [*splits, _WAKE]
