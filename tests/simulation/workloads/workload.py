"""A workload: its tables, one transaction at a time, and what must hold at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from percolator.aio import Database
from percolator.observers.definition import Observer
from tests.isolation.history import History, TransactionRecord
from tests.simulation.sessions import Body, Cells, RecordedTx, Session

T = TypeVar("T")

Rows = dict[bytes, dict[bytes, bytes]]
"""Values by row and column."""


@dataclass(frozen=True)
class Ending:
    """A run that has come to rest."""

    tables: dict[str, Rows]
    """Rows that the last transaction scanned, by table."""
    history: History
    """The history, with every unknown outcome settled."""

    def committed(self) -> Iterable[TransactionRecord]:
        return (record for record in self.history if record.committed)


class Workload(ABC):
    """One pattern of use. An instance belongs to one run, whose sessions share it."""

    cells: Cells
    """Its table; rows below and above a split are in different tablets."""

    @property
    def tables(self) -> tuple[Cells, ...]:
        return (self.cells,)

    @property
    def observers(self) -> list[Observer]:
        """The observers that workers run, if any."""
        return []

    async def create(self, database: Database) -> None:  # noqa: B027
        """Creates tables of its own, before those of `tables`. Only with the real master."""

    async def load(self, session: Session) -> None:  # noqa: B027
        """Loads rows before anything is broken. By default the store starts empty."""

    def observers_of(self, worker: str) -> list[Observer]:
        """The observers that this worker runs now."""
        return self.observers

    registers_late = False
    """True if workers register the observers, in the midst of the trouble, on tables with rows."""

    created_late: Collection[str] = ()
    """Tables that clients create in the midst of the trouble. Only with the real master."""

    locks = False
    """True if it leaves lock-only records, which are collected by another rule than history."""

    change_feed = False
    """True if its tables have a change feed; under the real master, it is switched on later."""

    ttls: Mapping[bytes, int] = MappingProxyType({})
    """Milliseconds after which values expire, by column of any of its tables."""

    leaves_behind = False
    """True if its clients may leave something behind that `rest` has to end."""

    async def rest(self, session: Session) -> None:  # noqa: B027
        """Called when the trouble is over, and all clients have ended."""

    @abstractmethod
    async def step(self, session: Session) -> None:
        """Runs one transaction."""

    def check(self, ending: Ending) -> Iterable[str]:
        """Violations at the end that the checker and the audit do not find."""
        return ()


def preferred(session: Session, choices: Sequence[T]) -> T:
    """The one of these that the session's client prefers, and others do not."""
    return choices[sum(session.client.encode()) % len(choices)]


def loading(values: dict[bytes, bytes], cells: Cells) -> Body:
    """A transaction that writes these rows."""

    async def body(tx: RecordedTx) -> None:
        for row, value in values.items():
            await tx.set(row, cells.column(), value)

    return body


MakeWorkload = Callable[[], Workload]
