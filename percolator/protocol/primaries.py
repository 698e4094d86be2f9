"""Asking primaries, those in tables that are being deleted included.

Whoever deletes a table does not wait for the transactions that write to it. Their locks in other
tables would hold up every reader, if the cells that decide about them could not be asked any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import SchemaError
from percolator.protocol.surroundings import Surroundings
from percolator.wire.questions import Answer, Step


class Primaries:
    """Sends steps to the cells that decide."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def mutate(self, steps: Sequence[Step], deadline: float) -> list[Answer]:
        """As `Mutations`."""
        answers = await self._around.cells.mutate(steps, deadline)
        deleted = self._around.deleted_tables
        if deleted is None:
            return answers
        places = [place for place, one in enumerate(answers) if isinstance(one, SchemaError)]
        if places:
            again = await deleted.mutate([steps[place] for place in places], deadline)
            for place, answer in zip(places, again, strict=True):
                answers[place] = answer
        return answers

    def is_gone(self, answer: Answer) -> bool:
        """Whether there is no such cell any more, nor ever will be: it decides nothing.

        A table goes when no lock has its primary in it. A lock that appears later was sent late, by
        a transaction that has not committed: until it commits, its locks are where they were.
        """
        return self._around.deleted_tables is not None and isinstance(answer, SchemaError)
