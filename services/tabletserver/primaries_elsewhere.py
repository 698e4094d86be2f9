"""Asks the primaries of transactions for the tablets of a server: have they committed, and when?

A primary may be in a tablet of any server, and in a table that is being deleted. All are asked over
the network, those of this server too: then there is one way, and a primary's tablet answers after
the check that it is still served here.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import CellAddress
from percolator.limits import Limits
from percolator.protocol.cleanup import commits_of
from percolator.routing.catalog import Catalog, TabletMap
from percolator.routing.deleted_tables import DeletedTables
from percolator.routing.lanes import SchemaVersions
from percolator.world import World

ANSWER_SECONDS_MAX = 5.0
"""Locks whose primaries do not answer by then are left to those who meet them."""


class PrimariesElsewhere:
    """A client of the tablet servers. Belongs to one event loop."""

    def __init__(self, world: World, masters: Sequence[str]) -> None:
        limits = Limits()
        catalog = Catalog(world, masters, TabletMap(), SchemaVersions())
        self._now = world.clock.monotonic_seconds
        self._cells = DeletedTables(world, catalog, limits)

    async def commits(self, transactions: Sequence[tuple[CellAddress, int]]) -> list[int]:
        """See `percolator.tablet.state.Commits`."""
        return await commits_of(self._cells, transactions, self._now() + ANSWER_SECONDS_MAX)

    async def close(self) -> None:
        await self._cells.close()
