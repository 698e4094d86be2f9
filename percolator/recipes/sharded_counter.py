"""Counters that are spread over several rows, so that additions to one rarely conflict.

    visits = ShardedCounter("visits", shards=16)
    visits.create(db)
    visits.add(tx, "page-7", 1)
    visits.value(snapshot, "page-7")

It needs no worker. `CombineQueue` never conflicts and combines anything, but needs one.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar, overload

from percolator import aio, codecs
from percolator.arguments import require_whole
from percolator.blocking.api import Database, Transaction
from percolator.codecs import KeyCodec
from percolator.decorators import AsyncReads, BlockingReads, on_database, on_reads, on_transaction
from percolator.errors import InvalidArgument
from percolator.recipes.queue import HashedParts
from percolator.schema import Table

K = TypeVar("K")

SHARDS_MAX = 65_536
_SHARD_BYTES = 2


class ShardedCounter(Generic[K]):
    """Counters by key, each spread over several rows.

    Guarantees:

    - What a transaction adds counts exactly once if it commits, and never if it does not.
    - `value` is exact at every snapshot.
    - Two transactions that add to one counter at the same time conflict with a probability of one
      in `shards`. The one that loses has to run again, as `@transactional` does.

    `value` sums up whatever rows there are, so `shards` can be raised and lowered in operation, and
    programs with different numbers work together.
    """

    @overload
    def __init__(self: ShardedCounter[str], name: str, *, shards: int = 16) -> None: ...
    @overload
    def __init__(self, name: str, *, key: KeyCodec[K], shards: int = 16) -> None: ...
    def __init__(self, name: str, *, key: Any = codecs.text, shards: int = 16) -> None:
        """`name` is the name of the counters' table, which nothing else may write."""
        require_whole(shards, "shards", 1)
        if shards > SHARDS_MAX:
            raise InvalidArgument("shards", f"at most {SHARDS_MAX}, got {shards}")
        self._parts: HashedParts[K] = HashedParts(name, key)
        self._shards = shards
        self.table = Table(name, key=codecs.raw)
        """Its table, whose rows are its own business."""
        self._count = self.table.column("count", codecs.integer)

    @overload
    def create(
        self, database: aio.Database, *, tablets: int = 1, exist_ok: bool = False
    ) -> Coroutine[Any, Any, None]: ...
    @overload
    def create(self, database: Database, *, tablets: int = 1, exist_ok: bool = False) -> None: ...
    def create(self, database: Any, *, tablets: int = 1, exist_ok: bool = False) -> Any:
        """Creates the table, split into `tablets` tablets."""
        splits = self._parts.splits(tablets)

        async def body(database: aio.Database) -> None:
            await database.create_table(self.table, splits, exist_ok=exist_ok)

        return on_database(database, body)

    @overload
    def add(self, tx: aio.Transaction, key: K, amount: int) -> Coroutine[Any, Any, None]: ...
    @overload
    def add(self, tx: Transaction, key: K, amount: int) -> None: ...
    def add(self, tx: Any, key: K, amount: int) -> Any:
        """Adds to a counter, or subtracts from it."""
        return on_transaction(tx, self._add, key, amount)

    async def _add(self, tx: aio.Transaction, key: K, amount: int) -> None:
        if isinstance(amount, bool) or not isinstance(amount, int):
            raise InvalidArgument("amount", f"expected an int, got {type(amount).__name__}")
        part = self._parts.part(key)
        start = await tx.timestamp()
        # A transaction always uses the same shard, and another one when it is run again.
        shard = zlib.crc32(start.to_bytes(8, "big")) % self._shards
        row = part + shard.to_bytes(_SHARD_BYTES, "big")
        await tx.increment(row, self._count, amount)

    @overload
    def value(self, reads: AsyncReads, key: K) -> Coroutine[Any, Any, int]: ...
    @overload
    def value(self, reads: BlockingReads, key: K) -> int: ...
    def value(self, reads: Any, key: K) -> Any:
        """The counter; 0 if nothing was added. A transaction also sees what it added itself."""
        return on_reads(reads, self._value, key)

    async def _value(self, reads: AsyncReads, key: K) -> int:
        part = self._parts.part(key)
        rows = reads.scan(self.table, prefix=part, columns=[self._count])
        return sum([row[self._count] async for row in rows])

    @overload
    def items(self, reads: AsyncReads) -> Coroutine[Any, Any, dict[K, int]]: ...
    @overload
    def items(self, reads: BlockingReads) -> dict[K, int]: ...
    def items(self, reads: Any) -> Any:
        """All counters to which anything was ever added, in memory."""
        return on_reads(reads, self._items)

    async def _items(self, reads: AsyncReads) -> dict[K, int]:
        counts: Counter[bytes] = Counter()
        async for row in reads.scan(self.table, columns=[self._count]):
            counts[row.key[:-_SHARD_BYTES]] += row[self._count]
        return {self._parts.key(part): count for part, count in counts.items()}
