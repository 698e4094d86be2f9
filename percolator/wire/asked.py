"""What a caller waits for: one future for all rows that it asked about at once."""

from __future__ import annotations

import asyncio
from copy import copy
from typing import Any

from percolator.errors import DeadlineExceeded, PercolatorError, Retry, TabletLocation
from percolator.v1.tabletserver_pb2 import Mutation, RowRead

NOWHERE = TabletLocation(table_id=0, tablet_id=0, epoch=0, start=b"", end=b"", address="")
"""The location of a row before it was looked up."""


class Entry:
    """One mutation or one row to read, on its way to a tablet server and back."""

    __slots__ = (
        "alone",
        "asked",
        "attempts",
        "index",
        "location",
        "message",
        "row",
        "schema_version",
        "sent",
        "size_bytes",
        "table_id",
    )

    def __init__(
        self,
        asked: Asked,
        index: int,
        table_id: int,
        schema_version: int,
        message: Mutation | RowRead,
    ) -> None:
        self.asked = asked
        self.index = index
        self.table_id = table_id
        self.schema_version = schema_version
        """Only this one will do; 0 for any."""
        self.message: Any = message
        self.row: bytes = message.row
        self.size_bytes: int = message.ByteSize()
        self.location = NOWHERE
        self.attempts = 0
        """That ended without execution."""
        self.sent = False
        """True while it may have been executed without our knowing."""
        self.alone = False
        """It, or another one of its batch, made the whole batch fail."""


class Asked:
    """A caller's question, about one or many rows."""

    __slots__ = ("answers", "deadline", "entries", "future", "is_read", "last_problem", "left")

    def __init__(
        self, future: asyncio.Future[Any], rows: int, deadline: float, *, is_read: bool
    ) -> None:
        self.future = future
        self.answers: list[Any] = [None] * rows
        self.left = rows
        self.deadline = deadline
        self.is_read = is_read
        self.entries: list[Entry] = []
        self.last_problem: PercolatorError | None = None

    def answer(self, index: int, answer: object) -> None:
        if self.future.done():
            return  # too late: the caller has gone on without it
        self.answers[index] = answer
        self.left -= 1
        if not self.left:
            self.future.set_result(self.answers)
            # Its entries know it, too: left as a ring, they would be work for the collector of
            # garbage, a third of all that a small transaction costs.
            self.entries.clear()

    def fail(self, index: int, error: PercolatorError) -> None:
        """A mutation's error is its answer; a read that fails takes the whole question with it."""
        if not self.is_read:
            self.answer(index, error)
        elif not self.future.done():
            self.future.set_exception(copy(error))
            self.entries.clear()

    def expire(self) -> None:
        """The deadline has come. What was not sent is definitely not done."""
        for entry in tuple(self.entries):
            if self.answers[entry.index] is None:
                is_safe = self.is_read or not entry.sent
                self.fail(entry.index, late(self.last_problem, is_safe=is_safe))

    def is_answered(self, index: int) -> bool:
        return self.future.done() or self.answers[index] is not None


def late(problem: PercolatorError | None, *, is_safe: bool) -> DeadlineExceeded:
    """No answer came in time; `problem` is why the last attempt had none."""
    error = DeadlineExceeded(
        f"no answer in time; at last: {problem.message}" if problem else "no answer in time",
        where=problem.where if problem else "",
    )
    if is_safe:
        error.retry = Retry.SAFE
    return error
