"""Observers that are registered when their cells are there already, or before their table is.

    first    by the workers, before clients write
    amid     by a client, or by the workers, while clients write and servers and workers die
    last     when the trouble is over, just before it is waited for observers
    arrived  before its table exists: it wants nothing older than itself, and must miss nothing

Nothing is deleted: a cell that is gone when its observer is registered needs no run.
"""

from __future__ import annotations

from collections.abc import Iterable

from percolator import Column, observes
from percolator.aio import Transaction
from percolator.aio.observing import worker_context
from percolator.errors import NotExecuted, PercolatorError
from percolator.observers.definition import Observer
from percolator.observers.registry.registration import register
from percolator.observers.running.dead_letter import DEAD_LETTERS
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload, preferred

_ROWS = [b"row-%02d" % number for number in range(60)]
_LOADED_AT_ONCE = 15
_OF_CLIENTS = (_ROWS[:20], _ROWS[20:40], _ROWS[40:], _ROWS)
"""The rows to which each client writes. One that writes to all tablets soon learns of a new
observer. The others write to the only tablet that they use as long as it has not heard of it."""
_FRESH_SHARE = 0.5
"""The share of writes into rows that were empty: no backfill from before such a write knows their
cells. It notifies of all others, and an observer reads what is newest."""
_CREATED_SHARE = 0.3
_CALL_SECONDS = 3.0
_STEPS_BEFORE = 40
_AGAIN_SECONDS = 0.2
_LATER = "created-late"


class Newcomers(Workload):
    """The newest value of each cell is copied, whenever it was written."""

    registers_late = True
    leaves_behind = True

    def __init__(self, *, creates: bool = False) -> None:
        """`creates`: clients create a table in the midst of the trouble."""
        self.cells = Cells("newcomers", (_ROWS[20], _ROWS[40]))
        self._later = Cells(_LATER)
        self._text = self.cells.column("text")
        self._other = self.cells.column("other")
        self._creates = creates
        self.created_late = {_LATER} if creates else ()
        self._is_created = False
        self._is_over = False
        self._steps = 0
        self._first = self._copying("first", self._text)
        self._amid = self._copying("amid", self._text)
        self._last = self._copying("last", self._text, self._other)
        self._arrived = self._copying("arrived", self._later.column("text"), backfill=False)

    @property
    def tables(self) -> tuple[Cells, ...]:
        later = (self._later,) if self._creates else ()
        return (self.cells, *later, Cells(DEAD_LETTERS.name))

    @property
    def observers(self) -> list[Observer]:
        return [self._first, self._amid, self._last] + [self._arrived] * self._creates

    def observers_of(self, worker: str) -> list[Observer]:
        """One worker waits for the table that does not exist yet, and the other one does not."""
        waits = self._creates and worker.startswith("worker-1")
        is_amid = self._steps >= _STEPS_BEFORE
        later = [self._amid] * is_amid + [self._last] * self._is_over
        return [self._first, *later] + [self._arrived] * waits

    def _copying(self, name: str, *columns: Column[bytes], backfill: bool = True) -> Observer:
        @observes(*columns, name=name, backfill=backfill)
        async def copy(tx: Transaction, row: bytes, column: Column[bytes]) -> None:
            copied = column.table.column(f"{column.name.decode()} by {name}", column.codec)
            value = await tx.get(row, column)
            if value is not None:
                await tx.set(row, copied, value)

        return copy

    async def load(self, session: Session) -> None:
        for at in range(0, len(_ROWS), _LOADED_AT_ONCE):
            rows = _ROWS[at : at + _LOADED_AT_ONCE]

            async def body(tx: RecordedTx, rows: list[bytes] = rows) -> None:
                for row in rows:
                    await tx.set(row, self._text, session.unique())
                    await tx.set(row, self._other, session.unique())

            await session.run(body)

    async def step(self, session: Session) -> None:
        self._steps += 1
        if self._steps == _STEPS_BEFORE:
            await self._register(session)
        elif self._creates and session.random.random() < _CREATED_SHARE:
            if self._is_created:
                await self._write(session, self._later.column("text"))
            else:
                await self._create(session)
        else:
            await self._write(session, session.random.choice((self._text, self._other)))

    async def _write(self, session: Session, column: Column[bytes]) -> None:
        chosen = preferred(session, _OF_CLIENTS)
        rows = session.random.sample(chosen, session.random.choice((1, 1, 2)))
        if session.random.random() < _FRESH_SHARE:
            rows = [b"%s %d" % (row, self._steps) for row in rows]

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                await tx.set(row, column, session.unique())

        await session.run(body)

    async def _register(self, session: Session) -> None:
        """While this waits for the tablets, workers start that find the observer registered."""
        session.skip()
        try:
            await register(worker_context(session.database.internal.engine), [self._amid])
        except PercolatorError as error:
            session.expect(error)

    async def _create(self, session: Session) -> None:
        """Only once a worker waits for it: otherwise the observer may be younger than cells."""
        session.skip()
        catalog = session.database.internal.engine.catalog
        deadline = session.database.internal.engine.now() + _CALL_SECONDS
        try:
            if await catalog.awaited(deadline):
                await session.database.create_table(
                    self._later.table, exist_ok=True, timeout=_CALL_SECONDS
                )
                self._is_created = True
        except PercolatorError:
            return  # it may be created all the same: the next attempt finds it

    async def rest(self, session: Session) -> None:
        """Registers the last observer, which no worker knew until now."""
        context = worker_context(session.database.internal.engine)
        while not self._is_over:
            try:
                if self._creates:
                    await session.database.create_table(self._later.table, exist_ok=True)
                    self._is_created = True
                await register(context, [self._last])
                self._is_over = True
            except NotExecuted:  # masters take a while to find that the store answers again
                await context.world.clock.sleep(_AGAIN_SECONDS)

    def check(self, ending: Ending) -> Iterable[str]:
        copies = [(self._text, name) for name in ("first", "last")] + [(self._other, "last")]
        if self._steps >= _STEPS_BEFORE:
            copies.append((self._text, "amid"))
        tables = [(self.cells, copies)]
        if self._is_created:
            tables.append((self._later, [(self._later.column("text"), "arrived")]))
        for cells, copied in tables:
            for row, found in ending.tables[cells.name].items():
                for column, observer in copied:
                    value = found.get(column.name)
                    copy = found.get(column.name + b" by " + observer.encode())
                    if value != copy:
                        yield f"{row!r} of {cells.name} holds {value!r}, {observer} copied {copy!r}"
