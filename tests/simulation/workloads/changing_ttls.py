"""The ttl of a column becomes longer and shorter, while its values are read and collected.

What a snapshot shows depends on the ttl, and a late copy of a change may come at any time. So this
promises no more than that no read finds half of a value.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from percolator.aio import Database
from percolator.errors import PercolatorError
from tests.simulation.recorded_tx import Cells
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_ROWS = [b"row-%d" % number for number in range(6)]
_TTL = timedelta(milliseconds=100)
_LONG_BYTES = 1500
"""So many are stored apart from the record of their commit."""
_SECONDS = 3.0


class ChangingTtls(Workload):
    """Only with the real master, which alone changes a ttl."""

    def __init__(self) -> None:
        self.cells = Cells("changing", (_ROWS[3],))
        self._value = self.cells.column()

    @property
    def tables(self) -> tuple[Cells, ...]:
        return ()  # what it writes is judged here

    async def create(self, database: Database) -> None:
        await database.create_table(self.cells.table, self.cells.splits, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.skip()
        chance = session.random.random()
        try:
            if chance < 0.2:
                await self._write(session)
            elif chance < 0.3:
                await self._change(session)
            else:
                await self._read(session)
        except PercolatorError as error:
            session.expect(error)

    async def _write(self, session: Session) -> None:
        async with session.database.transaction(timeout=_SECONDS) as tx:
            for row in _ROWS:
                await tx.set(row, self._value, session.unique().ljust(_LONG_BYTES))

    async def _change(self, session: Session) -> None:
        for ttl in (_TTL, None):
            await session.database.set_ttl(self._value, ttl, timeout=_SECONDS)
            await asyncio.sleep(session.random.random() * 0.4)  # some is collected meanwhile

    async def _read(self, session: Session) -> None:
        async with session.database.snapshot(timeout=_SECONDS) as snapshot:
            reverse = session.random.random() < 0.5
            async for _ in snapshot.scan(self.cells.table, reverse=reverse):
                pass
            await snapshot.get_many([(row, self._value) for row in _ROWS])
