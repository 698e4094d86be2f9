"""The weak notifications of a transaction: they carry no data, take no lock, and decide nothing."""

from __future__ import annotations

from typing import Any, TypeVar

from percolator.aio.row_writes import RowWrites
from percolator.errors import CellAddress, InvalidArgument, UsageError
from percolator.protocol.weak_notifying import notify_weak_observers
from percolator.schema import Column

K = TypeVar("K")


class WeakNotifications(RowWrites):
    """Collects the cells whose weak observers are notified once the transaction has committed."""

    _weak: set[CellAddress] | None = None

    async def notify(self, row: K, column: Column[Any, K]) -> None:
        """Notifies the column's weak observers of the row, once this transaction has committed."""
        deadline = self._deadline(None)
        address = await self._written_address(row, column, deadline)
        schemas = self._engine.env.schemas
        schema = schemas.get(address.table_id)
        if schema is None or column.name not in schema.weak_observers:
            # Its first one may have been registered since.
            schema = await schemas.refresh(address.table_id, deadline)
        self._require_open()  # a commit that began meanwhile would leave it out
        if column.name not in schema.weak_observers:
            raise UsageError(f"{column!r} has no weak observer")
        self._notify_cell(address)

    def _notify_cell(self, address: CellAddress) -> None:
        if self._weak is None:
            self._weak = set()
        if len(self._weak) >= self._engine.limits.transaction_cells_max:
            raise InvalidArgument(
                "notify", f"more than {self._engine.limits.transaction_cells_max}"
            )
        self._weak.add(address)

    async def _only_notify(self, deadline: float) -> int:
        """Writes only notifications, at a fresh timestamp: no locks, and nothing to decide."""
        env = self._engine.env
        left = max(deadline - self._engine.now(), 0.001)
        now = await env.timestamps.get(timeout_seconds=left)
        self.statistics.round_trips += 1
        cells = sorted(self._weak or ())
        await notify_weak_observers(env, cells, now, deadline, self.statistics)
        return now
