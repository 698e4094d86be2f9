"""Transactions of many cells across many tablets: every scan sees all of a commit or nothing."""

from __future__ import annotations

from collections.abc import Iterable

from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload

_ROWS = [b"row-%02d" % number for number in range(30)]


class Large(Workload):
    """Every transaction writes one value into a third of all rows, which no scan sees in part."""

    def __init__(self) -> None:
        self.cells = Cells("large", (_ROWS[5], _ROWS[11], _ROWS[20]))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        third = session.random.randrange(3)
        if session.random.random() < 0.4:
            await self._scan(session)
            return
        value = session.unique()

        async def body(tx: RecordedTx) -> None:
            for row in _ROWS[third::3]:
                await tx.set(row, self._value, value)

        await session.run(body)

    async def _scan(self, session: Session) -> None:
        async def body(tx: RecordedTx) -> None:
            for problem in _torn(await tx.scan(self.cells.table)):
                session.broken(problem)

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        return _torn(ending.tables[self.cells.name])


def _torn(rows: dict[bytes, dict[bytes, bytes]]) -> Iterable[str]:
    for third in range(3):
        values = {rows.get(row, {}).get(b"v") for row in _ROWS[third::3]}
        if len(values) > 1:
            yield f"a transaction was seen in part: {values}"
