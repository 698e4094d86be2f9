"""How a shared transaction, its parts and their states are named where they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from percolator.errors import CellAddress, InvalidArgument, InvariantViolation

TASK_BYTES_MAX = 128
GENERATION_MAX = 2**31

CLOSED = b"closed"
"""The column of the transaction's row that says how it ended (closing.py). It names no part."""


@dataclass(frozen=True)
class Job:
    """A shared transaction, as all of its processes know it."""

    table_id: int
    """The table of its row."""
    row: bytes
    unchanged_since: int
    """No cell that it writes may have been committed at or above this; 0: by others, while a part
    of it is under way."""
    ttl_seconds: float
    """How long a part outlives the last process that has kept it."""
    began: int
    """A timestamp from before the first part. No other transaction has it."""

    @property
    def beat_seconds(self) -> float:
        """How long one beat may wait for its turn: two of them fit into a time to live.

        A client waits behind what it writes itself. If a busy cluster takes seconds for that, a
        shorter time would be over with each beat, and the job would seem dead while it works.
        """
        return self.ttl_seconds / 2

    def primary(self, name: PartName) -> CellAddress:
        return CellAddress(self.table_id, self.row, name.encode())

    def primary_of(self, part: PartKey) -> CellAddress:
        return CellAddress(self.table_id, self.row, part.column)

    def part_of(self, primary: CellAddress) -> PartName | None:
        """Which part the primary belongs to; None if that of another transaction."""
        if (primary.table_id, primary.row) != (self.table_id, self.row):
            return None
        return PartName.decode(primary.column)


class PartName(NamedTuple):
    """A part: the column of its primary."""

    generation: int
    """Counts the runs of all tasks: a later run has a higher generation."""
    attempt: int
    """The start timestamp of the attempt's first part. A later attempt at a task has a higher
    one."""
    number: int
    """Its place among the attempt's parts."""
    task: str

    def __str__(self) -> str:
        return f"part {self.number} of task {self.task!r}"

    def encode(self) -> bytes:
        return f"{self.generation}.{self.attempt}.{self.number}.{self.task}".encode()

    @classmethod
    def decode(cls, column: bytes) -> PartName:
        try:
            generation, attempt, number, task = column.decode().split(".", 3)
            return cls(int(generation), int(attempt), int(number), task)
        except ValueError as error:
            raise InvariantViolation(f"{column!r} names no part: {error}") from error


class PartKey(NamedTuple):
    """What the driver needs to know of a part in order to commit it."""

    start: int
    column: bytes


def check_task(task: object, generation: object) -> None:
    """Raises `InvalidArgument`."""
    try:
        size = len(task.encode()) if isinstance(task, str) else 0
    except UnicodeEncodeError as error:
        raise InvalidArgument("task", f"{task!r} cannot be encoded as UTF-8") from error
    if not 0 < size <= TASK_BYTES_MAX:
        raise InvalidArgument("task", f"expected 1 to {TASK_BYTES_MAX} bytes of text, got {task!r}")
    whole = isinstance(generation, int) and not isinstance(generation, bool)
    if not whole or not 0 <= generation < GENERATION_MAX:  # type: ignore[operator]
        raise InvalidArgument(
            "generation", f"expected a number from 0 to below {GENERATION_MAX}, got {generation!r}"
        )
