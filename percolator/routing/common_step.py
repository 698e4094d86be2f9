"""A mutation that nearly every transaction sends: it travels in parallel lists, not by itself.

A message of its own would cost the client and the server most of what the mutation costs them.
"""

from __future__ import annotations

from percolator.errors import InvariantViolation
from percolator.v1.tabletserver_pb2 import Mutation

_OTHER_BYTES = 32
"""The size of a step in a request besides row, column and value."""


class CommonStep:
    """One entry of a `StepList`; a subclass for each kind."""

    __slots__ = ("column", "commit", "min_commit", "observers", "row", "start", "value")

    kind = 0

    def __init__(
        self,
        row: bytes,
        column: bytes,
        value: bytes,
        start: int,
        commit: int = 0,
        min_commit: int = 0,
        observers: tuple[bytes, ...] = (),
    ) -> None:
        self.row = row
        self.column = column
        self.value = value
        self.start = start
        self.commit = commit
        self.min_commit = min_commit
        self.observers = observers

    @property
    def size_bytes(self) -> int:
        return len(self.row) + len(self.column) + len(self.value) + _OTHER_BYTES

    def mutation(self) -> Mutation:
        """The same as a message, for servers that do not know such lists."""
        raise InvariantViolation(f"{type(self).__name__} is not a kind of step")
