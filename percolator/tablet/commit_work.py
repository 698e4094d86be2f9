"""The mutations of one request, on their way through the batches of a group commit."""

from __future__ import annotations

import asyncio
from itertools import chain

from percolator.errors import NotExecuted, PercolatorError
from percolator.tablet.mutations import Step
from percolator.tablet.state import TabletState
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail

APPLIED = pb.MutationResult(outcome=pb.OUTCOME_APPLIED)


def not_executed(error: PercolatorError) -> pb.MutationResult:
    return pb.MutationResult(outcome=pb.OUTCOME_NOT_EXECUTED, error=to_detail(error))


def unknown(error: PercolatorError) -> pb.MutationResult:
    return pb.MutationResult(outcome=pb.OUTCOME_UNKNOWN, error=to_detail(error))


class CommitWork:
    """Every mutation waits, is judged in one batch, and is answered with that batch."""

    def __init__(
        self, steps: list[Step], weight: int, schema_version: int, deadline_seconds: float
    ) -> None:
        self.steps = steps
        self.weight = weight
        self._schema_version = schema_version
        self._deadline_seconds = deadline_seconds
        self._waiting = list(range(len(steps)))
        """Mutations that no earlier batch judged, in order: the second one of a cell must not
        overtake the first."""
        self._taken = 0
        """How many of them the present batch has taken."""
        self.deferred: list[int] = []
        """Those of them that met a touched cell: the first ones of the next batch."""
        self.judged: list[int] = []
        """Mutations judged in the present batch: their results must not leave before its end."""
        self.results: list[pb.MutationResult | None] = [None] * len(steps)
        self.refusal_bytes = 0
        """Of the cells that made conditions fail: a short mutation may meet megabytes."""
        self.done: asyncio.Future[list[pb.MutationResult]] = (
            asyncio.get_running_loop().create_future()
        )

    @property
    def untaken(self) -> bool:
        """Whether the present batch can take more of it."""
        return self._taken < len(self._waiting)

    def take(self, most: int) -> list[int]:
        """The next mutations to judge or to defer."""
        part = self._waiting[self._taken : self._taken + most]
        self._taken += len(part)
        return part

    def refusal(self, state: TabletState) -> PercolatorError | None:
        """Why it is not judged any further. Asked right before judging: the schema may have
        changed, and the time may have run out, while it waited."""
        if self._schema_version != state.schema_version:
            return state.schema_changed()
        if state.clock.monotonic_seconds() >= self._deadline_seconds:
            return NotExecuted("the deadline passed while the mutation waited for its batch")
        if self.done.cancelled():
            return NotExecuted("the caller went away")
        return None

    def abandon(self, result: pb.MutationResult) -> None:
        """Answers whatever is not judged."""
        for index in chain(self._waiting[self._taken :], self.deferred):
            self.results[index] = result
        self._waiting, self._taken, self.deferred = [], 0, []

    def conclude(self, result: pb.MutationResult | None) -> bool:
        """Ends the present batch: `result`, if any, stands for all that was judged in it. Answers
        when nothing is left waiting, and says whether that is so."""
        if result is not None:
            for index in self.judged:
                self.results[index] = result
        self.judged = []
        self._waiting = self.deferred + self._waiting[self._taken :]
        self._taken, self.deferred = 0, []
        if self._waiting:
            return False
        if not self.done.done():
            self.done.set_result([found for found in self.results if found is not None])
        return True
