"""Tables of a row store that are dropped while transactions have their primaries there.

All tables exist from the beginning, and those that are dropped come first: the smallest cell of a
transaction is its primary, so that its outcome is written into a table that goes. The other cells
are in a table that stays, and for them nothing may change: what was committed stays committed, and
what was not never is. What was in the tables that go is no longer judged once they are gone.
"""

from __future__ import annotations

import asyncio

from percolator.aio import Database
from percolator.errors import PercolatorError, SchemaError
from percolator.schema import Column
from tests.simulation.sessions import Cells, RecordedTx, Session
from tests.simulation.workloads.workload import Workload

_GOING = 16
_ROWS = [b"row %02d" % number for number in range(60)]
"""So many that some of the locks which are left behind are still there when their table is gone."""
_DROPS_SHARE = 0.12
_READS_SHARE = 0.3
_ROWS_AT_ONCE = 5
"""Of a transaction that has died. What becomes of it shows if some of its locks are met while the
table of its primary is there, and others when that is gone."""
_CALL_SECONDS = 3.0
_PAUSE_SECONDS_MAX = 0.4
"""A master collects nothing in its first seconds: there has to be work for longer than that."""


class Drops(Workload):
    """A transaction writes one cell of a table that may go, and several of one that stays."""

    def __init__(self) -> None:
        self.cells = Cells("remaining")
        self._going = [Cells(f"going-{number:02}") for number in range(_GOING)]
        self._next = 0
        """The next table to be dropped. Most transactions use it, or the ones before it: clients
        know them, and hear late that they are gone."""

    async def create(self, database: Database) -> None:
        for cells in self._going:
            await database.create_table(cells.table, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.also_expected = SchemaError
        chance = session.random
        await asyncio.sleep(chance.random() * _PAUSE_SECONDS_MAX)
        if chance.random() < _DROPS_SHARE:
            await self._drop(session)
        elif chance.random() < _READS_SHARE:
            await self._read(session)
        else:
            await self._write(session)

    async def _read(self, session: Session) -> None:
        rows, column = session.random.sample(_ROWS, 2), self.cells.column()

        async def body(tx: RecordedTx) -> None:
            await tx.get_many(rows, column)

        await session.run(body)

    async def _write(self, session: Session) -> None:
        chance = session.random
        latest = min(self._next, _GOING - 1)
        going = self._going[chance.randint(max(latest - 1, 0), latest)]
        rows, value = sorted(chance.sample(_ROWS, _ROWS_AT_ONCE)), session.unique()
        gone: Column[bytes] = going.column()
        column: Column[bytes] = self.cells.column()

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                await tx.get(row, column)
                await tx.set(row, column, value)
            # Not recorded: nobody can say later what was in it.
            await tx.itself.set(chance.choice(_ROWS), gone, value)

        await session.run(body)

    async def _drop(self, session: Session) -> None:
        session.skip()
        if self._next == _GOING:
            return
        going = self._going[self._next]
        self._next += 1
        try:
            await session.database.drop_table(going.table, timeout=_CALL_SECONDS)
        except PercolatorError as error:
            session.expect(error)
