"""Announcing the cells of a shared transaction, where the store asks for it (announcing.py, one
folder above, says why).

Rules, each with the failure that it prevents:
- An attempt announces a cell once it has locked it, under the part that holds the lock, and before
  it finishes. A part is named only after that; so whatever is committed has its intents. An intent
  from before the lock would, for a cell that has to wait for others, soon look like that of a dead
  transaction: workers would put a marker into the cell, and the attempt would fail.
- The driver knows from the receipts to which observers each table's cells were announced. An
  observer that was registered since, which the epoch of the commit timestamp tells, gets its
  intents from the driver before it commits. What the parts have locked is found by a scan of the
  table: none of their locks can go before the commit, or the parts cannot be committed.
- If a table is gone by then, nothing is committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from percolator.errors import CellAddress
from percolator.protocol.announcing import learn_schemas
from percolator.protocol.environment import Announcing, Environment
from percolator.routing.catalog import TableSchema

Observed = frozenset[tuple[bytes, bytes]]
"""Columns of a table, each with an observer that its changes notify."""


class AttemptAnnouncement:
    """The intents of one attempt."""

    def __init__(self, env: Environment, store: Announcing) -> None:
        self._env = env
        self._store = store
        self.announced: dict[int, Observed] = {}
        """By table, the observers to which all of its cells were announced so far."""

    async def announce(self, locked: Mapping[int, Sequence[CellAddress]], deadline: float) -> None:
        """Announces cells, by the start timestamp of the part that has locked them."""
        tables = {cell.table_id for cells in locked.values() for cell in cells}
        await learn_schemas(self._env, tables, deadline)
        for start, cells in locked.items():
            wanted: list[tuple[CellAddress, bytes]] = []
            for table_id in {cell.table_id for cell in cells}:
                schema = await self._env.schema(table_id, deadline)
                known = self.announced.get(table_id)
                now = _observed(schema)
                self.announced[table_id] = now if known is None else known & now
                wanted += [
                    (cell, observer)
                    for cell in cells
                    if cell.table_id == table_id
                    for observer in schema.observers.get(cell.column, ())
                ]
            if wanted:
                await self._store.announce(start, wanted, deadline)


def announced_by_all(attempts: Iterable[Mapping[int, Observed]]) -> dict[int, Observed]:
    """By table, the observers to which all attempts that write it have announced their cells."""
    found: dict[int, Observed] = {}
    for announced in attempts:
        for table_id, observed in announced.items():
            known = found.get(table_id)
            found[table_id] = observed if known is None else known & observed
    return found


async def announce_to_newer(
    env: Environment,
    store: Announcing,
    starts: Sequence[int],
    announced: Mapping[int, Observed],
    deadline: float,
) -> dict[int, Observed]:
    """Announces what the parts have locked to observers that were registered meanwhile. To be
    called after the commit timestamp was received, and before it is used. Returns to whom all is
    announced now; raises `SchemaError` if a table is gone."""
    await learn_schemas(env, announced, deadline)
    result = dict(announced)
    for table_id, known in announced.items():
        now = _observed(await env.schema(table_id, deadline))
        missing = now - known
        if missing:
            await store.announce_locked(table_id, missing, frozenset(starts), deadline)
            result[table_id] = known | missing
    return result


def _observed(schema: TableSchema) -> Observed:
    return frozenset(
        (column, observer) for column, several in schema.observers.items() for observer in several
    )
