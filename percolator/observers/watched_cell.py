"""A watched cell as a snapshot shows it, and the acknowledgement of its changes.

The acknowledgement says which changes of a cell an observer has handled. It is a hidden cell next
to it, written by the observer's runs:

    start_ts 8 | 01, if a change of the cell was put aside as a dead letter

A run whose snapshot is s has handled every change committed at or below s. It says so in the same
transaction as its own writes, so at most one committed run handles a change: two runs for one
change both write this cell, and one of them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from percolator.errors import InvariantViolation
from percolator.formats.records import ACKNOWLEDGED_BYTES, PUT_ASIDE
from percolator.observers.context import RunTransaction, WorkerContext
from percolator.observers.work_queue import Work
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.environment import Environment, Statistics
from percolator.protocol.read import read_rows
from percolator.routing.cells import FoundCell, RowRequest
from percolator.v1.tabletserver_pb2 import RowRead


class Acknowledgement(NamedTuple):
    """Says that all changes up to a start timestamp have been handled."""

    start: int = 0
    has_dead_letter: bool = False
    """A dead letter exists for the cell. The run that handles the next change has to delete it."""

    def encode(self) -> bytes:
        stored = self.start.to_bytes(ACKNOWLEDGED_BYTES, "big")
        return stored + PUT_ASIDE if self.has_dead_letter else stored

    @classmethod
    def decode(cls, stored: bytes) -> Acknowledgement:
        rest = stored[ACKNOWLEDGED_BYTES:]
        if len(stored) < ACKNOWLEDGED_BYTES or rest not in (b"", PUT_ASIDE):
            raise InvariantViolation(f"{len(stored)} bytes are not an acknowledgement")
        return cls(int.from_bytes(stored[:ACKNOWLEDGED_BYTES], "big"), bool(rest))


NOTHING_SEEN = Acknowledgement()


class WatchedCell(NamedTuple):
    """A watched cell at one timestamp."""

    newest: FoundCell | None
    """The newest version. None if the cell was never written, or its versions were collected."""
    acknowledged: Acknowledgement
    others: Mapping[bytes, FoundCell | None] = {}
    """Cells of the same row that the last run has read, as the same snapshot shows them."""

    @property
    def commit(self) -> int:
        """The commit timestamp of the newest put or delete; 0 if there is none."""
        return 0 if self.newest is None else self.newest.commit_timestamp

    @property
    def has_value(self) -> bool:
        """The cell exists: it was written, and not deleted since."""
        return self.newest is not None and self.newest.value is not None

    @property
    def is_handled(self) -> bool:
        if self.newest is None and self.acknowledged.has_dead_letter:
            return False  # a deletion was put aside, and has since been collected
        return self.commit <= self.acknowledged.start

    def known(self, work: Work) -> Mapping[bytes, FoundCell | None]:
        """The cells of the row that a run's transaction need not read again."""
        return {**self.others, work.column: self.newest}


async def look(
    context: WorkerContext, works: Sequence[Work], transaction: RunTransaction, start: int
) -> list[WatchedCell]:
    """Reads the cell and the acknowledgement of each, and what the last run has read of such a row,
    in one request. Deletions count as changes. All works are of one observer and column."""
    watched, column = works[0].watched, works[0].column
    others = watched.columns_read
    hidden = watched.acknowledgement(works[0].row, column).column
    columns = list(dict.fromkeys((hidden, column, *others)))
    answers = await read_rows(
        context.env,
        context.cleanup,
        [
            RowRequest(
                watched.table_id,
                RowRead(row=work.row, columns=columns, timestamp=start, report_deletes=True),
            )
            for work in works
        ],
        context.env.deadline(),
        transaction.statistics,
    )
    cells = []
    for answer in answers:
        stored = answer.found.get(hidden)
        acknowledged = (
            NOTHING_SEEN
            if stored is None or stored.value is None
            else Acknowledgement.decode(stored.value)
        )
        read = {one: answer.found.get(one) for one in others}
        cells.append(WatchedCell(answer.found.get(column), acknowledged, read))
    return cells


# What an observer has seen before: the cell at the start of its last run that committed.
#
# The paper's acknowledgement is just this timestamp. What each rule prevents:
#
# * It is the start of the run, not its commit: what was committed in between was not seen, and is
#   announced to the next run. Read at the commit, it would never be undone.
# * It is not the version below the newest one: one run handles all changes since the last, so that
#   is a version that no run has seen, while what the last one saw would never be undone.
# * A run that failed or conflicted has acknowledged nothing, and does not count. A change that was
#   put aside does not either: its acknowledgement keeps the start that it had.
# * The version stays until the observer has run again, below whatever safe point (collection.py of
#   tablets and of row stores). They judge by the acknowledgement alone, not by notifications: that
#   is also right for an observer that was removed and is registered again. It holds at most one
#   version of a cell.
# * A read below the safe point says by which acknowledgement, and is refused unless that is still
#   the newest one. Otherwise the version may be gone, and "none" would be taken for an answer. Such
#   a run could not commit either.
# * A deletion takes the acknowledgement along once no observer waits for it: all have seen that
#   there is nothing. `delete_row` deletes cells, and never an acknowledgement. With deletes=False,
#   an observer waits for no deletion, and cannot ask.
# * A value that has expired since is not kept: it was to be gone by then. So what is derived from
#   it should expire as well.
# * A cell that is only there because of a backfill, or of an import, was never seen: None.


async def look_back(
    env: Environment,
    cleanup: Cleanup,
    last_runs: Mapping[Work, int],
    deadline: float,
    statistics: Statistics,
) -> dict[Work, bytes | None]:
    """The values that these cells had when their observer's last run for each began, in one
    request."""
    seen: dict[Work, bytes | None] = dict.fromkeys(last_runs)
    asked = [work for work, start in last_runs.items() if start]
    answers = await read_rows(
        env,
        cleanup,
        [
            RowRequest(
                work.watched.table_id,
                RowRead(
                    row=work.row,
                    columns=(work.column,),
                    timestamp=last_runs[work],
                    acknowledgement=work.watched.acknowledgement(work.row, work.column).column,
                ),
            )
            for work in asked
        ],
        deadline,
        statistics,
    )
    for work, answer in zip(asked, answers, strict=True):
        found = answer.found.get(work.column)
        seen[work] = None if found is None else found.value
    return seen
