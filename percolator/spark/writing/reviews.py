"""Writes that depend on what is there: `if_unchanged_since`, `operation=merge` and `skip_equal`.

A transaction reads the rows that it is about to write, as of its start, and the functions here say
what is left to write. Cells that it looked at and does not write are locked: then a transaction
that writes one of them meanwhile conflicts, and what was looked at still holds at the commit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from percolator.errors import CellAddress, RowChanged
from percolator.formats.records import KIND_DELETE
from percolator.protocol.write_steps import Write
from percolator.routing.cells import FoundCell
from percolator.timestamps import Timestamp

Writes = dict[CellAddress, Write]
Versions = Mapping[CellAddress, FoundCell]
"""The newest versions of cells, deletions among them. Cells that were never written are missing."""


@dataclass(frozen=True)
class Condition:
    """What `if_unchanged_since` demands of the rows that a task writes."""

    table: str
    since: Timestamp
    began: Timestamp
    """When the job began: only what is younger can be its own."""
    key_codec: Any
    skip_equal: bool = False
    is_merge: bool = False

    def unwritten(
        self,
        writes: Writes,
        found: Versions,
        *,
        may_be_own: bool,
        expiring: Container[bytes] = frozenset(),
    ) -> Writes:
        """The writes that are left: all, but for rows that an earlier attempt has written.

        Raises `RowChanged` if a row was written after `since`. Such a row counts as written by an
        earlier attempt if there may have been one, and the row has exactly what it would write,
        written by one transaction that committed after the job began. Cells that such an attempt
        leaves out, since they are as they should be, are as they were.
        """
        changed: dict[bytes, dict[CellAddress, FoundCell]] = {}
        for address, cell in found.items():
            if cell.commit_timestamp > self.since:
                changed.setdefault(address.row, {})[address] = cell
        wanted: dict[bytes, Writes] = {row: {} for row in changed}
        for address, write in writes.items():
            if address.row in wanted:
                wanted[address.row][address] = write
        for row, cells in changed.items():
            if not (may_be_own and self._is_own(wanted[row], cells, found, expiring)):
                raise self._error(row, cells)
        return {address: write for address, write in writes.items() if address.row not in changed}

    def _is_own(
        self,
        wanted: Writes,
        cells: Mapping[CellAddress, FoundCell],
        found: Versions,
        expiring: Container[bytes],
    ) -> bool:
        committed = {cell.commit_timestamp for cell in cells.values()}
        if len(committed) > 1 or min(committed) <= self.began:
            return False
        others = {address: write for address, write in wanted.items() if address not in cells}
        if self.is_merge and all(kind == KIND_DELETE for kind, _ in wanted.values()):
            others = merged(others, found, update=True, insert=True)
        if self.skip_equal:
            others = differing(others, found, expiring)
        written = {address: _value(wanted[address]) for address in cells if address in wanted}
        return not others and written == {address: cell.value for address, cell in cells.items()}

    def refuse_vanished(self, cells: Iterable[CellAddress]) -> None:
        """Refuses cells that were there at `since`, and of which nothing is left now."""
        for address in cells:
            raise self._error(address.row, {address: FoundCell(0, None)})

    def _error(self, row: bytes, cells: Mapping[CellAddress, FoundCell]) -> RowChanged:
        address, cell = max(cells.items(), key=lambda one: one[1].commit_timestamp)
        key = self.key_codec.decode(row)
        when = f"at {cell.commit_timestamp}" if cell.commit_timestamp else "and cleaned up"
        return RowChanged(
            f"row {key!r} of table {self.table!r} was written {when}, after {int(self.since)}, "
            f"column {address.column.decode(errors='backslashreplace')!r}: its new value "
            "was computed from older ones. Nothing of its transaction was written; read the "
            "table again",
            table=self.table,
            row=row,
            column=address.column,
            since=int(self.since),
            commit_timestamp=cell.commit_timestamp,
        )


def merged(writes: Writes, found: Versions, *, update: bool, insert: bool) -> Writes:
    """What a merge writes: rows that exist are updated or deleted, others inserted.

    A row of which everything is to be deleted is never inserted.
    """
    existing = {address.row for address, cell in found.items() if cell.value is not None}
    kept = {address.row for address, (kind, _) in writes.items() if kind != KIND_DELETE}

    def is_wanted(address: CellAddress) -> bool:
        if address.row in existing:
            return update if address.row in kept else _stored(found, address) is not None
        return insert and address.row in kept

    return {address: write for address, write in writes.items() if is_wanted(address)}


def differing(writes: Writes, found: Versions, expiring: Container[bytes] = frozenset()) -> Writes:
    """The writes that would change what is there. A value of an expiring column is always written:
    the one that is there would expire as if nobody had written it again."""
    return {
        address: write
        for address, write in writes.items()
        if _stored(found, address) != _value(write)
        or (write[0] != KIND_DELETE and address.column in expiring)
    }


def _value(write: Write) -> bytes | None:
    kind, value = write
    return None if kind == KIND_DELETE else value


def _stored(found: Versions, address: CellAddress) -> bytes | None:
    cell = found.get(address)
    return None if cell is None else cell.value
