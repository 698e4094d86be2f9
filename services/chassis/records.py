"""Records of a cluster about itself: roles, sessions, and the identity of a row store.

A record has columns, which are small values by name. It is read as of one time, and changed only if
one of its columns is still as it was seen: of several processes that change a record, one does. All
else, who leads and what counts, is logic on top of that (`record_coordinator.py`).

`RowRecords` keeps each record in a row of a row store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

from percolator.codecs.values import after_prefix
from percolator.errors import PercolatorError, Retry, SchemaError, StoreFault, StoreUnusable
from percolator.rowstore.identity import TABLE_ID
from percolator.rowstore.layout import DATA
from percolator.rowstore.port import (
    TIME_UNIT,
    Change,
    Check,
    DeleteCell,
    RowStore,
    Selection,
    SetCell,
    StoredRow,
)
from percolator.wire.backoff import Backoff
from percolator.world import World

FAMILY = DATA
"""All tables of a store have the same families."""
_TIME = TIME_UNIT
_NEVER = b"\0never"
"""A column that nobody writes. A check that does not find it always passes."""
_CALL_SECONDS = 1.0
_PATIENCE_SECONDS = 1.5
"""How long a store that does not answer is asked again. Shorter than callers of an oracle wait."""
_PAUSE_SECONDS_MIN = 0.02
_PAUSE_SECONDS_MAX = 0.25

Cells = dict[bytes, bytes]
"""Values by column."""


class Seen(NamedTuple):
    """A cell as it was seen."""

    column: bytes
    value: bytes | None
    """None: there was none."""


class NoRecords(StoreUnusable):
    """There is no table of records: nothing made one yet, or somebody deleted it."""


class Records(Protocol):
    """The records, as one process reaches them. Belongs to one event loop.

    Raises `StoreUnusable` if the store does not do what it is asked.
    """

    async def read(self, key: bytes, columns: Sequence[bytes]) -> Cells:
        """Columns of the record, all as of one time after this was called."""

    async def all(self, prefix: bytes, column: bytes) -> Mapping[bytes, bytes]:
        """One column of all records whose keys begin with a prefix, by the rest of the key. Those
        that were made or removed a moment ago may be missing, or still there."""

    async def change(self, key: bytes, seen: Seen, changes: Mapping[bytes, bytes | None]) -> bool:
        """Sets or, for None, deletes columns of a record if one of its columns is still as it was
        seen. Returns whether it was.

        Raises `StoreUnusable` if nothing was executed. After any other error it may have been, or
        may still be: the call may be on its way.
        """

    async def put(self, key: bytes, changes: Mapping[bytes, bytes | None]) -> None:
        """Changes the record without a check. May be repeated."""

    async def remove(self, key: bytes, column: bytes) -> None:
        """Removes a record that has this one column. One that is put meanwhile may stay."""


class RowRecords:
    """Records in one table of a row store: a row of small cells for each.

    Each cell has one version, at one fixed time: no clock takes part, and a later value replaces
    the earlier one. A row is read and changed at one time.
    """

    def __init__(self, store: RowStore, world: World) -> None:
        self._store = store
        self._world = world

    async def read(self, key: bytes, columns: Sequence[bytes]) -> Cells:
        selections = [_one(column) for column in columns]
        patience = self._patience()
        while True:
            try:
                rows = await self._store.read(TABLE_ID, [key], selections, _CALL_SECONDS)
            except PercolatorError as error:
                await patience.outlast(error, is_read=True)
            else:
                return _cells(rows[0]) if rows else {}

    async def all(self, prefix: bytes, column: bytes) -> Mapping[bytes, bytes]:
        patience = self._patience()
        while True:
            try:
                return await self._scanned(prefix, column)
            except PercolatorError as error:
                await patience.outlast(error, is_read=True)

    async def _scanned(self, prefix: bytes, column: bytes) -> Mapping[bytes, bytes]:
        scan = self._store.scan(
            TABLE_ID,
            prefix,
            after_prefix(prefix),
            [_one(column)],
            rows_max=0,
            reverse=False,
            timeout_seconds=_CALL_SECONDS,
        )
        async with aclosing(scan) as found:
            return {row.key[len(prefix) :]: _cells(row)[column] async for row in found}

    async def change(self, key: bytes, seen: Seen, changes: Mapping[bytes, bytes | None]) -> bool:
        made = [_changed(column, value) for column, value in changes.items()]
        patience = self._patience()
        while True:
            try:
                return await self._store.check_and_mutate(
                    TABLE_ID, key, _check(seen), made, _CALL_SECONDS
                )
            except PercolatorError as error:
                await patience.outlast(error, is_read=False)

    async def put(self, key: bytes, changes: Mapping[bytes, bytes | None]) -> None:
        await self.change(key, Seen(_NEVER, None), changes)

    async def remove(self, key: bytes, column: bytes) -> None:
        await self.put(key, {column: None})

    def _patience(self) -> _Patience:
        return _Patience(self._world)


class _Patience:
    """One caller's attempts."""

    def __init__(self, world: World) -> None:
        self._backoff = Backoff(world.clock, world.random, _PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX)
        self._deadline = world.clock.monotonic_seconds() + _PATIENCE_SECONDS

    async def outlast(self, error: PercolatorError, *, is_read: bool) -> None:
        """Returns if the call may be sent again, after a pause."""
        if error.retry is Retry.UNKNOWN and not is_read:
            raise error
        if error.retry is Retry.USELESS or not await self._backoff.pause(self._deadline):
            raise unusable(error, "the row store") from error


def unusable(error: PercolatorError, store: str) -> StoreUnusable:
    """The error of a store that does not do what it is asked."""
    # What is refused now will be refused again.
    fault = StoreFault.READ_ONLY if error.retry is Retry.USELESS else StoreFault.INPUT_OUTPUT
    kind = NoRecords if isinstance(error, SchemaError) else StoreUnusable
    return kind(f"{store}: {error.message}", fault=fault, where=error.where)


def _one(column: bytes) -> Selection:
    return Selection(FAMILY, column, column + b"\0")


def _check(seen: Seen) -> Check:
    if seen.value is None:
        return Check((_one(seen.column),), found=False)
    as_seen = _one(seen.column)._replace(first_value=seen.value, end_value=seen.value + b"\0")
    return Check((as_seen,), found=True)


def _changed(column: bytes, value: bytes | None) -> Change:
    if value is None:
        return DeleteCell(FAMILY, column, _TIME)
    return SetCell(FAMILY, column, _TIME, value)


def _cells(row: StoredRow) -> Cells:
    return {cell.column: cell.value for cell in row.cells}
