"""Calls by tokens that have rights to some tables only (docs/security.md).

A lock names its primary, which may be a row of any table, and its owner's session, whose end would
free all locks of its owner. So such a caller is not shown the session, nor a primary that it may
not read. Locks that it meets are resolved for it (locks_in_the_way.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

from percolator.errors import (
    CellAddress,
    InvalidArgument,
    InvariantViolation,
    PercolatorError,
    PermissionDenied,
    SchemaError,
)
from percolator.formats.records import LockRecord, timestamp_bytes
from percolator.services.chassis.rpc import caller_identity
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK, Cell
from percolator.v1.master_pb2 import Table

_HIDDEN = CellAddress(0, b"", b"")


class _Rights(NamedTuple):
    """The table by whose name a token has rights to the rows of a table."""

    table: str
    is_index: bool
    """Its rows are entries of an index of that table, which begin with a value: no prefix of the
    table's rows says which of them somebody may see."""


ResolveLocks = Callable[
    [int, Sequence[Cell], pb.ResolveLocksRequest, float], Awaitable[pb.ResolveLocksResponse]
]
"""Resolves locks of a table that were seen, for a request, until a deadline."""
Describe = Callable[[int], Awaitable[Table]]
"""The table of an id. Raises `SchemaError` if it is gone."""


async def refused(table_id: int) -> NoReturn:
    """For a server without masters."""
    raise PermissionDenied(
        "the server has no masters, which know the names of tables: it accepts no tokens that have "
        "rights to some tables only"
    )


class RowRights:
    """Judges rows for callers whose tokens have rights to some tables; lets all others pass.
    Belongs to one event loop."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe
        self._by_id: dict[int, _Rights] = {}
        """Tables by id: the meaning of an id never changes."""

    async def require_read(self, table_id: int, *ranges: tuple[bytes, bytes]) -> None:
        """Raises `PermissionDenied` unless the caller may read all rows of these ranges."""
        caller = caller_identity()
        if caller.rights is None:
            return
        found = await self._of(table_id)
        # Also without rows; and whoever has no right to the table does not learn its name.
        caller.require_known(found.table, f"{table_id}")
        if found.is_index:
            if not caller.rights.may_read(found.table, b"", b""):
                raise PermissionDenied(
                    f"the token {caller.name!r} may not read an index of table {found.table!r}: "
                    "that takes the right to read all of the table"
                )
            return
        for start, end in ranges:
            caller.require_read(found.table, start, end)

    async def require_read_rows(self, table_id: int, rows: Iterable[bytes]) -> None:
        """As `require_read`, for single rows."""
        await self.require_read(table_id, *((row, row + b"\0") for row in rows))

    async def require_write_rows(self, table_id: int, rows: Iterable[bytes]) -> None:
        """As `require_read_rows`, for rows to be written. A refused write shows what is in its way,
        so it takes the right to read as well."""
        caller = caller_identity()
        if caller.rights is None:
            return
        rows = [*rows]
        await self.require_read_rows(table_id, rows)
        found = await self._of(table_id)
        if found.is_index and not caller.rights.may_write_all(found.table):
            raise PermissionDenied(
                f"the token {caller.name!r} may not write an index of table {found.table!r}: that "
                "takes the right to write all of the table"
            )
        for row in () if found.is_index else rows:
            caller.require_write(found.table, row)

    async def may_write(self, table_id: int, row: bytes) -> bool:
        """True if the caller may read and write this row."""
        try:
            await self.require_write_rows(table_id, (row,))
        except (PermissionDenied, SchemaError):
            return False
        return True

    async def hide_in(
        self,
        answer: pb.ReadBatchResult
        | pb.ScanResponse
        | pb.ScanChangesResponse
        | pb.ChangesLookResult,
    ) -> None:
        """Leaves out of the locks in an answer what the caller may not know."""
        await self.hide(one.lock for one in answer.locks)

    async def hide(self, locks: Iterable[Cell], own: Container[int] = ()) -> None:
        """As `hide_in`, for single locks. Those with an `own` start timestamp stay as they are. It
        raises nothing: the locks may be in an answer that says what was committed."""
        if caller_identity().rights is None:
            return
        for cell in locks:
            try:
                lock = LockRecord.decode(cell.value)
            except InvariantViolation:
                cell.value = b""
                continue
            if lock.start_timestamp in own:
                continue
            try:
                await self.require_read_rows(lock.primary.table_id, (lock.primary.row,))
                shown = lock.primary
            except PercolatorError:  # or nobody knows now which table it is
                shown = _HIDDEN
            cell.value = replace(lock, session=b"", primary=shown).encode()

    async def _of(self, table_id: int) -> _Rights:
        known = self._by_id.get(table_id)
        if known is None:
            known = self._by_id[table_id] = await self._asked(table_id)
        return known

    async def _asked(self, table_id: int) -> _Rights:
        table = await self._describe(table_id)
        if not table.index_of:
            return _Rights(table.name, is_index=False)
        return _Rights((await self._describe(table.index_of)).name, is_index=True)


def queries(request: pb.ResolveLocksRequest, schema_version: int) -> pb.MutationBatch:
    """Asks for the locks that a request names, of any kind. Raises `InvalidArgument`."""
    number = len(request.rows)
    if len(request.columns) != number or len(request.start_timestamps) != number:
        raise InvalidArgument("rows", "expected as many as columns and start_timestamps")
    target = request.target
    batch = pb.MutationBatch(
        target=pb.TabletTarget(
            tablet_id=target.tablet_id, epoch=target.epoch, schema_version=schema_version
        )
    )
    for row, column, start in zip(
        request.rows, request.columns, request.start_timestamps, strict=True
    ):
        mutation = batch.mutations.add(row=row, column=column)
        mutation.conditions.add(
            space=SPACE_LOCK,
            expectation=pb.Condition.EXPECTATION_ABSENT,
            prefix=timestamp_bytes(start),
        )
    return batch


def locks_in(result: pb.MutationBatchResult | pb.TransactionBatchResult) -> list[Cell]:
    """The locks that steps or transactions have met."""
    if isinstance(result, pb.MutationBatchResult):
        cells = [one.result.cell for one in result.unapplied]
    else:
        cells = [one.result.cell for one in result.uncommitted]
    return [cell for cell in cells if cell.space == SPACE_LOCK]
