"""What the tasks of a write have done: counted by each task, added up and logged for the job."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, fields

from pyspark.sql.datasource import WriterCommitMessage

from percolator.counts import counted

log = logging.getLogger("percolator.spark")


@dataclass
class Written(WriterCommitMessage):
    """What one task has done, or several together."""

    rows: int = 0
    """Rows of the frame that the task has taken."""
    cells: int = 0
    """Cells that it has committed."""
    equal: int = 0
    """Cells that had their values already, and were not written: with `skip_equal`, or
    `notify=changed`."""
    transactions: int = 0
    conflicts: int = 0
    """Attempts at a transaction that were repeated, after a conflict or without an answer."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{counted(self.cells, 'cell')} in {counted(self.transactions, 'transaction')}, of "
            f"{counted(self.rows, 'row')}; "
            f"{self.equal} cells were unchanged, {self.conflicts} attempts were repeated, "
            f"{self.seconds:.1f} s"
        )


def total(messages: list[WriterCommitMessage | None]) -> Written:
    """The sum over all tasks that have reported."""
    found = Written()
    for message in messages:
        if isinstance(message, Written):
            for field in fields(Written):
                value = getattr(found, field.name) + getattr(message, field.name)
                setattr(found, field.name, value)
    return found


def show_log() -> None:
    """Sets up logging in Spark's Python processes, which have none: the counters would be lost."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
