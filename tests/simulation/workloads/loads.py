"""Bulk loads among transactions: a load is seen as a whole or not at all, and has no conflicts.

Buckets of rows are loaded now and then, read and scanned all the time, and written in transactions,
after which later loads of the same bucket are refused. A loader may die in the middle; the next
loader of that bucket takes over, and the last loads are ended when everything is at rest. For the
checker, a load is a transaction that writes all of its rows.
"""

from __future__ import annotations

import asyncio

from percolator.aio.bulk_load import BulkLoad, LoadPlan
from percolator.errors import InvalidArgument, PercolatorError, UsageError
from tests.simulation.recorded_tx import Body, Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Workload

_BUCKETS = 24
_ROWS = 6
_COLUMN = b"v"
_INTERRUPTED = 0.3
"""The share of loads that another run continues."""


class Loads(Workload):
    """A bucket holds the rows of one load, and what transactions have written over them."""

    leaves_behind = True

    def __init__(self) -> None:
        self.cells = Cells("loads", (_row(5, 3), _row(11, 0), _row(17, 2)))
        self._value = self.cells.column()

    async def step(self, session: Session) -> None:
        chance = session.random.random()
        bucket = session.random.randrange(_BUCKETS)
        if chance < 0.35:
            await self._load(session, bucket)
        elif chance < 0.6:
            await session.run(self._scan)
        elif chance < 0.9:
            await session.run(self._reading(bucket))
        else:
            await session.run(self._writing(session, bucket))

    async def rest(self, session: Session) -> None:
        """Ends the loads that are left: until then, their ranges are closed to all transactions."""
        for bucket in range(_BUCKETS):
            await self._bulk_load(session, bucket).abandon()

    async def _load(self, session: Session, bucket: int) -> None:
        load = self._bulk_load(session, bucket)
        recorded = session.begin_alone()
        record = recorded.record
        try:
            timestamps = await load.begin()
            recorded.began(timestamps.start)
            value = session.unique()
            for number in range(_ROWS):
                recorded.put((self.cells.name, _row(bucket, number), _COLUMN), value)
            recorded.commit_called()
            # Both timestamps were taken at the beginning.
            record.commit_called = record.begin_called
            cells = [(_row(bucket, number), _COLUMN, value) for number in range(_ROWS)]
            half = session.random.randrange(_ROWS)
            await load.load(cells[half:], timestamps)
            if session.random.random() < _INTERRUPTED:
                # What another process, which knows which part is loaded, does a while later.
                await asyncio.sleep(session.random.random())
                load = self._bulk_load(session, bucket)
                if not await load.resume(timestamps):
                    raise UsageError("another run has taken over")
            await load.load(cells[:half], timestamps)
            await load.finish(timestamps)
        except PercolatorError as error:
            if not isinstance(error, UsageError | InvalidArgument):
                session.expect(error)
            if record.start_ts:
                recorded.unknown()
            else:
                recorded.aborted()
            if session.random.random() < 0.5:
                await self._abandon(session, load)
            return
        recorded.committed(timestamps.commit)

    async def _abandon(self, session: Session, load: BulkLoad) -> None:
        try:
            await load.abandon()
        except InvalidArgument:
            return  # another run has taken it over
        except PercolatorError as error:
            session.expect(error)

    async def _scan(self, tx: RecordedTx) -> None:
        await tx.scan(self.cells.table)

    def _reading(self, bucket: int) -> Body:
        async def body(tx: RecordedTx) -> None:
            await tx.get_many([_row(bucket, number) for number in range(_ROWS)], self._value)

        return body

    def _writing(self, session: Session, bucket: int) -> Body:
        rows = {session.random.randrange(_ROWS) for _ in range(2)}
        value = session.unique()

        async def body(tx: RecordedTx) -> None:
            for number in sorted(rows):
                await tx.get(_row(bucket, number), self._value)
                await tx.set(_row(bucket, number), self._value, value)

        return body

    def _bulk_load(self, session: Session, bucket: int) -> BulkLoad:
        plan = LoadPlan(
            table=self.cells.name,
            name=f"bucket-{bucket}",
            start=_row(bucket, 0),
            end=_row(bucket + 1, 0),
            notify=False,
        )
        return BulkLoad(session.database, plan)


def _row(bucket: int, number: int) -> bytes:
    return b"bucket-%02d-row-%d" % (bucket, number)
