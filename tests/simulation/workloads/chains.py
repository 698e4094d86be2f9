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
from percolator.observers.definition import Observer
from percolator.observers.running.dead_letter import DEAD_LETTERS
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload

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
