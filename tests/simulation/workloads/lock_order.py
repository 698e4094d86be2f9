"""All sessions want the same cells, in opposite orders, and a rule that only locks can keep.

At least one of two guards must stay on duty. Each transaction reads both and takes one off duty.
Snapshots alone would allow two transactions to do so concurrently, so each locks the cell that it
has read and does not write.
"""

from __future__ import annotations

from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_ROWS = [b"a", b"h", b"p", b"z"]
_GUARDS = [b"guard-1", b"guard-2"]


class LockOrder(Workload):
    """Transactions never wait for each other forever, and both guards are never off duty."""

    locks = True

    def __init__(self) -> None:
        self.cells = Cells("lock_order", (b"d", b"k"))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        if session.random.random() < 0.4:
            await self._change_guard(session)
            return
        rows = session.random.sample(_ROWS, 3)

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                await tx.get(row, self._value)
                await tx.set(row, self._value, session.unique())

        await session.run(body)

    async def _change_guard(self, session: Session) -> None:
        one, other = session.random.sample(_GUARDS, 2)

        async def body(tx: RecordedTx) -> None:
            duty = await tx.get_many(_GUARDS, self._value)
            off = [guard for guard in _GUARDS if duty[guard] == b"off"]
            if len(off) == len(_GUARDS):
                session.broken("both guards are off duty")
            if one in off:
                await tx.set(one, self._value, b"on")
            elif other not in off:
                await tx.set(one, self._value, b"off")
                await tx.lock(other, self._value)

        await session.run(body)
