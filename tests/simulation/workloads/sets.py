"""A set into which all sessions insert, with a row for each element; scans read all of it."""

from __future__ import annotations

from collections.abc import Iterable

from tests.isolation.history import Put
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload


class Sets(Workload):
    """The set holds what was committed, and nothing else."""

    def __init__(self) -> None:
        self.cells = Cells("sets", (b"5", b"a"))
        self._member = self.cells.column()

    async def step(self, session: Session) -> None:
        if session.random.random() < 0.3:
            await session.run(self._read)
            return
        elements = [
            b"%08x" % session.random.getrandbits(32) for _ in range(session.random.randint(1, 3))
        ]

        async def insert(tx: RecordedTx) -> None:
            for element in elements:
                await tx.set(element, self._member, session.unique())

        await session.run(insert)

    async def _read(self, tx: RecordedTx) -> None:
        await tx.scan(self.cells.table)

    def check(self, ending: Ending) -> Iterable[str]:
        expected = {
            operation.key[1]
            for record in ending.committed()
            for operation in record.operations
            if isinstance(operation, Put) and operation.key[0] == self.cells.name
        }
        found = set(ending.tables[self.cells.name])
        if lost := expected - found:
            yield f"elements were lost: {sorted(lost)}"
        if extra := found - expected:
            yield f"elements came from nowhere: {sorted(extra)}"
