"""What a snapshot shows of a watched cell: its newest change, and which changes were handled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from percolator.observers.context import RunTransaction, WorkerContext
from percolator.observers.running.acknowledgement import NOTHING_SEEN, Acknowledgement
from percolator.observers.work import Work
from percolator.protocol.known_row import KnownRow
from percolator.protocol.read import read_rows
from percolator.routing.cells import FoundCell, RowRequest
from percolator.v1.tabletserver_pb2 import RowRead


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
        """Whether the cell exists: it was written, and not deleted since."""
        return self.newest is not None and self.newest.value is not None

    @property
    def is_handled(self) -> bool:
        if self.newest is None and self.acknowledged.has_dead_letter:
            return False  # a deletion was put aside, and has since been collected
        return self.commit <= self.acknowledged.start

    def known_row(self, work: Work) -> KnownRow:
        """What a run's transaction need not read again."""
        cells = {**self.others, work.column: self.newest}
        return KnownRow(work.watched.table_id, work.row, cells)


async def look(
    context: WorkerContext, work: Work, transaction: RunTransaction, start: int
) -> WatchedCell:
    """Reads the cell and its acknowledgement in one request, and what the last run has read of such
    a row. Deletions count as changes."""
    others = work.watched.columns_read
    hidden = work.watched.acknowledgement(work.row, work.column).column
    read = RowRead(
        row=work.row,
        columns=list(dict.fromkeys((hidden, work.column, *others))),
        timestamp=start,
        report_deletes=True,
    )
    (answer,) = await read_rows(
        context.env,
        context.cleanup,
        [RowRequest(work.watched.table_id, read)],
        context.deadline(),
        transaction.statistics,
    )
    stored = answer.found.get(hidden)
    acknowledged = (
        NOTHING_SEEN
        if stored is None or stored.value is None
        else Acknowledgement.decode(stored.value)
    )
    return WatchedCell(
        answer.found.get(work.column),
        acknowledged,
        {column: answer.found.get(column) for column in others},
    )
