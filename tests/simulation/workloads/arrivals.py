"""Bulk loads into a row store, among transactions: tables appear as a whole, or not at all.

Each table is loaded once. Loaders die, take over from each other, resume, and go on writing when
they have been taken over. Some of what a finished load has written is written again much later, as
by a call that was given up. For the checker, a load is a transaction that writes all of its rows.
"""

from __future__ import annotations

import asyncio

from percolator.aio.bulk_load import LoadPlan, LoadTimestamps
from percolator.aio.row_load import RowLoad
from percolator.errors import InvalidArgument, PercolatorError, SchemaError, UsageError
from percolator.schema import Column
from tests.simulation.recorded_tx import Body, Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_TABLES = 12
_ROWS = 6
_INTERRUPTED = 0.3
"""The share of loads that another run continues."""
_LATE = 0.7
"""The share of loads of which a part is written again later."""
_LATE_SECONDS_MAX = 4.0


class Arrivals(Workload):
    """A table holds the rows of one load, and what transactions have made of them."""

    leaves_behind = True

    def __init__(self) -> None:
        self.cells = Cells("arrivals")
        self._arrived: list[Cells] = []

    @property
    def tables(self) -> tuple[Cells, ...]:
        """At the end, with those that have arrived."""
        return (self.cells, *self._arrived)

    async def step(self, session: Session) -> None:
        session.also_expected = SchemaError  # most tables have not arrived yet
        chance = session.random.random()
        cells = _cells(session.random.randrange(_TABLES))
        if chance < 0.35:
            await self._load(session, cells)
        elif chance < 0.5:
            await session.run(self._scanning(cells))
        elif chance < 0.7:
            await session.run(self._reading(cells))
        else:
            await session.run(self._writing(session, cells))

    async def rest(self, session: Session) -> None:
        """Ends the loads that are left, and sees what has arrived."""
        for number in range(_TABLES):
            await _load_of(session, _cells(number)).abandon()
        names = set(await session.database.tables()) - {self.cells.name}
        self._arrived = [Cells(name) for name in sorted(names)]

    async def _load(self, session: Session, cells: Cells) -> None:
        load = _load_of(session, cells)
        recorded = session.begin_alone()
        record = recorded.record
        value, column = session.unique(), cells.column()
        loaded = [(_row(number), column.name, value) for number in range(_ROWS)]
        half = session.random.randrange(1, _ROWS)
        try:
            timestamps = await load.begin()
            recorded.began(timestamps.start)
            for row, _, _ in loaded:
                recorded.put((cells.name, row, column.name), value)
            recorded.commit_called()
            # Both timestamps were taken at the beginning.
            record.commit_called = record.begin_called
            await load.load(loaded[half:], timestamps)
            if session.random.random() < _INTERRUPTED:
                # What another process, which knows which part is loaded, does a while later.
                await asyncio.sleep(session.random.random())
                load = _load_of(session, cells)
                if not await load.resume(timestamps):
                    raise UsageError("another run has taken over")
            await load.load(loaded[:half], timestamps)
            await load.finish(timestamps)
        except PercolatorError as error:
            if not isinstance(error, UsageError | InvalidArgument | SchemaError):
                session.expect(error)
            if record.start_ts:
                recorded.unknown()
            else:
                recorded.aborted()
            if session.random.random() < 0.3:
                await self._abandon(session, load)
            return
        recorded.committed(timestamps.commit)
        if session.random.random() < _LATE:
            await self._write_late(session, load, loaded[half:], timestamps)

    async def _write_late(
        self,
        session: Session,
        load: RowLoad,
        loaded: list[tuple[bytes, bytes, bytes]],
        timestamps: LoadTimestamps,
    ) -> None:
        await asyncio.sleep(session.random.random() * _LATE_SECONDS_MAX)
        try:
            await load.load(loaded, timestamps)
        except PercolatorError as error:
            session.expect(error)

    async def _abandon(self, session: Session, load: RowLoad) -> None:
        try:
            await load.abandon()
        except PercolatorError as error:
            session.expect(error)

    def _scanning(self, cells: Cells) -> Body:
        async def body(tx: RecordedTx) -> None:
            await tx.scan(cells.table)

        return body

    def _reading(self, cells: Cells) -> Body:
        async def body(tx: RecordedTx) -> None:
            await tx.get_many([_row(number) for number in range(_ROWS)], cells.column())

        return body

    def _writing(self, session: Session, cells: Cells) -> Body:
        """A row of the table, and one of a table that is there from the beginning."""
        row, value = _row(session.random.randrange(_ROWS)), session.unique()
        deletes = session.random.random() < 0.6

        async def body(tx: RecordedTx) -> None:
            await tx.get(row, cells.column())
            if deletes:
                await tx.delete(row, cells.column())
            else:
                await tx.set(row, cells.column(), value)
            other: Column[bytes] = self.cells.column()
            await tx.set(row, other, value)

        return body


def _cells(number: int) -> Cells:
    return Cells(f"arrival-{number:02}")


def _load_of(session: Session, cells: Cells) -> RowLoad:
    plan = LoadPlan(cells.name, "arrival", start=b"", end=b"", notify=False)
    return RowLoad(session.database, plan)


def _row(number: int) -> bytes:
    return b"row-%d" % number
