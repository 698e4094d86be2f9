"""What a caller waits for: one future for all the rows of its request."""

from __future__ import annotations

import asyncio
from copy import copy
from typing import Any

from percolator.errors import DeadlineExceeded, PercolatorError, Retry, TabletLocation
from percolator.routing.cells import ReadSize
from percolator.routing.common_step import CommonStep
from percolator.v1.tabletserver_pb2 import Mutation, RowRead

NOWHERE = TabletLocation(table_id=0, tablet_id=0, epoch=0, start=b"", end=b"", address="")
"""The location of a row before it was looked up."""


class PendingRow:
    """One mutation or one row to read, on its way to a tablet server and back."""

    __slots__ = (
        "alone",
        "attempts",
        "index",
        "location",
        "message",
        "pending",
        "row",
        "schema_version",
        "sent",
        "size_bytes",
        "table_id",
    )

    rows = 1
    """As how many rows it counts in a call."""

    def __init__(
        self,
        pending: PendingRequest,
        index: int,
        table_id: int,
        schema_version: int,
        message: Mutation | CommonStep | RowRead,
    ) -> None:
        self.pending = pending
        self.index = index
        self.table_id = table_id
        self.schema_version = schema_version
        """The schema version that the row requires; 0 for any."""
        self.message: Any = message
        self.row: bytes = message.row
        self.size_bytes: int = (
            message.size_bytes if isinstance(message, CommonStep) else message.ByteSize()
        )
        self.location = NOWHERE
        self.attempts = 0
        """How many attempts ended without execution, or for a read without an answer."""
        self.sent = False
        """True while the row may have been executed without our knowing."""
        self.alone = False
        """Send the row by itself: it, or another row of its batch, made the whole batch fail."""


class PendingRequest:
    """A caller's request, about one or many rows."""

    __slots__ = (
        "answers",
        "deadline",
        "entries",
        "future",
        "is_read",
        "last_problem",
        "left",
        "size",
    )

    def __init__(
        self, future: asyncio.Future[Any], rows: int, deadline: float, *, is_read: bool
    ) -> None:
        self.future = future
        self.answers: list[Any] = [None] * rows
        self.left = rows
        self.deadline = deadline
        self.is_read = is_read
        self.entries: list[PendingRow] = []
        self.last_problem: PercolatorError | None = None
        self.size: ReadSize | None = None
        """Of what was read, if that has a limit."""

    def answer(self, index: int, answer: Any) -> None:  # noqa: ANN401 - for any kind of row
        if self.future.done():
            return  # too late: the caller has continued without it
        if self.size is not None:
            try:
                self.size.add(answer)
            except PercolatorError as error:
                # Now, or the answers of a short request would fill the memory.
                self.answers.clear()
                self.fail(index, error)
                return
        self.answers[index] = answer
        self.left -= 1
        if not self.left:
            self.future.set_result(self.answers)
            # The entries refer to this object, too. Left as a reference cycle, they would be work
            # for the garbage collector: a third of the cost of a small transaction.
            self.entries.clear()

    def fail(self, index: int, error: PercolatorError) -> None:
        """A mutation's error is its answer; a read that fails makes the whole request fail."""
        if not self.is_read:
            self.answer(index, error)
        elif not self.future.done():
            self.future.set_exception(copy(error))
            self.entries.clear()

    def expire(self) -> None:
        """Fails what is unanswered, because the deadline has passed. What was not sent is
        definitely not executed."""
        for entry in tuple(self.entries):
            if self.answers[entry.index] is None:
                is_safe = self.is_read or not entry.sent
                self.fail(entry.index, late(self.last_problem, is_safe=is_safe))

    def is_answered(self, index: int) -> bool:
        return self.future.done() or self.answers[index] is not None


def late(problem: PercolatorError | None, *, is_safe: bool) -> DeadlineExceeded:
    """The error for an answer that did not come in time; `problem` is the last attempt's error."""
    error = DeadlineExceeded(
        f"no answer in time; last error: {problem.message}" if problem else "no answer in time",
        where=problem.where if problem else "",
    )
    if is_safe:
        error.retry = Retry.SAFE
    return error
