"""Versions written one after another, to a first row and then, in a later transaction, a second.

A reader that finds a version in the second row must find it, or a later one, in the first row, even
in a separate transaction that begins later, in any process. The same holds for reads of single
cells, which have no transaction. Some versions are written to a third row along with the first, in
another tablet: so its lock may be left when the commit was acknowledged.
"""

from __future__ import annotations

from percolator.aio import Database
from percolator.errors import PercolatorError
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_FIRST, _SECOND, _THIRD = b"first", b"second", b"third"


class Sequential(Workload):
    """What was seen once is seen by all later transactions."""

    def __init__(self) -> None:
        self.cells = Cells("sequential", (b"g",))
        self._version = self.cells.column()
        self._seen_in_first = 0
        """The newest version that any ended transaction has seen in the first row."""
        self._seen_in_third = 0

    async def step(self, session: Session) -> None:
        chance = session.random.random()
        if chance < 0.5:
            await self._write(session)
        elif chance < 0.75:
            await self._read(session)
        else:
            await self._read_now(session)

    async def _write(self, session: Session) -> None:
        version = 0
        third_too = session.random.random() < 0.5

        async def first(tx: RecordedTx) -> None:
            nonlocal version
            version = int(await tx.get(_FIRST, self._version) or b"0") + 1
            await tx.set(_FIRST, self._version, b"%d" % version)
            if third_too:
                await tx.set(_THIRD, self._version, b"%d" % version)

        async def second(tx: RecordedTx) -> None:
            before = int(await tx.get(_SECOND, self._version) or b"0")
            if before < version:
                await tx.set(_SECOND, self._version, b"%d" % version)

        if await session.run(first):
            self._seen_in_first = max(self._seen_in_first, version)
            if third_too:
                self._seen_in_third = max(self._seen_in_third, version)
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

    async def _read_now(self, session: Session) -> None:
        session.skip()
        least_first, least_third = self._seen_in_first, self._seen_in_third
        database = session.database
        try:
            at = await database.timestamp(timeout=2.0)
            second = await self._now(database, _SECOND)
            third = await self._now(database, _THIRD)
            first = await self._now(database, _FIRST)
            async with database.snapshot(at=at, timeout=2.0) as snapshot:
                earlier = int(await snapshot.get(_FIRST, self._version) or b"0")
        except PercolatorError as error:
            session.expect(error)
            return
        self._seen_in_first = max(self._seen_in_first, first)
        self._seen_in_third = max(self._seen_in_third, third)
        if first < max(second, third):
            session.broken(f"version {max(second, third)} came before version {first}, its cause")
        if first < least_first or third < least_third:
            session.broken(
                f"versions {first} and {third} are there now, after {least_first} and "
                f"{least_third} had been seen"
            )
        if first < earlier:
            session.broken(f"version {first} is there now, and {earlier} was there before")

    async def _now(self, database: Database, row: bytes) -> int:
        return int(await database.get(row, self._version, timeout=2.0) or b"0")
