"""The read of a single cell, the most frequent kind of read.

A request about one row with one answer needs no lists of rows and answers, and no message object
before it is written into its call. Those would be a third of what a read costs the client.
"""

from __future__ import annotations

import asyncio
from copy import copy
from typing import Any

from percolator.errors import PercolatorError
from percolator.routing.cells import FoundCell, RowResult
from percolator.routing.pending_row import NOWHERE, late

CellAnswer = FoundCell | RowResult | None
"""The cell, or None if there is none; a `RowResult` if a lock is in the way."""

_OTHER_BYTES = 24
"""The size of a request besides row and column."""


class PendingCell:
    """One cell to read: both a request (`PendingRequest`) and its only row (`PendingRow`)."""

    __slots__ = (
        "alone",
        "attempts",
        "column",
        "deadline",
        "future",
        "last_problem",
        "location",
        "row",
        "sent",
        "size_bytes",
        "table_id",
        "timestamp",
    )

    index = 0
    rows = 1
    is_read = True
    message: Any = None
    schema_version = 0

    def __init__(
        self,
        future: asyncio.Future[CellAnswer],
        table_id: int,
        row: bytes,
        column: bytes,
        timestamp: int,
        deadline: float,
    ) -> None:
        self.future = future
        self.table_id = table_id
        self.row = row
        self.column = column
        self.timestamp = timestamp
        self.deadline = deadline
        self.size_bytes = len(row) + len(column) + _OTHER_BYTES
        self.location = NOWHERE
        self.attempts = 0
        self.sent = False
        self.alone = False
        self.last_problem: PercolatorError | None = None

    @property
    def pending(self) -> PendingCell:
        """This object; as an attribute, it would be a reference cycle."""
        return self

    def is_answered(self, index: int) -> bool:
        return self.future.done()

    def answer(self, index: int, answer: Any) -> None:  # noqa: ANN401 - for any kind of row
        if not self.future.done():
            self.future.set_result(answer)

    def fail(self, index: int, error: PercolatorError) -> None:
        if not self.future.done():
            self.future.set_exception(copy(error))

    def expire(self) -> None:
        """Fails the read, because its deadline has passed."""
        self.fail(0, late(self.last_problem, is_safe=True))
