"""What a workload is: tables, one transaction at a time, and what must hold at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from percolator.observers.definition import Observer
from percolator.testing.history import History, TransactionRecord
from tests.simulation.sessions import Body, Cells, RecordedTx, Session

Rows = dict[bytes, dict[bytes, bytes]]
"""By row and column."""


@dataclass(frozen=True)
class Ending:
    """A run that has come to rest."""

    tables: dict[str, Rows]
    """What a last transaction scanned."""
    history: History
    """With every unknown outcome settled."""

    def committed(self) -> Iterable[TransactionRecord]:
        return (record for record in self.history if record.committed)


class Workload(ABC):
    """One kind of use. An object of it belongs to one run, and is shared by its sessions."""

    cells: Cells
    """Its table; every row of it below a split lies in another tablet than those above."""

    @property
    def tables(self) -> tuple[Cells, ...]:
        return (self.cells,)

    @property
    def observers(self) -> list[Observer]:
        """Run by workers, if there are any."""
        return []

    async def load(self, session: Session) -> None:  # noqa: B027
        """Before anything is broken. By default the store begins empty."""

    leaves_behind = False
    """Whether its clients may leave something behind that `rest` has to end."""

    async def rest(self, session: Session) -> None:  # noqa: B027
        """When the trouble is over, and all clients have ended."""

    @abstractmethod
    async def step(self, session: Session) -> None:
        """One transaction."""

    def check(self, ending: Ending) -> Iterable[str]:
        """What is wrong at the end, beyond what checker and audit find."""
        return ()


def loading(values: dict[bytes, bytes], cells: Cells) -> Body:
    """A transaction that writes these rows."""

    async def body(tx: RecordedTx) -> None:
        for row, value in values.items():
            await tx.set(row, cells.column(), value)

    return body


MakeWorkload = Callable[[], Workload]
