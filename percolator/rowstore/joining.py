"""Steps that one call makes together: those of one transaction on one row.

Each of them is answered for itself. If the check of the call does not pass, each is judged on a
reading of the row, those that are possible go into another call, and the others are refused. So
joining changes how many calls are made, and nothing else:

* Steps that expect nothing: nothing of what any of them must not find may be found.
* Steps that expect a lock: there must be as many cells as locks are expected. A store has at most
  one version of a cell at one time, so each of them is one cell.
* The same cell never twice: the second step must see what the first has done.
* Only steps of one transaction: those of two may exclude each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from percolator.rowstore.mapping import Step


@dataclass
class Joined:
    """The steps of one call, by their places in the request."""

    table_id: int
    row: bytes
    start: int
    """The start timestamp of the transaction."""
    steps: dict[int, Step] = field(default_factory=dict)
    columns: set[bytes] = field(default_factory=set)
    _size_bytes: int = 0
    """Of the checks; added up only if a second step joins: most calls make one."""

    def add(self, place: int, step: Step) -> None:
        self.steps[place] = step
        self.columns.add(step.asked.column)

    def has_room(self, step: Step, check_bytes_max: int) -> bool:
        """Whether the step may join. Then it has to be added."""
        if step.asked.column in self.columns:
            return False
        if not self._size_bytes:
            self._size_bytes = sum(one.size_bytes for one in self.steps.values())
        self._size_bytes += step.size_bytes
        return self._size_bytes <= check_bytes_max


def joined(steps: Iterable[tuple[int, int, Step]], check_bytes_max: int) -> Iterator[Joined]:
    """Groups steps, given as place, table and step, into calls. If a transaction's calls on a row
    are made one after the other, the order of its steps on a cell stays."""
    open_: dict[tuple[int, bytes, int, bool], Joined] = {}
    for place, table_id, step in steps:
        row = step.asked.row
        key = (table_id, row, step.start, step.expects_lock)
        group = open_.get(key)
        if group is not None and not group.has_room(step, check_bytes_max):
            yield open_.pop(key)
            group = None
        if group is None:
            group = open_[key] = Joined(table_id, row, step.start)
        group.add(place, step)
    yield from open_.values()
