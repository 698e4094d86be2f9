"""Several workloads at once on one cluster: their tables share the same servers and clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from percolator.aio import Database
from tests.simulation.recorded_tx import Cells
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload


class Mixed(Workload):
    """The promises of all its parts."""

    def __init__(self, parts: Sequence[Workload]) -> None:
        self._parts = parts
        self.cells = parts[0].cells
        self.ttls = {column: ttl for part in parts for column, ttl in part.ttls.items()}
        self.leaves_behind = any(part.leaves_behind for part in parts)

    @property
    def tables(self) -> tuple[Cells, ...]:
        return tuple(table for part in self._parts for table in part.tables)

    async def create(self, database: Database) -> None:
        for part in self._parts:
            await part.create(database)

    async def load(self, session: Session) -> None:
        for part in self._parts:
            await part.load(session)

    async def rest(self, session: Session) -> None:
        for part in self._parts:
            await part.rest(session)

    async def step(self, session: Session) -> None:
        await session.random.choice(self._parts).step(session)

    def check(self, ending: Ending) -> Iterable[str]:
        for part in self._parts:
            yield from part.check(ending)
