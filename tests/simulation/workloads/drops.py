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
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_GOING = 16
_ROWS = [b"row %04d" % number for number in range(1_500)]
"""So many that most of the locks which are left behind are still there when their table is gone."""
_BETWEEN_DROPS_SECONDS = 0.4
_USED = 4
"""How many of the tables are used at a time: the next one to be dropped, and those before it. A
client that has not heard of a drop uses the table for as long as the store has it."""
_READS_SHARE = 0.3
_ROWS_AT_ONCE = 5
"""Of a transaction that has died. What becomes of it shows if some of its locks are met while the
table of its primary is there, and others when that is gone."""
_AGAIN_SHARE = 0.3
"""How many of the dropped tables are created again, under the same name and another id. Clients
that know the former one go on writing there."""
_CALL_SECONDS = 3.0


class Drops(Workload):
    """A transaction writes one cell of a table that may go, and several of one that stays."""

    def __init__(self, *, pause_seconds_max: float = 0.0) -> None:
        """Each session pauses between transactions: a master collects nothing in its first seconds,
        and there has to be work for longer than that."""
        self.cells = Cells("remaining")
        self._going = [Cells(f"going-{number:02}") for number in range(_GOING)]
        self._next = 0
        """The next table to be dropped."""
        self._pause_seconds_max = pause_seconds_max
        self._dropped_at = 0.0

    async def create(self, database: Database) -> None:
        for cells in self._going:
            await database.create_table(cells.table, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.also_expected = SchemaError
        chance = session.random
        await asyncio.sleep(chance.random() * self._pause_seconds_max)
        now = asyncio.get_running_loop().time()
        if now >= self._dropped_at + _BETWEEN_DROPS_SECONDS and self._next < _GOING:
            self._dropped_at = now
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
        going = self._going[chance.randint(max(latest - _USED + 1, 0), latest)]
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
        going = self._going[self._next]
        self._next += 1
        try:
            await session.database.drop_table(going.table, timeout=_CALL_SECONDS)
            if session.random.random() < _AGAIN_SHARE:
                await session.database.create_table(
                    going.table, timeout=_CALL_SECONDS, exist_ok=True
                )
        except PercolatorError as error:
            session.expect(error)
