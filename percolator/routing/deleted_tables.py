"""The cells of tables that are being deleted, which may still decide transactions.

For its users, a deleted table is gone at once. But locks in other tables may have their primaries
in it, and only the primary decides what becomes of them. So a master keeps the table until no such
lock is left, and tells clients that resolve such a lock where the table's tablets are.

This class has its own tablet map: what is known here must never lead another request to a deleted
table, where its writes would be lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from percolator.errors import SchemaError, TabletLocation
from percolator.limits import Limits
from percolator.routing.catalog import Catalog, TabletMap
from percolator.routing.cells import Answer, CellMutation
from percolator.routing.router import Router
from percolator.world import World


class DeletedTables:
    """`percolator.routing.cells.Mutations` for deleted tables. Belongs to one event loop.

    Answers `SchemaError` when the table is gone for good, which only the leading master can say:
    then no transaction that still has a lock anywhere has ever committed a cell of the table.
    """

    def __init__(self, world: World, catalog: Catalog, limits: Limits) -> None:
        self._catalog = catalog
        self._tablets = TabletMap(self._find)
        self._router = Router(world, self._tablets, limits)

    def mutate(self, mutations: Sequence[CellMutation], deadline: float) -> Awaitable[list[Answer]]:
        return self._router.mutate(mutations, deadline)

    async def close(self) -> None:
        await self._router.close()

    async def _find(self, table_id: int, row: bytes) -> Sequence[TabletLocation]:
        try:
            return await self._catalog.find_even_deleted(table_id, row)
        except SchemaError:
            self._tablets.forget(table_id)
            raise
