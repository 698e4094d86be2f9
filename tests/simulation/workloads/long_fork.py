"""Two writers of two keys that never conflict, and readers of both.

In a long fork, one reader sees only the first write and another one only the second: each has a
snapshot, but there is no order that explains both.
"""

from __future__ import annotations

from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_ROWS = [b"a", b"f", b"m", b"t"]


class LongFork(Workload):
    """All readers agree on one order of all writes, which the checker verifies."""

    def __init__(self) -> None:
        self.cells = Cells("long_fork", (b"d", b"k", b"p"))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        row = session.random.choice(_ROWS)
        writes = session.random.random() < 0.5
        order = session.random.sample(_ROWS, len(_ROWS))

        async def body(tx: RecordedTx) -> None:
            if writes:
                await tx.set(row, self._value, session.unique())
            else:
                # One after another: the longer a snapshot is read, the more happens meanwhile.
                for one in order:
                    await tx.get(one, self._value)

        await session.run(body)
