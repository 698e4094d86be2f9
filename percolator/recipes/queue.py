"""What queues share: writers add entries without conflicts, and one observer takes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, Generic, TypeVar, overload

from percolator import aio
from percolator.arguments import require_whole
from percolator.blocking.database import Database
from percolator.codecs import Codec, KeyCodec
from percolator.decorators import observes
from percolator.either import on_database
from percolator.errors import InvalidArgument
from percolator.observers.definition import ATTEMPTS, DEADLINE_SECONDS, Observer
from percolator.recipes.buckets import BucketRows

K = TypeVar("K")
V = TypeVar("V")

BATCH_MAX = 50_000
"""Each entry of a batch is deleted, and may have a key to write: a transaction has room for twice
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
        async with internal.updating():  # the next entry's place depends on this write
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
