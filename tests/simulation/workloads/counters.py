"""Counters on few keys, which all sessions read and then write: the test for lost updates.

Each client also has a counter of its own. There its sessions take turns without rivals, so each of
them may begin directly above the commit of the one before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.isolation.history import Put
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload

_ROWS = [b"hits", b"misses", b"seen"]
_OWN_SHARE = 0.5
_LOOKS_SHARE = 0.3
_IN_A_ROW = 5


class Counters(Workload):
    """Every committed increment counts exactly once."""

    def __init__(self) -> None:
        self.cells = Cells("counters", (b"m",))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        if session.random.random() < _OWN_SHARE:
            await self._count_alone(session)
            return
        rows = session.random.sample(_ROWS, session.random.choice((1, 1, 2)))

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                before = await tx.get(row, self._value)
                await tx.set(row, self._value, b"%d" % (int(before or b"0") + 1))

        # Those that run again take turns; the others come in between, and are judged all the same.
        run = session.random.choice((session.run, session.run_again))
        await run(body)

    async def _count_alone(self, session: Session) -> None:
        """Counts in the client's own row, and looks at one of the others."""
        row, other = b"by " + session.client.encode(), session.random.choice(_ROWS)
        looks = session.random.random() < _LOOKS_SHARE

        async def body(tx: RecordedTx) -> None:
            before = await tx.get(row, self._value)
            if looks:
                await tx.get(other, self._value)
            await tx.set(row, self._value, b"%d" % (int(before or b"0") + 1))

        for _ in range(_IN_A_ROW):  # at once, so that the next one comes while there is a line
            if session.goes_on:
                await session.run_again(body)

    def check(self, ending: Ending) -> Iterable[str]:
        expected = Counter(
            operation.key[1]
            for record in ending.committed()
            for operation in record.operations
            if isinstance(operation, Put) and operation.key[0] == self.cells.name
        )
        rows = ending.tables[self.cells.name]
        for row in sorted({*_ROWS, *expected}):
            found = int(rows.get(row, {}).get(b"v", b"0"))
            if found != expected[row]:
                yield f"{row!r} is {found} after {expected[row]} committed increments"
