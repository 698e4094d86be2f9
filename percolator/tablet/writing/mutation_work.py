"""The mutations of one request, as they pass through the batches of a group commit."""

from __future__ import annotations

import asyncio

from percolator.errors import NotExecuted, PercolatorError
from percolator.tablet.memory.state import TabletState
from percolator.tablet.writing.mutations import CheckedMutation
from percolator.v1 import tabletserver_pb2 as pb


class MutationWork:
    """The mutations of one request: each waits, is judged in one batch, and is answered with it."""

    def __init__(
        self,
        mutations: list[CheckedMutation],
        weight: int,
        schema_version: int,
        deadline_seconds: float,
    ) -> None:
        self.mutations = mutations
        self.weight = weight
        self._schema_version = schema_version
        self._deadline_seconds = deadline_seconds
        self._taken = 0
        """How many of the mutations, in order, have been taken to be judged or to wait."""
        self._left = len(mutations)
        """How many of them have no result, or one that must not leave before its batch's end."""
        self.judged: list[int] = []
        """Mutations judged in the current batch: their results must not leave before its end."""
        self.results: list[pb.MutationResult | None] = [None] * len(mutations)
        self.refusal_bytes = 0
        """The size of the cells that made conditions fail: a short mutation may meet megabytes."""
        self.done: asyncio.Future[list[pb.MutationResult]] = (
            asyncio.get_running_loop().create_future()
        )

    @property
    def untaken(self) -> bool:
        """Whether there are mutations that were not taken yet."""
        return self._taken < len(self.mutations)

    def take(self, most: int) -> range:
        """Takes the next mutations, to judge them or to let them wait for their cells."""
        part = range(self._taken, min(self._taken + most, len(self.mutations)))
        self._taken = part.stop
        return part

    def refusal(self, state: TabletState) -> PercolatorError | None:
        """Why this work is not judged any further, or None. Call it right before judging: while the
        work waited, the schema may have changed, and the time may have run out."""
        if self._schema_version != state.schema_version:
            return state.schema_changed()
        if state.clock.monotonic_seconds() >= self._deadline_seconds:
            return NotExecuted("the deadline passed while the mutation waited for its batch")
        if self.done.cancelled():
            return NotExecuted("the caller has cancelled the request")
        return None

    def abandon(self, result: pb.MutationResult) -> None:
        """Gives this result to all mutations that are not judged yet."""
        for index, found in enumerate(self.results):
            if found is None:
                self.results[index] = result
                self._left -= 1
        self._taken = len(self.mutations)

    def conclude(self, result: pb.MutationResult | None) -> bool:
        """Ends the current batch: `result`, if given, replaces the results of all that was judged
        in it. Returns True, and answers the request, once nothing is left waiting."""
        if result is not None:
            for index in self.judged:
                self.results[index] = result
        self._left -= len(self.judged)
        self.judged = []
        if self._left:
            return False
        if not self.done.done():
            self.done.set_result([found for found in self.results if found is not None])
        return True
