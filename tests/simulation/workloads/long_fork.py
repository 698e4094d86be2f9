"""Two writers of two keys that never meet, and readers of both.

A long fork is when one reader sees only the first write and another only the second: each alone has
a snapshot, together they have no order.
"""

from __future__ import annotations

from tests.simulation.sessions import Cells, RecordedTx, Session
from tests.simulation.workloads.workload import Workload

_ROWS = [b"a", b"f", b"m", b"t"]


class LongFork(Workload):
    """All readers agree on one order of all writes; that is for the checker to find."""

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
                # One after the other: the longer a snapshot is read, the more happens meanwhile.
                for one in order:
                    await tx.get(one, self._value)

        await session.run(body)
