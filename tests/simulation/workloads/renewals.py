"""A job writes what is there already, after another client has given the column a ttl.

Each column gets its ttl once, so that a late copy of that request changes nothing. The client that
runs the job has learned the schema before. The value has to live for the ttl from the job's commit.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from percolator.aio import Database
from percolator.errors import PercolatorError
from tests.simulation.recorded_tx import Cells
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

RENEWED = "a value was renewed after another client had set a ttl"
_TTL_MILLISECONDS = 1_000
_ROW, _VALUE = b"row", b"value"
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 0.8
_SEQUENCE_BITS = 18


class Renewals(Workload):
    """Only with the real master, which alone changes a ttl."""

    def __init__(self) -> None:
        self.cells = Cells("renewed")
        self._count = 0
        self._waiting: list[tuple[str, str]] = []
        """Columns that need a ttl, each with the client that must not set it."""
        self._set: set[str] = set()

    @property
    def tables(self) -> tuple[Cells, ...]:
        return ()  # what it writes is judged here

    async def create(self, database: Database) -> None:
        await database.create_table(self.cells.table, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.skip()
        try:
            for one in self._waiting:
                if one[1] != session.client:
                    self._waiting.remove(one)
                    await self._set_ttl(session, one[0])
                    return
            if session.random.random() < 0.15:
                await self._renew(session)
        except PercolatorError as error:
            session.expect(error)

    async def _set_ttl(self, session: Session, name: str) -> None:
        ttl = timedelta(milliseconds=_TTL_MILLISECONDS)
        await session.database.set_ttl(self.cells.column(name), ttl, timeout=3.0)
        self._set.add(name)

    async def _renew(self, session: Session) -> None:
        database = session.database
        self._count += 1
        name = f"c{self._count}"
        column = self.cells.column(name)
        async with database.transaction() as tx:
            await tx.set(_ROW, column, _VALUE)
        first = tx.commit_timestamp or 0
        self._waiting.append((name, session.client))
        began = asyncio.get_running_loop().time()
        while name not in self._set:
            await asyncio.sleep(_POLL_SECONDS)
            if asyncio.get_running_loop().time() > began + _PATIENCE_SECONDS:
                return
        whole = database.shared_transaction()
        await whole.begin()
        share = database.internal.share(whole.ticket, "task", 0, 3.0, only_changes=True)
        try:
            await share.begin()
            await share.set(_ROW, column, _VALUE)
            receipt = await share.finish()
        finally:
            share._leave()
        commit = await whole.commit([receipt]) or 0
        left = _milliseconds(first) + _TTL_MILLISECONDS - _milliseconds(commit)
        await asyncio.sleep(max(left, 0) / 1000 + 0.02)
        at = await database.timestamp(timeout=2.0)
        async with database.snapshot(at=at, timeout=2.0) as snapshot:
            value = await snapshot.get(_ROW, column)
        age = _milliseconds(at) - _milliseconds(commit)
        if age < _TTL_MILLISECONDS:
            session.strike(RENEWED)
            if value != _VALUE:
                session.broken(f"a value that a job has written is gone after {age} ms")


def _milliseconds(timestamp: int) -> int:
    return timestamp >> _SEQUENCE_BITS
