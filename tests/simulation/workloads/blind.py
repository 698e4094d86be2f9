"""Cells that are written without being read, and read by others.

Most transactions write one or two cells of one tablet. Each writes a unique value.
"""

from __future__ import annotations

from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_LOW = [b"a%d" % number for number in range(8)]
_HIGH = [b"n%d" % number for number in range(8)]
_READING_SHARE = 0.25
_LOCKING_SHARE = 0.1


class Blind(Workload):
    """Promises nothing beyond what the checker requires."""

    locks = True

    def __init__(self) -> None:
        self.cells = Cells("blind", (b"m",))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        chance = session.random
        rows = chance.sample(chance.choice((_LOW, _HIGH)), chance.randint(1, 2))

        async def read(tx: RecordedTx) -> None:
            await tx.get_many(rows, self._value)

        async def write(tx: RecordedTx) -> None:
            for row in rows:
                if chance.random() < _LOCKING_SHARE:
                    await tx.lock(row, self._value)
                else:
                    await tx.set(row, self._value, session.unique())

        await session.run(read if chance.random() < _READING_SHARE else write)
