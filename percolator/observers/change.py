"""What a snapshot shows of a watched cell: its newest change, and which changes were answered."""

from __future__ import annotations

from typing import NamedTuple

from percolator.observers.acknowledgement import NOTHING_SEEN, Acknowledgement
from percolator.observers.client import Client, RunTransaction
from percolator.observers.work import Work
from percolator.protocol.read import read_rows
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.wire.questions import FoundCell, RowQuestion


class Change(NamedTuple):
    """A watched cell at one timestamp."""

    cell: FoundCell | None
    """None when it was never written, as far as anybody still knows."""
    acknowledged: Acknowledgement

    @property
    def commit(self) -> int:
        """Of the newest put or delete; 0 when there is none."""
        return 0 if self.cell is None else self.cell.commit_timestamp

    @property
    def is_answered(self) -> bool:
        if self.cell is None and self.acknowledged.has_dead_letter:
            return False  # a deletion was put aside, and has been collected since
        return self.commit <= self.acknowledged.start


async def look(client: Client, work: Work, transaction: RunTransaction, start: int) -> Change:
    """In one read. Deletions count: they are changes as well."""
    hidden = work.watched.acknowledgement(work.row, work.column).column
    read = RowRead(
        row=work.row, columns=(hidden, work.column), timestamp=start, report_deletes=True
    )
    (answer,) = await read_rows(
        client.around,
        client.cleanup,
        [RowQuestion(work.watched.table_id, read)],
        start,
        client.deadline(),
        transaction.statistics,
    )
    stored = answer.found.get(hidden)
    acknowledged = (
        NOTHING_SEEN
        if stored is None or stored.value is None
        else Acknowledgement.decode(stored.value)
    )
    return Change(answer.found.get(work.column), acknowledged)
