"""What clients and workers say of themselves: for `observers stats`, `top` and `status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from percolator.v1.lockservice_pb2 import ContendedCell, Session

_COUNTS = ("runs", "commits", "conflicts", "postponed", "failures", "dead_letters")


class LostCell(NamedTuple):
    """A cell where transactions have lost."""

    table_id: int
    row: bytes
    column: bytes


@dataclass
class ObserverFigures:
    """What one observer has done, in all processes that run it."""

    workers: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    backlog: int = 0
    latency_milliseconds: int = 0
    """The sum over all commits."""
    cells: Counter[LostCell] = field(default_factory=Counter)

    def latency_seconds(self, since: ObserverFigures | None = None) -> float | None:
        """The mean time from a change to the commit of its run; None without commits."""
        commits, sum_milliseconds = self.counts["commits"], self.latency_milliseconds
        if since is not None:
            commits -= since.counts["commits"]
            sum_milliseconds -= since.latency_milliseconds
        return sum_milliseconds / commits / 1000 if commits > 0 else None


@dataclass
class ClientFigures:
    """What the transactions of one process have done."""

    who: str
    commits: int
    conflicts: int


@dataclass
class Activities:
    """What all processes of the cluster have done since each of them connected."""

    observers: dict[tuple[str, str], ObserverFigures] = field(default_factory=dict)
    """By table and observer."""
    clients: dict[bytes, ClientFigures] = field(default_factory=dict)
    """By session."""
    cells: Counter[LostCell] = field(default_factory=Counter)
    """Where all their transactions have lost, those of observers among them."""

    @classmethod
    def of(cls, sessions: Iterable[Session]) -> Activities:
        found = cls()
        for session in sessions:
            if not session.info.HasField("activity"):
                continue
            activity = session.info.activity
            found.clients[session.session_id] = ClientFigures(
                session.info.description, activity.commits, activity.conflicts
            )
            found.cells.update(_by_cell(activity.cells))
            for one in activity.observers:
                figures = found.observers.setdefault((one.table, one.observer), ObserverFigures())
                figures.workers += 1
                figures.counts.update({name: getattr(one, name) for name in _COUNTS})
                figures.backlog += one.backlog
                figures.latency_milliseconds += one.latency_milliseconds
                figures.cells.update(_by_cell(one.cells))
        return found


def workers_of(sessions: Iterable[Session]) -> list[Session]:
    """The sessions of processes that run observers at this moment."""
    return [one for one in sessions if one.info.activity.observers]


def _by_cell(cells: Sequence[ContendedCell]) -> dict[LostCell, int]:
    return {LostCell(one.table_id, one.row, one.column): one.conflicts for one in cells}
