"""What travels between the processes that take part in a shared transaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from percolator.protocol.shared.announcing import Observed
from percolator.protocol.shared.names import Job, PartKey


@dataclass(frozen=True)
class Ticket:
    """What a process needs to take part in a shared transaction. It can be pickled."""

    table_id: int
    row: bytes
    unchanged_since: int
    ttl_seconds: float
    began: int
    """A timestamp from before the first part began."""

    @property
    def job(self) -> Job:
        """The transaction, as the protocol knows it."""
        return Job(self.table_id, self.row, self.unchanged_since, self.ttl_seconds, self.began)


@dataclass(frozen=True)
class Receipt:
    """What an attempt at a task has locked. It can be pickled: bring it to the driver."""

    row: bytes
    task: str
    parts: tuple[PartKey, ...]
    cells: int
    announced: Mapping[int, Observed] = field(default_factory=dict)
    """By table, the observers to which every cell was announced; empty where commits notify."""
    tables: tuple[int, ...] = ()
    """The tables in which it has locked cells."""

    def __setstate__(self, state: dict[str, object]) -> None:
        """Unpickles it. One of an earlier release lacks what was added since."""
        self.__dict__.update({"announced": {}, "tables": (), **state})
