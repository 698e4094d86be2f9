"""Versions written one after another, to a first row and then, in a later transaction, a second.

A reader that finds a version in the second row must find it, or a later one, in the first row, even
in a separate transaction that begins later, in any process.
"""

from __future__ import annotations

from tests.simulation.sessions import Cells, RecordedTx, Session
from tests.simulation.workloads.workload import Workload

_FIRST, _SECOND = b"first", b"second"


class Sequential(Workload):
    """What was seen once is seen by all later transactions."""

    def __init__(self) -> None:
        self.cells = Cells("sequential", (b"g",))
        self._version = self.cells.column()
        self._seen_in_first = 0
        """The newest version that any ended transaction has seen in the first row."""

    async def step(self, session: Session) -> None:
        if session.random.random() < 0.5:
            await self._write(session)
        else:
            await self._read(session)

    async def _write(self, session: Session) -> None:
        version = 0

        async def first(tx: RecordedTx) -> None:
            nonlocal version
            version = int(await tx.get(_FIRST, self._version) or b"0") + 1
            await tx.set(_FIRST, self._version, b"%d" % version)

        async def second(tx: RecordedTx) -> None:
            before = int(await tx.get(_SECOND, self._version) or b"0")
            if before < version:
                await tx.set(_SECOND, self._version, b"%d" % version)

        if await session.run(first):
            self._seen_in_first = max(self._seen_in_first, version)
            await session.run(second)

    async def _read(self, session: Session) -> None:
        before = self._seen_in_first
        seen = [0, 0]

        async def body(tx: RecordedTx) -> None:
            for place, row in enumerate((_SECOND, _FIRST)):
                seen[place] = int(await tx.get(row, self._version) or b"0")

        if await session.run(body):
            if seen[1] < seen[0]:
                session.broken(f"version {seen[0]} came before version {seen[1]}, its cause")
            if seen[1] < before:
                session.broken(f"version {seen[1]} was read after {before} had been committed")
