"""Bugs of early starts that a simulation has to find: one for each of their rules
(protocol/early_starts.py)."""

from __future__ import annotations

import pytest

from percolator.aio.one_message import OneMessage
from percolator.aio.reading_in_turn import ReadingInTurn
from percolator.aio.transaction import Transaction
from percolator.errors import ConflictError, OutcomeUnknown
from percolator.protocol.early_starts import EarlyStarts
from percolator.routing.cells import CommitAnswer
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def what_reads_begins_early(patch: Patch) -> None:
    """It misses what was committed before it began."""

    async def wrong(self: OneMessage, deadline: float) -> int:
        stock = self._engine.early_starts
        if stock is None or stock._next == stock._end:
            return await ReadingInTurn._begin(self, deadline)
        self._set_start(stock._next)
        stock._next += 1
        return self._start

    patch.setattr(OneMessage, "_begin", wrong)


def early_start_is_handed_out_twice(patch: Patch) -> None:
    """Each of both transactions takes the other's commit for its own."""
    correct = EarlyStarts._send

    def wrong(self: EarlyStarts) -> None:
        correct(self)
        if self._next > self._first:
            self._next -= self._next % 2

    patch.setattr(EarlyStarts, "_send", wrong)


def begun_anew_while_the_outcome_is_unknown(patch: Patch) -> None:
    """Both attempts commit."""
    correct = Transaction._go_on

    async def wrong(self: Transaction, answer: CommitAnswer | None, deadline: float) -> int:
        try:
            return await correct(self, answer, deadline)
        except OutcomeUnknown as unknown:
            if not self._early:
                raise
            raise ConflictError("presumed to be rolled back") from unknown

    patch.setattr(Transaction, "_go_on", wrong)


ALL = (
    (what_reads_begins_early, (), True),
    (early_start_is_handed_out_twice, (), True),
    (begun_anew_while_the_outcome_is_unknown, (Kind.PAUSE, Kind.SLOW_LINKS), True),
)
"""The bugs, the strikes that bring them to light, and whether they are caught in seconds."""
