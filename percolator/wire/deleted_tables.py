"""The cells of tables that are being deleted: what is left of the evidence about transactions.

To everybody a deleted table is gone at once. But locks in other tables may have their primaries in
it, and only there it is decided what becomes of them. So a master keeps it until no such lock is
left, and tells where its tablets are to whoever asks in order to settle one.

With a map of its own: what is known here must never lead anybody else to a deleted table, where he
would write what is about to go.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from percolator.errors import SchemaError, TabletLocation
from percolator.limits import Limits
from percolator.wire.catalog import Catalog
from percolator.wire.questions import Answer, Step
from percolator.wire.router import Router
from percolator.wire.tablet_map import TabletMap
from percolator.world import World


class DeletedTables:
    """`percolator.wire.questions.Mutations`. Belongs to one event loop.

    Answers `SchemaError` when the table is gone for good, which only the leading master says: then
    no transaction with a lock that is still there has ever committed a cell of it.
    """

    def __init__(self, world: World, catalog: Catalog, limits: Limits) -> None:
        self._catalog = catalog
        self._tablets = TabletMap(self._find)
        self._router = Router(world, self._tablets, limits)

    def mutate(self, steps: Sequence[Step], deadline: float) -> Awaitable[list[Answer]]:
        return self._router.mutate(steps, deadline)

    async def close(self) -> None:
        await self._router.close()

    async def _find(self, table_id: int, row: bytes) -> Sequence[TabletLocation]:
        try:
            return await self._catalog.find_even_deleted(table_id, row)
        except SchemaError:
            self._tablets.forget(table_id)
            raise
