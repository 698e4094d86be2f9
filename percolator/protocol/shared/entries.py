"""Entries of indexes that the driver of a shared transaction adds before it commits.

An entry of an index of several columns follows from all values of a row, and one of a unique index
from what other rows have: a task knows only some of that. In a row store, a task does not even know
all indexes. So once the driver has chosen what it commits, it finds the locks of these participants
by a scan, adds the entries in an attempt of its own, and commits that together with the others.

Rules, each with the failure that it prevents:
- The scan has no timestamp. A reader of a row with very many locks pushes all of them, also those
  that are no primaries, and a scan at a timestamp would not meet what was pushed above it.
- In each row, all columns of the index are locked before what they held is read. Otherwise another
  transaction could change the others meanwhile, and the entry would have the value that goes.
- A unique entry is locked before its owner is asked for. Otherwise another transaction could give
  it to a row in between.
- An owner is judged at the end: any task may have given other values to that row.
- Entries that are given up are deleted at the end: a row later in the scan may claim one, and a
  lock is not replaced by another one.
- Such an entry may not have been changed since its owner was read. While the index is being built,
  it may come to belong to another row with the same values, which would be left without one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from percolator.codecs.indexes import IndexDefinition
from percolator.errors import CellAddress, SchemaError
from percolator.formats.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    KIND_PUT_IN_DATA,
    LockRecord,
)
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import Environment
from percolator.protocol.indexes import Changes, Owner, expired, violation
from percolator.protocol.shared.attempt import Attempt
from percolator.protocol.write_set import Write, WriteSet
from percolator.routing.cells import FoundCell, RangeRequest
from percolator.timestamps import NEWEST

_LOCKED: Write = (KIND_LOCK_ONLY, b"")
_NOTHING = FoundCell(0, None)
_AT_ONCE = 1_000
"""Entries that are settled together."""

T = TypeVar("T")
Locks = Mapping[bytes, LockRecord]
"""Locks of chosen participants in one row, by column."""


class Entries:
    """The entries that the driver adds for the indexes of all tables."""

    def __init__(
        self,
        env: Environment,
        attempt: Attempt,
        chosen: Set[int],
        row_bytes_max: int,
        timeout_seconds: float,
    ) -> None:
        """`chosen`: participants, by their start timestamps. The timeout applies to each page."""
        self._env = env
        self._attempt = attempt
        self._chosen = chosen
        self._row_bytes_max = row_bytes_max
        self._timeout_seconds = timeout_seconds
        self._claimed: dict[CellAddress, Owner] = {}
        """Entries of unique indexes that come, with the rows that get these values."""
        self._contested: dict[CellAddress, Owner] = {}
        """Entries among them that other rows have, with these rows."""
        self._given_up: defaultdict[CellAddress, set[bytes]] = defaultdict(set)
        """Entries of unique indexes that go, with the rows that had these values."""

    async def add(self, indexes: Mapping[int, Sequence[IndexDefinition]]) -> None:
        """Locks the entries that go and come, by table. Raises `UniqueViolation`, `SchemaError` for
        a value that cannot be indexed, and `ConflictError`: then nothing can be committed."""
        for table_id, some in sorted(indexes.items()):
            columns = tuple(dict.fromkeys(name for index in some for name in index.names))
            request = RangeRequest(table_id, b"", b"", columns, NEWEST, counts=True)
            async with aclosing(self._env.cells.scan(request, self._timeout_seconds)) as pages:
                async for page in pages:
                    written: defaultdict[bytes, dict[bytes, LockRecord]] = defaultdict(dict)
                    for cell in page.locks:
                        met = MetLock.of(table_id, cell)
                        if met.lock.start_timestamp in self._chosen:
                            written[met.address.row][met.address.column] = met.lock
                    if written:
                        await self._add_of_rows(table_id, some, written)
        for entries in _portions([*self._contested]):
            await self._require_unclaimed(entries)
        for entries in _portions([one for one in self._given_up if one not in self._claimed]):
            await self._delete(entries)

    async def _add_of_rows(
        self, table_id: int, indexes: Sequence[IndexDefinition], written: Mapping[bytes, Locks]
    ) -> None:
        affected = [
            (row, index)
            for row, locks in written.items()
            for index in indexes
            if not locks.keys().isdisjoint(index.names)
        ]
        cells = {
            CellAddress(table_id, row, column): column in written[row]
            for row, index in affected
            for column in index.names
        }
        # Those that the transaction keeps as they are have its locks, and are left to these.
        others = {cell: _LOCKED for cell, is_written in cells.items() if not is_written}
        await self._attempt.lock(others, self._deadline())
        passing = {
            (table_id, row): [lock.start_timestamp for lock in locks.values()]
            for row, locks in written.items()
        }
        stored = await self._attempt.former(cells, self._deadline(), passing)
        changes = Changes(self._env, self._writes(table_id, written), self._row_bytes_max)
        for row, index in affected:
            self._require_known(index, table_id, row, written[row], changes, stored)
            changes.change(index, table_id, row, stored)
        for cell, claim in changes.claimed.items():
            other = self._claimed.setdefault(cell, claim)
            if other.row != claim.row:
                raise violation(self._env, claim, other.row)
        for cell, rows in changes.given_up.items():
            self._given_up[cell].update(rows)
        await self._take(changes, {index.table_id for index in indexes})

    async def _take(self, changes: Changes, tables: Set[int]) -> None:
        """Locks the entries in these tables, then asks to which rows the claimed ones belong."""
        entries = {
            cell: write for cell, write in changes.cells.cells.items() if cell.table_id in tables
        }
        await self._attempt.lock(entries, self._deadline())
        if changes.claimed:
            found = await self._attempt.former(changes.claimed, self._deadline())
            self._contested |= changes.others(found)

    def _writes(self, table_id: int, written: Mapping[bytes, Locks]) -> WriteSet:
        """The writes that the locks stand for. Values that are stored apart count as deleted, which
        leaves a row without an entry."""
        writes = WriteSet(self._env.limits)
        for row, locks in written.items():
            for column, lock in locks.items():
                cell = CellAddress(table_id, row, column)
                if lock.kind == KIND_PUT:
                    writes.put(cell, lock.value)
                elif lock.kind in (KIND_DELETE, KIND_PUT_IN_DATA):
                    writes.delete(cell)
        return writes

    def _require_known(
        self,
        index: IndexDefinition,
        table_id: int,
        row: bytes,
        locks: Locks,
        changes: Changes,
        stored: Mapping[CellAddress, FoundCell],
    ) -> None:
        """Raises `SchemaError` if the row needs an entry with a value that is stored apart."""
        apart: CellAddress | None = None
        for column in index.names:
            cell = CellAddress(table_id, row, column)
            if column in locks and locks[column].kind == KIND_PUT_IN_DATA:
                apart = cell
            elif (changes.cells.own_value(cell) or stored.get(cell, _NOTHING)).value is None:
                return  # it has no entry, whatever the value is
        if apart is not None:
            raise SchemaError(
                f"{self._env.described(apart)}: the value is too long for an index, or was "
                "written before there was one"
            )

    async def _require_unclaimed(self, entries: Sequence[CellAddress]) -> None:
        """Raises `UniqueViolation` if rows that keep their values have these entries."""
        owners = {
            cell: owner
            for cell in entries
            if (owner := self._contested[cell]).row not in self._given_up.get(cell, ())
        }
        read = partial(self._attempt.former, deadline=self._deadline())
        left = owners.keys() - await expired(owners, read, self._row_bytes_max)
        for cell in sorted(left):
            raise violation(self._env, self._claimed[cell], owners[cell].row)

    async def _delete(self, entries: Sequence[CellAddress]) -> None:
        """Deletes entries. One that is not that of its row is locked: whoever gives it to that row
        must not miss the change."""
        since = await self._attempt.newest_start(self._deadline())
        found = await self._attempt.former(entries, self._deadline())
        writes: dict[CellAddress, Write] = {}
        for cell in entries:
            owner = found[cell].value if cell in found else None
            is_own = owner is None or owner in self._given_up[cell]
            writes[cell] = (KIND_DELETE, b"") if is_own else _LOCKED
        await self._attempt.lock(writes, self._deadline(), unchanged_since=since)

    def _deadline(self) -> float:
        return self._env.now() + self._timeout_seconds


def _portions(listed: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(listed), _AT_ONCE):
        yield listed[at : at + _AT_ONCE]
