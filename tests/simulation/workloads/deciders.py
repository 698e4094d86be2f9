"""Two drivers of one shared transaction, in different clients, which commit different parts of it.

That is misuse, and must do no harm: a driver that is told of a commit finds all that it has named,
and what another one is told was left out never appears. Each transaction writes rows of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count

from percolator.aio import Database
from percolator.aio.shared import SharedTransaction
from percolator.aio.tickets import Receipt, Ticket
from percolator.errors import ConflictError, OtherDriverCommitted, PercolatorError
from tests.simulation.recorded_tx import Cells
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

LOST_TO_ANOTHER = "a driver of a shared transaction has lost to another one"
_TASKS = ("a", "b", "c")
_ROWS = 2
"""Of each task."""
_SECONDS = 2.0
_LATER_SECONDS = 0.3


class Deciders(Workload):
    """Only with the real master, as it creates a table of its own."""

    def __init__(self) -> None:
        self.cells = Cells("decided", (b"c",))
        self._value = self.cells.column()
        self._numbers = count()
        self._waiting: list[tuple[str, int, Ticket, list[Receipt]]] = []
        """Transactions that need a second driver, each with the client that has the first one."""

    @property
    def tables(self) -> tuple[Cells, ...]:
        return ()  # what it writes is judged here

    async def create(self, database: Database) -> None:
        await database.create_table(self.cells.table, self.cells.splits, timeout=30.0)

    async def step(self, session: Session) -> None:
        session.skip()
        try:
            for one in self._waiting:
                if one[0] != session.client:
                    self._waiting.remove(one)
                    _, number, ticket, chosen = one
                    internal = session.database.internal
                    whole = internal.shared_transaction(None, None, _SECONDS, ticket)
                    await whole.begin()
                    await self._drive(session, number, whole, chosen)
                    return
            if session.random.random() < 0.3:
                await self._begin(session)
        except PercolatorError as error:
            session.expect(error)

    async def _begin(self, session: Session) -> None:
        database, number = session.database, next(self._numbers)
        whole = database.shared_transaction(timeout=_SECONDS)
        await whole.begin()
        receipts = []
        for task in _TASKS:
            share = database.internal.share(whole.ticket, task, 0, _SECONDS)
            try:
                await share.begin()
                for row in _rows(task, number):
                    await share.set(row, self._value, session.unique())
                receipts.append(await share.finish())
            finally:
                share._leave()
        chosen = [session.random.sample(receipts, session.random.randint(1, 3)) for _ in range(2)]
        self._waiting.append((session.client, number, whole.ticket, chosen[1]))
        await asyncio.sleep(session.random.random() * 0.2)
        await self._drive(session, number, whole, chosen[0])

    async def _drive(
        self, session: Session, number: int, whole: SharedTransaction, chosen: Sequence[Receipt]
    ) -> None:
        database, named = session.database, [one.task for one in chosen]
        commit: int
        try:
            commit = await whole.commit(chosen) or 0
            there, gone = named, []
        except OtherDriverCommitted as lost:
            session.strike(LOST_TO_ANOTHER)
            commit = lost.commit_timestamp
            gone = [task for task in named if any(f"task {task!r}" in one for one in lost.without)]
            there = [task for task in named if task not in gone]
            if not gone:
                session.broken(f"nothing is missing of what lost: {lost}")
        except ConflictError:
            commit, there, gone = 0, [], named
        finally:
            if not whole._ended:
                whole._end("was left")
        for _ in range(2):
            seen = await self._seen(database, number)
            if not seen.issuperset(there) or not seen.isdisjoint(gone):
                session.broken(
                    f"of a transaction committed at {commit}, {sorted(seen)} is there; a driver "
                    f"was told that {there} is, and that {gone} never will be"
                )
            await asyncio.sleep(_LATER_SECONDS)  # until tablets were told

    async def _seen(self, database: Database, number: int) -> set[str]:
        """The tasks of which all rows are there, or only some."""
        rows = [(task, row) for task in _TASKS for row in _rows(task, number)]
        async with database.snapshot(timeout=_SECONDS) as snapshot:
            found = await snapshot.get_many([(row, self._value) for _, row in rows])
        return {task for (task, _), value in zip(rows, found, strict=True) if value is not None}


def _rows(task: str, number: int) -> list[bytes]:
    return [b"%s-%d-%d" % (task.encode(), number, at) for at in range(_ROWS)]
