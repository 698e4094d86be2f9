"""Transactions on lists that only grow: what each appended, what it read, and how it ended.

This is the input of the judge in this folder. It shares nothing with the checker of the library
(`tests/isolation`), so that a mistake in one of them does not hide in the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """How a transaction ended, as far as its client was told."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Append:
    """An element was appended. No element is ever appended twice to any list."""

    key: str
    element: str


@dataclass(frozen=True)
class Read:
    """A list was read; it includes what the same transaction had appended by then."""

    key: str
    elements: tuple[str, ...]


Operation = Append | Read


@dataclass(frozen=True)
class Transaction:
    """One transaction, with the instants between which its two timestamps were fetched."""

    name: str
    operations: tuple[Operation, ...]
    outcome: Outcome
    start_ts: int = 0
    commit_ts: int = 0
    """Timestamps are 0 if the client was not told, or if there is none."""
    begin_called: float | None = None
    begin_returned: float | None = None
    commit_called: float | None = None
    commit_returned: float | None = None

    def appends(self) -> Iterator[Append]:
        return (one for one in self.operations if isinstance(one, Append))

    def reads(self) -> Iterator[Read]:
        return (one for one in self.operations if isinstance(one, Read))

    def __str__(self) -> str:
        return f"{self.name} (start {self.start_ts}, commit {self.commit_ts})"


@dataclass(frozen=True)
class Anomaly:
    """One thing that snapshot isolation does not allow."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
