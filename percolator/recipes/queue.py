"""The base of queues: writers add entries without conflicts, and one observer takes them.

    e HASH KEY START PLACE      an entry; START and PLACE make it unique, and may give it its number
    v HASH KEY                  the value that the key's entries make (CombineQueue)
    w FIRST LAST                wakes the observer for entries with a hash from FIRST to LAST

A bucket is a range of hashes, and its row names that range. So entries do not depend on the number
of buckets: programs with different numbers of them work on one queue at the same time. Their
observers may then meet at the same entries. They delete them, so only one of them commits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, Generic, TypeVar, overload

from percolator import aio
from percolator.arguments import require_whole
from percolator.blocking.api import Database
from percolator.codecs import Codec, KeyCodec, raw
from percolator.codecs.values import HASH_BYTES, HASHES, after_prefix, is_key_codec, row_hash
from percolator.decorators import observes, on_database
from percolator.errors import InvalidArgument, SchemaError
from percolator.observers.definition import ATTEMPTS, DEADLINE_SECONDS, Observer
from percolator.schema import Table

K = TypeVar("K")
V = TypeVar("V")

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


BATCH_MAX = 50_000
"""Each entry of a batch is deleted, and may have a key to write: a transaction can have twice
this."""
BATCH_BYTES = 16 * 1024 * 1024


class Queue(ABC, Generic[K, V]):
    """A table of entries, and of buckets, which wake the observer."""

    def __init__(
        self, name: str, key: KeyCodec[K], value: Codec[V], buckets: int, *, has_values: bool
    ) -> None:
        """`has_values`: the table also has a row for each key."""
        self._rows = BucketRows(name, key, buckets)
        self._has_values = has_values
        self.table = self._rows.table
        """Its table, whose rows are its own business."""
        self._entry = self.table.column("entry", value)
        self._wake = self.table.column("wake", value)

    @overload
    def create(
        self,
        database: aio.Database,
        *,
        tablets: int = 1,
        retention: timedelta | None = None,
        exist_ok: bool = False,
    ) -> Coroutine[Any, Any, None]: ...
    @overload
    def create(
        self,
        database: Database,
        *,
        tablets: int = 1,
        retention: timedelta | None = None,
        exist_ok: bool = False,
    ) -> None: ...
    def create(
        self,
        database: Any,
        *,
        tablets: int = 1,
        retention: timedelta | None = None,
        exist_ok: bool = False,
    ) -> Any:
        """Creates the table, and registers the queue's observer.

        Entries, and values if the queue keeps any, are split into `tablets` tablets each. Entries
        that were taken are kept as history for the time of `retention`, and each run passes over
        those of its bucket: a busy queue should keep minutes of it.
        """
        splits = self._rows.queue_splits(tablets, values=self._has_values)

        async def body(database: aio.Database) -> None:
            await database.create_table(self.table, splits, exist_ok=exist_ok, retention=retention)
            await database.register_observers([self._definition()])

        return on_database(database, body)

    @abstractmethod
    def _definition(self) -> Observer:
        """An observer as it is registered: what it does is decided by the worker's."""

    async def _enter(self, tx: aio.Transaction, key: K, value: V) -> None:
        """Adds an entry. It is a new row, so it conflicts with nothing."""
        part = self._rows.part(key)
        start = await tx.timestamp()
        # First: if this is refused, there must be no entry, which nothing would wake anybody for.
        await tx.notify(self._rows.bucket(part), self._wake)
        internal = tx.internal
        async with internal.buffer.updating():  # the next entry's place depends on this write
            row = self._rows.entry(part, start, len(internal.writes.cells))
            await internal.write_together([(row, self._entry, value)], [])

    def _observer_of(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        deadline: float = DEADLINE_SECONDS,
        attempts: int = ATTEMPTS,
        pause: float = 0.0,
    ) -> Observer:
        """Makes the queue's observer of a function of a transaction and a bucket."""
        decorate = observes(
            self._wake, weak=True, name=name, deadline=deadline, attempts=attempts, pause=pause
        )
        return decorate(function)


def require_batch(batch: int) -> None:
    """Refuses an invalid number of entries for one run."""
    require_whole(batch, "batch", 1)
    if batch > BATCH_MAX:
        raise InvalidArgument("batch", f"at most {BATCH_MAX}, got {batch}")
