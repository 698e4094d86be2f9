"""Several loaders of one tablet, beside transactions of its other rows, which commit in one round.

All clients work on the same few ranges for a while, then on the next ones: so transactions hold
rows of a range at the moment at which it is closed, and loads of one range overlap. Most
transactions also write a row outside of all ranges.

When the trouble is over, loaders load without a pause, while transactions commit one after the
other. None of them may wait longer than `_PATIENCE_SECONDS`, or fail, or be told that the outcome
is unknown; nor may they keep the loaders out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from percolator.aio.bulk_load import BulkLoad, LoadPlan
from percolator.errors import InvalidArgument, PercolatorError, UsageError
from tests.simulation.recorded_tx import Body, Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload

_COLUMN = b"v"
_ROWS = 4
_RANGES_PER_SECOND = 10.0
_RANGES_AT_ONCE = 2
_AT_REST = 900_000
"""The range that is loaded when the trouble is over; those after it are closed and opened."""
_OUTSIDE = 8
_LOADERS = 4
_PROGRESS_SECONDS = 1.0
_PATIENCE_SECONDS = 0.5
"""Far above what a commit takes beside one load, and far below the time for which they load."""
_SHARE_MIN = 0.6
"""The least share of the commits beside one loader that there are beside several: a batch comes
between any two loads, so only what comes after it may take longer."""


class Loaders(Workload):
    """See the module's docstring."""

    leaves_behind = True

    def __init__(self) -> None:
        self.cells = Cells("loaders")
        self._value = self.cells.column()
        self._begun: set[int] = set()
        """The ranges of which a load was begun."""
        self._problems: list[str] = []

    async def step(self, session: Session) -> None:
        chance = session.random.random()
        recent = int(asyncio.get_running_loop().time() * _RANGES_PER_SECOND)
        number = 1 + recent - session.random.randrange(_RANGES_AT_ONCE)
        if chance < 0.3:
            await self._load(session, number)
        elif chance < 0.4:
            await session.run(self._scan)
        else:
            await session.run(self._writing(session, number))

    async def rest(self, session: Session) -> None:
        """Ends the loads that are left; then judges progress, with nothing in the way but loads."""
        for number in sorted(self._begun):
            await self._bulk_load(session, number).abandon()
        await self._write_all_rows(session)
        await self._progress(session)

    def check(self, ending: Ending) -> Iterable[str]:
        return self._problems

    # ------------------------------------------------------------------ in trouble

    async def _load(self, session: Session, number: int) -> None:
        self._begun.add(number)
        load = self._bulk_load(session, number)
        recorded = session.begin_alone()
        try:
            timestamps = await load.begin()
            recorded.began(timestamps.start)
            value = session.unique()
            for place in range(_ROWS):
                recorded.put((self.cells.name, _row(number, place), _COLUMN), value)
            recorded.commit_called()
            # Both timestamps were taken at the beginning.
            recorded.record.commit_called = recorded.record.begin_called
            await asyncio.gather(
                *(
                    self._bulk_load(session, number).load(
                        [(_row(number, place), _COLUMN, value)], timestamps
                    )
                    for place in range(_ROWS)
                )
            )
            await load.finish(timestamps)
        except PercolatorError as error:
            if not isinstance(error, UsageError | InvalidArgument):
                session.expect(error)
            if recorded.record.start_ts:
                recorded.unknown()
            else:
                recorded.aborted()
            return
        recorded.committed(timestamps.commit)

    async def _scan(self, tx: RecordedTx) -> None:
        await tx.scan(self.cells.table)

    def _writing(self, session: Session, number: int) -> Body:
        """Writes a row of the range, or one outside, or both."""
        rows = [_row(number, session.random.randrange(_ROWS)), _outside(session)]
        rows = rows if session.random.random() < 0.4 else [session.random.choice(rows)]
        blindly, value = session.random.random() < 0.7, session.unique()

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                if not blindly:
                    await tx.get(row, self._value)
                await tx.set(row, self._value, value)

        return body

    # ------------------------------------------------------------------ at rest

    async def _write_all_rows(self, session: Session) -> None:
        """Whatever has waited for a row and was given up must not stand in its line."""
        for number in range(_OUTSIDE):
            row, value = b"outside-%d" % number, session.unique()

            async def body(tx: RecordedTx, row: bytes = row, value: bytes = value) -> None:
                await tx.set(row, self._value, value)

            # The first attempt may wait for locks that a client has left.
            if not (await session.run_again(body) or await session.run_again(body)):
                self._problems.append(f"{row!r} cannot be written")

    async def _progress(self, session: Session) -> None:
        """Loads one range with one loader, then with several; then closes and opens ranges."""
        recorded = session.begin_alone()
        load = self._bulk_load(session, _AT_REST)
        timestamps = await load.begin()
        recorded.began(timestamps.start)
        value = session.unique()
        for place in range(_LOADERS):
            recorded.put((self.cells.name, _row(_AT_REST, place), _COLUMN), value)
        recorded.commit_called()
        recorded.record.commit_called = recorded.record.begin_called

        def load_row(place: int) -> Awaitable[object]:
            cells = [(_row(_AT_REST, place), _COLUMN, value)]
            return self._bulk_load(session, _AT_REST).load(cells, timestamps)

        alone = await self._commits_beside(session, load_row, 1)
        together = await self._commits_beside(session, load_row, _LOADERS)
        if together < alone * _SHARE_MIN:
            self._problems.append(
                f"{together} commits beside {_LOADERS} loaders, {alone} beside one"
            )
        await load.finish(timestamps)
        recorded.committed(timestamps.commit)

        async def close_and_open(place: int) -> None:
            other = self._bulk_load(session, _AT_REST + 1 + place)
            await other.begin()
            await other.abandon()

        await self._commits_beside(session, close_and_open, _LOADERS)

    async def _commits_beside(
        self, session: Session, work: Callable[[int], Awaitable[object]], workers: int
    ) -> int:
        """Has so many repeat the work, each with its number; returns how many transactions, one
        after the other, have committed meanwhile."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + _PROGRESS_SECONDS

        async def repeat(place: int) -> int:
            count = 0
            while loop.time() < ends:
                await work(place)
                count += 1
            return count

        working = [asyncio.ensure_future(repeat(place)) for place in range(workers)]
        commits = 0
        while loop.time() < ends:
            began = loop.time()
            committed = await session.run_again(self._committing(session))
            commits += 1
            seconds = loop.time() - began
            if not committed or seconds > _PATIENCE_SECONDS:
                what = "was committed" if committed else "failed"
                self._problems.append(
                    f"a transaction beside {workers} loaders {what} after {seconds:.2f} s"
                )
        counts = await asyncio.gather(*working)
        if sum(counts) < commits / 4 or min(counts) < max(counts) / 4:
            self._problems.append(f"beside {commits} commits, loaders worked {counts} times")
        return commits

    def _committing(self, session: Session) -> Body:
        """Writes a row on which no lock was left."""
        row, value = b"progress-%d" % session.random.randrange(_OUTSIDE), session.unique()

        async def body(tx: RecordedTx) -> None:
            await tx.set(row, self._value, value)

        return body

    def _bulk_load(self, session: Session, number: int) -> BulkLoad:
        plan = LoadPlan(
            table=self.cells.name,
            name=f"range-{number}",
            start=_row(number, 0),
            end=_row(number + 1, 0),
            notify=False,
        )
        return BulkLoad(session.database, plan)


def _row(number: int, place: int) -> bytes:
    return b"range-%06d-row-%d" % (number, place)


def _outside(session: Session) -> bytes:
    return b"outside-%d" % session.random.randrange(_OUTSIDE)
