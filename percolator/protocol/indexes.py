"""Entries of secondary indexes, kept by the commits that write indexed columns.

Before its commit, a transaction reads what the indexed columns of its rows held at its start, and
adds to its write set the entry that goes and the entry that comes. So rows and index change at
once, whoever writes: every client knows the indexes from the schema.

Rules, each with the failure that it prevents:
- The former values are read at the start timestamp. Two transactions that write the same columns of
  a row conflict there, so what was read still holds at the commit; a later read could miss the
  entry that has to go.
- Two transactions that write different columns of one index conflict at the entry that goes. If
  there is none, each locks the other's column: both would commit, and the row would have an entry
  that nobody has added, or one for a value that the other has changed.
- If the index was added to a table that was there, they do so in any case. One of the two may have
  set its lock before that, and then has no entry at which to conflict: the other one's entry would
  have the value that it replaces, and stay.
- A lock is set under a version of the schema, and a tablet that knows a newer one refuses it
  (write_set.py). A lock that was set before could still be committed without its entries: who
  builds an index waits until all of them are gone, and reads after that.
- A row store refuses no lock. There, a commit looks at the catalogue's epoch, which comes with its
  timestamp and is raised with each change of indexes, and is run again if they are not as they were
  (announcing.py). If the timestamp is older than the change, all locks of the commit were there
  before it, and are waited for, too.
- Until the epoch is raised, one client may write a row with an entry, and another one, which has
  not heard of the index, may replace its value and leave the entry there. So a build deletes
  entries of values that rows do not have.
- Locks from before the index are waited out, and never pushed: a pushed transaction commits above
  the snapshot from which the index is built. Readers may push them meanwhile, above any timestamp,
  so the scan for them has none.
- What holds for readers stands in the table of entries, as a cell (`STATE`): they find it in their
  snapshot. From the schema of a client that has not heard of a change, it would be found too late.
- A unique entry has no row key in its name, so two transactions that give two rows one value
  conflict at the entry. One that begins later finds the entry, and is refused.
- While a unique index is being built, rows may have one value: one written before the index, and
  one since. A row that changes its value leaves the entry if it is the other's. Otherwise that row
  would have none, and nobody would add it again.

If values of a column expire, the entries expire, too: nobody would delete them. A row has its entry
for as long as it has all values, and the entry may be there for some time longer.
- The time to live of entries is the shortest one of the columns, and a commit that writes a column
  writes the entry again, even if it stays the same. An entry that is older than a value would be
  gone before it. So a build writes again what is older: rows that were loaded have older entries if
  they had the same values before.
- An entry is younger than a value that an earlier transaction wrote, so it outlives that value.
  Readers leave out rows that no longer have the values of an entry (aio/find.py).
- Whoever claims a unique entry of another row looks whether that row still has the values.
  Otherwise, a value that nobody has could not be given to anybody. A row gets the values back only
  with the entry: both conflict there.
- A column keeps its time to live as long as it is indexed. A longer one would show values again
  whose entries are gone, or have become those of other rows.
- An index is added when all tablets judge by the times to live of its columns. One that has not
  heard of a longer time would say that a value is gone, and a commit would leave its entry out
  (services/master/table_changes.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import NamedTuple

from percolator.codecs.indexes import ENTRY, IndexDefinition
from percolator.codecs.readable import quoted
from percolator.errors import CellAddress, SchemaError, UniqueViolation
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.conflicts import MetLock, locked
from percolator.protocol.environment import Environment
from percolator.protocol.write_set import (
    LOCK_KINDS,
    KeptIndexes,
    Write,
    WriteSet,
    other_indexes,
)
from percolator.routing.cells import FoundCell, RangeRequest
from percolator.timestamps import NEWEST

STATE_ROW = b"state"
STATE = b"state"
"""The column of the one cell that says whether readers may use the index; no entry has it."""
READY = b"ready"
BUILDING = b"building"
DROPPED = b"dropped"

ReadCells = Callable[[list[CellAddress]], Awaitable[Mapping[CellAddress, FoundCell]]]
"""Reads stored cells at the start of the transaction; cells without a value may be missing."""


async def with_entries(
    env: Environment,
    written: WriteSet,
    start: int,
    read: ReadCells,
    row_bytes_max: int,
    deadline: float,
) -> KeptIndexes:
    """A write set with the entries of all indexes of its tables. What was written stays as it is.

    Raises `UniqueViolation`; `SchemaError` for a value that cannot be indexed; `ConflictError` if
    an index was dropped; and `TransactionTooLarge`. Then the transaction can only be given up.
    """
    indexes: dict[int, tuple[IndexDefinition, ...]] = {}
    for cell in written.cells:
        if cell.table_id not in indexes:
            indexes[cell.table_id] = (await env.schema(cell.table_id, deadline)).indexes
    rows = _rows_written(written, indexes)
    if not rows:
        return KeptIndexes(indexes, written, frozenset())
    cells = WriteSet(env.limits)
    cells.adopt(written)
    changes = Changes(env, cells, row_bytes_max)
    asked = {
        CellAddress(table_id, row, column): None
        for (table_id, row), found in rows.items()
        for index in found
        for column in index.names
    }
    stored = await read([*asked])
    for (table_id, row), found in rows.items():
        for index in found:
            changes.change(index, table_id, row, stored)
    if changes.shared:
        try:
            owners = await read([*changes.shared])
        except SchemaError:
            await require_current_indexes(env, indexes, start, deadline)
            raise
        left = await expired(changes.others(owners), read, row_bytes_max)
        changes.settle({cell: found for cell, found in owners.items() if cell not in left})
    return KeptIndexes(indexes, cells, cells.cells.keys() - written.cells.keys())


async def require_current_indexes(
    env: Environment,
    indexes: Mapping[int, tuple[IndexDefinition, ...]],
    start: int,
    deadline: float,
) -> None:
    """Called when a table has turned out to be gone. Raises `ConflictError` if it has the entries
    of an index that was dropped: run again, the transaction knows that."""
    for table_id, known in indexes.items():
        if known and (await env.schemas.refresh(table_id, deadline)).indexes != known:
            raise other_indexes(start, env.table_names(table_id))


def _rows_written(
    cells: WriteSet, indexes: Mapping[int, tuple[IndexDefinition, ...]]
) -> dict[tuple[int, bytes], list[IndexDefinition]]:
    """The rows of which indexed columns are written, with the indexes of these columns."""
    rows: dict[tuple[int, bytes], list[IndexDefinition]] = {}
    for (table_id, row, column), (kind, _) in cells.cells.items():
        if kind in LOCK_KINDS:
            continue
        for index in indexes[table_id]:
            if column in index.names:
                found = rows.setdefault((table_id, row), [])
                if index not in found:
                    found.append(index)
    return rows


class Owner(NamedTuple):
    """The row of a unique entry."""

    definition: IndexDefinition
    table_id: int
    row: bytes


async def expired(
    owners: Mapping[CellAddress, Owner], read: ReadCells, row_bytes_max: int
) -> set[CellAddress]:
    """The entries of which the rows no longer have the values, as these have expired."""
    doubted = {cell: one for cell, one in owners.items() if one.definition.expiring}
    if not doubted:
        return set()
    asked = {
        CellAddress(table_id, row, column): None
        for index, table_id, row in doubted.values()
        for column in index.names
    }
    stored = await read([*asked])
    return {
        cell
        for cell, (index, table_id, row) in doubted.items()
        if entry_before(index, row, values_of(index, table_id, row, stored), row_bytes_max)
        != cell.row
    }


def values_of(
    index: IndexDefinition, table_id: int, row: bytes, stored: Mapping[CellAddress, FoundCell]
) -> dict[bytes, bytes | None]:
    """The values that a row has in the columns of an index."""
    found: dict[bytes, bytes | None] = {}
    for column in index.names:
        cell = stored.get(CellAddress(table_id, row, column))
        found[column] = None if cell is None else cell.value
    return found


class Changes:
    """Changes of entries that follow from the writes of one transaction."""

    def __init__(self, env: Environment, cells: WriteSet, row_bytes_max: int) -> None:
        """Adds them to the cells, which have the writes of the transaction."""
        self._env = env
        self.cells = cells
        self._row_bytes_max = row_bytes_max
        self.claimed: dict[CellAddress, Owner] = {}
        """Entries of unique indexes that come, with the rows that get these values."""
        self.given_up: dict[CellAddress, list[bytes]] = {}
        """Entries of unique indexes that go, with the rows that had these values."""

    @property
    def shared(self) -> set[CellAddress]:
        """The entries that may be those of other rows: `settle` needs them as they are stored."""
        return self.claimed.keys() | self.given_up.keys()

    def change(
        self,
        index: IndexDefinition,
        table_id: int,
        row: bytes,
        stored: Mapping[CellAddress, FoundCell],
    ) -> None:
        """Brings the entry of one row up to date."""
        before = values_of(index, table_id, row, stored)
        after = dict(before)
        for column in index.names:
            own = self.cells.own_value(CellAddress(table_id, row, column))
            if own is not None:
                after[column] = own.value
        old = entry_before(index, row, before, self._row_bytes_max)
        if old is None:
            self._lock(CellAddress(table_id, row, column) for column in index.names)
        new = _entry_after(self._env, index, table_id, row, after, self._row_bytes_max)
        if is_kept(index, old, new):
            return
        if new is not None and not index.ready_at:
            self._lock(CellAddress(table_id, row, column) for column in index.names)
        if old is not None and old != new:
            cell = CellAddress(index.table_id, old, ENTRY)
            if index.unique:
                self.given_up.setdefault(cell, []).append(row)
            else:
                self.cells.delete(cell)
        if new is not None:
            cell = CellAddress(index.table_id, new, ENTRY)
            if index.unique:
                other = self.claimed.get(cell)
                if other is not None:
                    raise violation(self._env, other, row)
                self.claimed[cell] = Owner(index, table_id, row)
            self.cells.put(cell, row)

    def _lock(self, cells: Iterable[CellAddress]) -> None:
        for cell in cells:
            # A read lock of the program keeps writers out, too. It stays as it is: the primary is
            # chosen from what the program writes.
            if cell not in self.cells.cells:
                self.cells.lock(cell)

    def others(self, found: Mapping[CellAddress, FoundCell]) -> dict[CellAddress, Owner]:
        """The entries that were claimed and that other rows have, as they are stored."""
        return {
            cell: claim._replace(row=known.value)
            for cell, claim in self.claimed.items()
            if (known := found.get(cell)) is not None and known.value not in (None, claim.row)
        }

    def settle(self, found: Mapping[CellAddress, FoundCell]) -> None:
        """Judges the entries of unique indexes by the rows that have them."""
        owners = {cell: known.value for cell, known in found.items()}
        self.require_unclaimed(owners)
        for cell, rows in self.given_up.items():
            if cell in self.claimed:
                continue
            if owners.get(cell) in (None, *rows):
                self.cells.delete(cell)
            else:  # but whoever gives the entry to one of these rows must not miss the change
                self.cells.lock(cell)

    def require_unclaimed(self, owners: Mapping[CellAddress, bytes | None]) -> None:
        """Raises `UniqueViolation` if another row has one of the entries that were added. It may
        give it up in the same transaction."""
        for cell, claim in self.claimed.items():
            owner = owners.get(cell)
            if owner is not None and owner not in (claim.row, *self.given_up.get(cell, ())):
                raise violation(self._env, claim, owner)


def violation(env: Environment, claim: Owner, other: bytes) -> UniqueViolation:
    """The error for a row that may not have the values of another one."""
    names = ", ".join(quoted(name) for name in claim.definition.names)
    table = env.described(CellAddress(claim.table_id, claim.row, claim.definition.names[0]))
    return UniqueViolation(
        f"{table}: row {env.row_named(claim.table_id, other)} has the same value in {names}, and "
        f"index {claim.definition.name!r} is unique",
        index=claim.definition.name,
        rows=(claim.row, other),
    )


def is_kept(index: IndexDefinition, old: bytes | None, new: bytes | None) -> bool:
    """True if the entry of a row stays as it is, and need not live longer."""
    return old == new and (new is None or not index.expiring)


def required_entry(
    index: IndexDefinition,
    row: bytes,
    values: Mapping[bytes, bytes | None],
    row_bytes_max: int,
) -> bytes | None:
    """The entry that a row must have. Raises `SchemaError` for values that cannot be indexed."""
    entry = index.entry(row, values)
    if entry is not None and len(entry) > row_bytes_max:
        raise SchemaError(f"the entry has {len(entry)} bytes, at most {row_bytes_max} allowed")
    return entry


def _entry_after(
    env: Environment,
    index: IndexDefinition,
    table_id: int,
    row: bytes,
    values: Mapping[bytes, bytes | None],
    row_bytes_max: int,
) -> bytes | None:
    """As `required_entry`, with the cell in the error."""
    try:
        return required_entry(index, row, values, row_bytes_max)
    except SchemaError as error:
        where = env.described(CellAddress(table_id, row, index.names[0]))
        raise SchemaError(f"{where}: index {index.name!r}: {error.message}") from None


def changed_entries(
    env: Environment,
    index: IndexDefinition,
    cell: CellAddress,
    before: bytes | None,
    after: bytes | None,
    row_bytes_max: int,
) -> dict[CellAddress, Write]:
    """The entries that go and come if the value of an index's only column changes. Raises
    `SchemaError` for a value that cannot be indexed."""
    table_id, row, column = cell
    old = entry_before(index, row, {column: before}, row_bytes_max)
    new = _entry_after(env, index, table_id, row, {column: after}, row_bytes_max)
    if is_kept(index, old, new):
        return {}
    writes: dict[CellAddress, Write] = {}
    if old is not None and old != new:
        writes[CellAddress(index.table_id, old, ENTRY)] = (KIND_DELETE, b"")
    if new is not None:
        writes[CellAddress(index.table_id, new, ENTRY)] = (KIND_PUT, row)
    return writes


def entry_before(
    index: IndexDefinition,
    row: bytes,
    values: Mapping[bytes, bytes | None],
    row_bytes_max: int,
) -> bytes | None:
    """The entry that a row has. Values that cannot be indexed were written before the index, and
    have none."""
    try:
        return required_entry(index, row, values, row_bytes_max)
    except SchemaError:
        return None


async def until_unlocked(
    env: Environment,
    cleanup: Cleanup,
    table_id: int,
    columns: Iterable[bytes],
    timeout_seconds: float,
) -> None:
    """Returns when all locks of these columns are gone that were there when it was called.

    Locks of live transactions are waited for, and those of dead ones resolved. Raises
    `ConflictError` if one stays for longer than the timeout.
    """
    now = await env.timestamp(env.now() + timeout_seconds)
    # Without a timestamp: a reader may push a lock above any, and it is still there.
    request = RangeRequest(table_id, b"", b"", tuple(columns), NEWEST, counts=True)
    async with aclosing(_locks_from_before(env, request, now, timeout_seconds)) as pages:
        async for met in pages:
            began = env.now()
            deadline = began + timeout_seconds
            backoff = env.backoff()
            while met:
                waited = env.now() - began if backoff.rounds else 0.0
                await cleanup.resolve(met, deadline=deadline, known_now=now, waited_seconds=waited)
                if not await backoff.pause(deadline):
                    raise locked(env, now, met[0])
                rows = [one.address.row for one in met]
                part = request._replace(start=min(rows), end=max(rows) + b"\0")
                again = _locks_from_before(env, part, now, timeout_seconds)
                met = [one async for some in again for one in some]


async def _locks_from_before(
    env: Environment, request: RangeRequest, now: int, timeout_seconds: float
) -> AsyncGenerator[list[MetLock], None]:
    """The locks of transactions that have begun until `now`, a page at a time."""
    async with aclosing(env.cells.scan(request, timeout_seconds)) as pages:
        async for page in pages:
            met = [MetLock.of(request.table_id, cell) for cell in page.locks]
            yield [one for one in met if one.lock.start_timestamp <= now]


def written_rows(cells: WriteSet, table_id: int, index: IndexDefinition) -> list[bytes]:
    """The rows of which a transaction has written columns of the index."""
    return [
        *dict.fromkeys(
            cell.row
            for cell, (kind, _) in cells.cells.items()
            if cell.table_id == table_id
            and kind in (KIND_PUT, KIND_DELETE)
            and cell.column in index.names
        )
    ]
