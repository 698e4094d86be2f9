"""Collection in a row store: nothing there does it by itself, so the master walks over the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from percolator.history.rows import Decided, RowHistory, TableProgress
from percolator.services.master.history.collecting import TableCollected
from percolator.services.master.history.safe_points import ClusterSafePoints


class Drops(Protocol):
    """What becomes of tables that were dropped."""

    async def begin(self) -> None:
        """Called when a round begins."""
        ...

    async def finish(self, resolved_below: int) -> None:
        """Called after a round: all locks below this were resolved, in all tables."""
        ...


class RowCollecting:
    """Walks over the rows, for as long as this master leads."""

    def __init__(
        self, history: RowHistory, table_ids: Callable[[], Iterable[int]], drops: Drops
    ) -> None:
        """`table_ids` returns all tables: old locks are resolved even in those whose history a pin
        keeps, or that are being dropped."""
        self._history = history
        self._table_ids = table_ids
        self._drops = drops

    @property
    def locks_resolved(self) -> int:
        return self._history.locks_resolved

    async def collect(self, ordered: ClusterSafePoints) -> None:
        await self._drops.begin()
        reads = {one: ordered.reads.get(one, 0) for one in self._table_ids()}
        await self._history.collect(Decided(reads, ordered.transactions))
        await self._drops.finish(ordered.transactions)

    def collected(self, table_id: int) -> TableCollected:
        found = self._history.tables.get(table_id, TableProgress())
        return TableCollected(below=found.below, cells=found.collected.cells)

    async def close(self) -> None:
        """Nothing is held."""
