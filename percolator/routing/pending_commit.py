"""A whole transaction that one message commits, on its way to its tablet and back.

Unlike a row, it is never sent again here once it was answered: whether a copy may still arrive is
part of the protocol (percolator/protocol/commit.py). What cannot be committed in this way still
can be in two phases. If a message is refused because of one transaction, the others in it are not
answered.
"""

from __future__ import annotations

import asyncio
from typing import Any

from percolator.errors import PercolatorError
from percolator.routing.cells import CommitAnswer, NotSent, WholeCommit
from percolator.routing.pending_row import NOWHERE, late

_OTHER_BYTES = 24
"""The size of a cell in a request besides row, column and value."""


class PendingCommit:
    """One transaction in the queue of a server: both a request and its only row, as for a cell."""

    __slots__ = (
        "alone",
        "attempts",
        "commit",
        "deadline",
        "future",
        "last_problem",
        "location",
        "row",
        "rows",
        "schema_version",
        "sent",
        "size_bytes",
        "table_id",
    )

    index = 0
    is_read = False
    message: Any = None

    def __init__(
        self, future: asyncio.Future[CommitAnswer], commit: WholeCommit, deadline: float
    ) -> None:
        self.future = future
        self.commit = commit
        self.table_id = commit.table_id
        rows, weak = commit.rows, commit.notifications
        self.row = rows[0]
        self.rows = len(rows) + len(weak)
        """As how many rows it counts in a call: one for each cell."""
        self.schema_version = commit.schema_version
        self.deadline = deadline
        if self.rows == 1:  # most transactions: without loops
            self.size_bytes = (
                _OTHER_BYTES + len(self.row) + len(commit.columns[0]) + len(commit.values[0])
            )
        else:
            self.size_bytes = _size_bytes(commit) + _OTHER_BYTES * self.rows
        self.location = NOWHERE
        self.attempts = 0
        self.sent = False
        self.alone = False
        self.last_problem: PercolatorError | None = None

    @property
    def pending(self) -> PendingCommit:
        """This object; as an attribute, it would be a reference cycle."""
        return self

    def is_answered(self, index: int) -> bool:
        return self.future.done()

    def answer(self, index: int, answer: Any) -> None:  # noqa: ANN401 - as for any kind of row
        if not self.future.done():
            self.future.set_result(answer)

    def fail(self, index: int, error: PercolatorError) -> None:
        self.answer(index, error)

    def expire(self) -> None:
        """Answers, because its deadline has passed."""
        problem = late(self.last_problem, is_safe=False)
        self.answer(0, problem if self.sent else NotSent(problem.message))


def _size_bytes(commit: WholeCommit) -> int:
    size_bytes = 0
    for texts in (commit.rows, commit.columns, commit.values):
        for text in texts:
            size_bytes += len(text)
    for row, column, observers in commit.notifications:
        size_bytes += len(row) + len(column) + sum(map(len, observers))
    return size_bytes
