"""The read of a single cell: what most reads are.

A question about one row with one answer needs no list of rows and of answers, and no message of its
own before it is written into its request: that is a third of what a read costs the client.
"""

from __future__ import annotations

import asyncio
from copy import copy
from typing import Any

from percolator.errors import PercolatorError
from percolator.wire.asked import NOWHERE, late
from percolator.wire.questions import FoundCell, RowAnswer

CellAnswer = FoundCell | RowAnswer | None
"""The cell, or None if there is none; a `RowAnswer` if a lock is in the way."""

_OTHER_BYTES = 24
"""Of a request, besides row and column."""


class CellRead:
    """One cell to read: both a question (`Asked`) and its only row (`Entry`)."""

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
    def asked(self) -> CellRead:
        """Itself; an attribute would be a ring."""
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
        """The deadline has come."""
        self.fail(0, late(self.last_problem, is_safe=True))
