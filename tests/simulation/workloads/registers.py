"""Registers, written without being read, read, deleted and locked: every kind of single operation.
Two of three columns are a family, and are read together, too.

Each write puts a unique value; some are too long to be stored in a record.
"""

from __future__ import annotations

from percolator.codecs import raw
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_ROWS = [b"", b"\x00", b"\x00\xff", b"middle", b"n", b"\xff", b"\xff\xff"]
_LONG_BYTES = 1500


class Registers(Workload):
    """Promises nothing beyond what the checker requires."""

    locks = True

    def __init__(self) -> None:
        self.cells = Cells("registers", (b"m", b"\xff"))
        self._family = self.cells.table.family("of:", raw)
        self._columns = [self._family.column("v"), self._family.column("w")]
        self._alone = self.cells.column("o")
        """A column that begins almost as those of the family."""

    async def step(self, session: Session) -> None:
        chance = session.random

        async def body(tx: RecordedTx) -> None:
            for _ in range(chance.randint(1, 4)):
                row, column = chance.choice(_ROWS), chance.choice([*self._columns, self._alone])
                match chance.randrange(8):
                    case 0 | 1:
                        await tx.get(row, column)
                    case 2:
                        await tx.get_family(row, self._family, self._columns)
                    case 3 | 4:
                        await tx.set(row, column, session.unique())
                    case 5:
                        await tx.set(row, column, session.unique().ljust(_LONG_BYTES))
                    case 6:
                        await tx.delete(row, column)
                    case _:
                        await tx.lock(row, column)

        await session.run(body)
