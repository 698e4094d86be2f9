"""Watched columns, chained: a change is copied, the copy counted, and each run counts once.

    source ── copy ──> copy ── count ──> a counter per row, and one that all rows share
       └───── note (writes nothing else; deletes do not wake it)
    poke  ── poked (weak)

A run that committed twice, or never, shows in the counters; one that read too early, in the copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from percolator import Column, observes
from percolator.aio import Transaction
from percolator.aio.observing import worker_context
from percolator.errors import NotExecuted, PercolatorError
from percolator.observers.dead_letters import DEAD_LETTERS
from percolator.observers.definition import Observer
from percolator.observers.registration import register
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload, preferred

_ROWS = [b"row-%02d" % number for number in range(9)]
_SHARED = b"shared"
_PAUSE_SECONDS = 0.05
_FAILS_EVERY = 13
_ATTEMPTS = 1_000
"""So many that an observer that fails now and then never leaves a dead letter."""


class Chains(Workload):
    """Every change leads to exactly one run."""

    def __init__(self) -> None:
        self.cells = Cells("chains", (_ROWS[3], _ROWS[6]))
        self._source = self.cells.column("source")
        self._copy = self.cells.column("copy")
        self._count = self.cells.column("count")
        self._poke = self.cells.column("poke")
        self._poked = self.cells.column("poked")
        self._observers = self._define()

    @property
    def tables(self) -> tuple[Cells, ...]:
        return (self.cells, Cells(DEAD_LETTERS.name))

    @property
    def observers(self) -> list[Observer]:
        return self._observers

    def _define(self) -> list[Observer]:
        @observes(self._source, name="copy", pause=_PAUSE_SECONDS, attempts=_ATTEMPTS)
        async def copy(tx: Transaction, row: bytes) -> None:
            value = await tx.get(row, self._source)
            if value is None:
                await tx.delete(row, self._copy)
            else:
                await tx.set(row, self._copy, value)

        @observes(self._copy, name="count", attempts=_ATTEMPTS)
        async def count(tx: Transaction, row: bytes) -> None:
            if await tx.timestamp() % _FAILS_EVERY == 0:
                raise ValueError("now and then")
            for counter in (row, _SHARED):
                before = await tx.get(counter, self._count, default=b"0")
                await tx.set(counter, self._count, b"%d" % (int(before) + 1))

        @observes(self._source, self._copy, name="note", deletes=False, attempts=_ATTEMPTS)
        async def note(tx: Transaction, row: bytes, column: Column[bytes]) -> None:
            await tx.get(row, column)

        @observes(self._poke, name="poked", weak=True, attempts=_ATTEMPTS)
        async def poked(tx: Transaction, row: bytes) -> None:
            value = await tx.get(row, self._source)
            if value is not None:
                await tx.set(row, self._poked, value)

        return [copy, count, note, poked]

    async def step(self, session: Session) -> None:
        rows = session.random.sample(_ROWS, session.random.choice((1, 1, 1, 2)))
        chance = session.random.random()

        async def body(tx: RecordedTx) -> None:
            for row in rows:
                if chance < 0.1:
                    await tx.delete(row, self._source)
                else:
                    await tx.set(row, self._source, session.unique())
                if chance > 0.8:
                    await tx.notify(row, self._poke)

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        rows = ending.tables[self.cells.name]
        for row in _ROWS:
            cells = rows.get(row, {})
            if cells.get(b"source") != cells.get(b"copy"):
                yield f"{row!r} holds {cells.get(b'source')!r}, and its copy {cells.get(b'copy')!r}"
        runs = [record for record in ending.committed() if record.observer == "count"]
        found = int(rows.get(_SHARED, {}).get(b"count", b"0"))
        if found != len(runs):
            yield f"{found} runs are counted, of {len(runs)} that committed"


# Observers that are registered when their cells are there already, or before their table is.
#
#     first    by the workers, before clients write
#     amid     by a client, or by the workers, while clients write and servers and workers die
#     last     when the trouble is over, just before it is waited for observers
#     arrived  before its table exists: it wants nothing older than itself, and must miss nothing
#
# Nothing is deleted: a cell that is gone when its observer is registered needs no run.

_NEWCOMERS_ROWS = [b"row-%02d" % number for number in range(60)]
_LOADED_AT_ONCE = 15
_OF_CLIENTS = (_NEWCOMERS_ROWS[:20], _NEWCOMERS_ROWS[20:40], _NEWCOMERS_ROWS[40:], _NEWCOMERS_ROWS)
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
        self.cells = Cells("newcomers", (_NEWCOMERS_ROWS[20], _NEWCOMERS_ROWS[40]))
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
        for at in range(0, len(_NEWCOMERS_ROWS), _LOADED_AT_ONCE):
            rows = _NEWCOMERS_ROWS[at : at + _LOADED_AT_ONCE]

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
