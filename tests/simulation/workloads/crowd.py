"""A crowd: a hundred sessions in each client, most of which use their own pairs of rows.

Only here do many transactions share calls, commits and disk writes, so that a torn batch, a refusal
within one, or a full response affects some of them and not others. Both rows of a pair always have
the same value; they are in different tablets.
"""

from __future__ import annotations

from collections.abc import Iterable

from percolator.world import Random
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload

SESSIONS_PER_CLIENT = 100
BURST_SECONDS = 1.0
_PAIRS = 4_000
_CONTENDED_PAIRS = 20
_CONTENDED_SHARE = 0.05


class Crowd(Workload):
    """No transaction ever sees half of a pair's change."""

    def __init__(self) -> None:
        self.cells = Cells("crowd", (b"left 2", b"m", b"right 2"))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        rows = _pair(session.random)
        one_by_one, only_reads = session.random.random() < 0.2, session.random.random() < 0.2

        async def body(tx: RecordedTx) -> None:
            if one_by_one:
                found = {row: await tx.get(row, self._value) for row in rows}
            else:
                found = await tx.get_many(rows, self._value)
            if len(set(found.values())) != 1:
                session.broken(f"a pair was found torn: {found}")
            if only_reads:
                return
            value = session.unique()
            for row in rows:
                await tx.set(row, self._value, value)

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        rows = ending.tables[self.cells.name]
        for row, cells in rows.items():
            side, number = row.split()
            other = rows.get(b"%s %s" % (b"left" if side == b"right" else b"right", number))
            if other != cells:
                yield f"at the end a pair is torn: {row!r} holds {cells}, its other half {other}"


def _pair(chance: Random) -> list[bytes]:
    contended = chance.random() < _CONTENDED_SHARE
    number = chance.randrange(_CONTENDED_PAIRS if contended else _PAIRS)
    return [b"left %d" % number, b"right %d" % number]
