"""Checks what callers send. An error names the field, and nothing has been written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from percolator.aio.engine import Engine
from percolator.arguments import FAMILIES_MAX
from percolator.errors import CellAddress, InvalidArgument, TransactionTooLarge
from percolator.limits import Limits
from percolator.protocol.read_locks import locked_cell, read_lock_of
from percolator.protocol.write_set import WriteSet
from percolator.routing.cells import RangeRequest
from percolator.routing.table_info import TableInfo
from percolator.row_text import quoted
from percolator.v1 import gateway_pb2 as pb

_LENGTH_BYTES = 8
_KINDS = frozenset(pb.CellWrite.Kind.values()) - {pb.CellWrite.KIND_UNSPECIFIED}


class Writes:
    """The writes of one transaction, and the cells that it notifies."""

    def __init__(self, limits: Limits, start: int) -> None:
        self.start = start
        self.cells = WriteSet(limits)
        self.notified: set[CellAddress] = set()

    @property
    def primary(self) -> CellAddress | None:
        """The cell that decides the outcome; None if there is nothing to decide."""
        return min(self.cells.stored(self.start), default=None)

    def digest(self) -> bytes:
        """The same for the same writes, whatever their order."""
        digest = hashlib.blake2b(digest_size=16)
        for (table_id, row, column), (kind, value) in sorted(self.cells.cells.items()):
            _update(digest, (b"%d %d" % (table_id, kind), row, column, value))
        for table_id, row, column in sorted(self.notified):
            _update(digest, (b"%d notify" % table_id, row, column))
        return digest.digest()


def _update(digest: hashlib.blake2b, parts: Iterable[bytes]) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(_LENGTH_BYTES, "big"))
        digest.update(part)


class Requests:
    """Checks requests against the limits, and tables' names against the cluster's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._limits = engine.limits

    async def writes(self, request: pb.CommitRequest, deadline: float) -> Writes:
        """The write set of a commit."""
        found = Writes(self._limits, request.start_timestamp)
        places: dict[CellAddress, int] = {}
        start = request.start_timestamp
        for place, write in enumerate(request.writes):
            field = f"writes[{place}]"
            if len(write.value) > self._limits.value_bytes_max:
                raise _too_long(f"{field}.value", write.value, self._limits.value_bytes_max)
            cell = await self._cell(field, write, start, deadline)
            first = places.setdefault(cell, place)
            if first != place:
                raise InvalidArgument(field, f"names the same cell as writes[{first}]")
            await self._add(found, field, write, cell, deadline)
            if write.value and write.kind != pb.CellWrite.KIND_PUT:
                raise InvalidArgument(f"{field}.value", "is allowed in a put only")
        return found

    async def _add(
        self, found: Writes, field: str, write: pb.CellWrite, cell: CellAddress, deadline: float
    ) -> None:
        try:
            match write.kind:
                case pb.CellWrite.KIND_PUT:
                    found.cells.put(cell, write.value)
                case pb.CellWrite.KIND_DELETE:
                    found.cells.delete(cell)
                case pb.CellWrite.KIND_LOCK:
                    found.cells.lock(cell)
                case pb.CellWrite.KIND_READ_LOCK:
                    found.cells.read_lock(cell)
                case pb.CellWrite.KIND_NOTIFY:
                    await self._require_weak_observer(field, cell, deadline)
                    found.notified.add(cell)
                case _:
                    raise _no_kind(field, write.kind)
        except TransactionTooLarge as error:
            raise InvalidArgument(field, error.message) from None
        if len(found.notified) > self._limits.transaction_cells_max:
            raise InvalidArgument(
                field,
                f"a transaction has at most {self._limits.transaction_cells_max} notifications",
            )

    async def _require_weak_observer(self, field: str, cell: CellAddress, deadline: float) -> None:
        schemas = self._engine.env.schemas
        known = schemas.get(cell.table_id)
        if known is None or cell.column not in known.weak_observers:
            known = await schemas.refresh(cell.table_id, deadline)
        if cell.column not in known.weak_observers:
            raise InvalidArgument(field, f"column {quoted(cell.column)} has no weak observer")

    async def primary(self, request: pb.ResolveRequest, deadline: float) -> CellAddress:
        """The primary of the transaction whose outcome is asked about."""
        if request.HasField("primary") + bool(request.cells) + bool(request.writes) != 1:
            raise InvalidArgument(
                "primary", "give either the primary or all cells that were written"
            )
        if request.HasField("primary"):
            told = request.primary
            address = CellAddress(told.table_id, told.row, told.column)
            # It may be a hidden cell: that of a read lock.
            self._check_names("primary", address.row, locked_cell(address).column)
            return address
        start, cells_max = request.start_timestamp, self._limits.transaction_cells_max
        field = "cells" if request.cells else "writes"
        named: Sequence[pb.CellName | pb.CellWrite] = request.cells or request.writes
        if len(named) > cells_max:
            raise InvalidArgument(field, f"has {len(named)} entries, at most {cells_max}")
        found: list[CellAddress] = []
        for place, one in enumerate(named):
            cell = await self._cell(f"{field}[{place}]", one, start, deadline)
            kind = one.kind if isinstance(one, pb.CellWrite) else pb.CellWrite.KIND_PUT
            if kind not in _KINDS:
                # Taken for another kind, another cell would seem to decide, and have nothing on it.
                raise _no_kind(f"{field}[{place}]", kind)
            if kind == pb.CellWrite.KIND_READ_LOCK:
                found.append(read_lock_of(cell, start))
            elif kind != pb.CellWrite.KIND_NOTIFY:
                found.append(cell)
        if not found:
            raise InvalidArgument("writes", "has nothing but notifications, which decide nothing")
        return min(found)

    async def _cell(
        self, field: str, named: pb.CellWrite | pb.CellName, start: int, deadline: float
    ) -> CellAddress:
        self._check_names(field, named.row, named.column)
        table_id = await self.table_id(f"{field}.table", named.table, start, deadline)
        return CellAddress(table_id, named.row, named.column)

    async def table_id(self, field: str, name: str, start: int, deadline: float) -> int:
        """The id of a table. Raises `SchemaError` if there is no such table.

        Also if the table is younger than the transaction that began at `start`, which may have read
        another table of this name, through any gateway. It would commit into the wrong table.
        """
        info = await self.table(field, name, deadline)
        info.require_older_than(start)
        return info.table_id

    async def table(self, field: str, name: str, deadline: float) -> TableInfo:
        """The table of this name. Raises `SchemaError` if there is none."""
        if not name:
            raise InvalidArgument(field, "is missing")
        return await self._engine.catalog.table(name, deadline)

    def check_row_query(self, field: str, query: pb.RowQuery) -> None:
        self._check_row(f"{field}.row", query.row)
        self._check_columns(f"{field}.", query)

    async def range_request(
        self, request: pb.ScanTableRequest, deadline: float
    ) -> RangeRequest | None:
        """The range to scan; None if it is empty."""
        start, end = request.range.start, request.range.end
        self._check_bound("range.start", start)
        self._check_bound("range.end", end)
        self._check_columns("", request)
        start_timestamp = request.start_timestamp
        table_id = await self.table_id("table", request.table, start_timestamp, deadline)
        if end and start >= end:
            return None
        return RangeRequest(
            table_id,
            start,
            end,
            tuple(request.columns) if request.columns or request.column_prefixes else None,
            start_timestamp,
            request.reverse,
            request.row_limit,
            prefixes=tuple(request.column_prefixes),
        )

    def _check_columns(self, field: str, asked: pb.RowQuery | pb.ScanTableRequest) -> None:
        """`field` comes before the names of fields in errors."""
        columns, prefixes = asked.columns, asked.column_prefixes
        for place, column in enumerate(columns):
            self._check_column(f"{field}columns[{place}]", column)
        if len(set(columns)) != len(columns):
            raise InvalidArgument(f"{field}columns", "names a column twice")
        for place, prefix in enumerate(prefixes):
            self._check_column(f"{field}column_prefixes[{place}]", prefix)
        if len(prefixes) > FAMILIES_MAX:
            raise InvalidArgument(f"{field}column_prefixes", f"expected at most {FAMILIES_MAX}")

    def _check_names(self, field: str, row: bytes, column: bytes) -> None:
        self._check_row(f"{field}.row", row)
        self._check_column(f"{field}.column", column)

    def _check_row(self, field: str, row: bytes) -> None:
        self._engine.require_row(field, row)

    def _check_bound(self, field: str, bound: bytes) -> None:
        # The key behind a row, from which a scan that broke off is continued, is a byte longer.
        self._check_row(field, bound.removesuffix(b"\0"))

    def _check_column(self, field: str, column: bytes) -> None:
        if not column:
            raise InvalidArgument(field, "is empty")
        if len(column) > self._limits.column_bytes_max:
            raise _too_long(field, column, self._limits.column_bytes_max)
        if column[0] == 0:
            raise InvalidArgument(field, "begins with 00, which is reserved")


def _no_kind(field: str, kind: int) -> InvalidArgument:
    return InvalidArgument(f"{field}.kind", f"{kind} is not a kind of write")


def _too_long(field: str, value: bytes, bytes_max: int) -> InvalidArgument:
    return InvalidArgument(field, f"has {len(value)} bytes, at most {bytes_max}")
