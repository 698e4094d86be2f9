"""Reads by predicate among inserts and deletes: phantoms, lost rows and doubled rows."""

from __future__ import annotations

from percolator.world import Random
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_ROWS = [b"row-%02d" % number for number in range(24)]


class Predicates(Workload):
    """A range that is scanned twice in a transaction returns the same rows both times."""

    def __init__(self) -> None:
        self.cells = Cells("predicates", (_ROWS[6], _ROWS[12], _ROWS[18]))
        self._columns = [self.cells.column("v"), self.cells.column("w")]

    async def step(self, session: Session) -> None:
        chance = session.random
        if chance.random() < 0.5:
            await self._change(session)
        else:
            await self._scan(session)

    async def _change(self, session: Session) -> None:
        chance = session.random

        async def body(tx: RecordedTx) -> None:
            for row in chance.sample(_ROWS, 3):
                column = chance.choice(self._columns)
                if chance.random() < 0.5:
                    await tx.set(row, column, session.unique())
                else:
                    await tx.delete(row, column)
            if chance.random() < 0.4:
                await self._scan_over_own_writes(tx, chance)

        await session.run(body)

    async def _scan_over_own_writes(self, tx: RecordedTx, chance: Random) -> None:
        """What it has written and deleted hides the snapshot, with limits and both ways."""
        start, stop = sorted(chance.sample(_ROWS, 2))
        reverse, limit = chance.random() < 0.5, chance.choice((0, 1, 3))
        await tx.scan(self.cells.table, start, stop, reverse=reverse, limit=limit)

    async def _scan(self, session: Session) -> None:
        chance = session.random
        start, stop = sorted(chance.sample(_ROWS, 2))
        reverse = chance.random() < 0.4
        limit = chance.choice((0, 0, 2, 5))

        async def body(tx: RecordedTx) -> None:
            table = self.cells.table
            first = await tx.scan(table, start, stop, reverse=reverse, limit=limit)
            again = await tx.scan(table, start, stop, reverse=reverse, limit=limit)
            if first != again:
                session.broken(f"a range changed within a transaction: {first} then {again}")

        await session.run(body)
