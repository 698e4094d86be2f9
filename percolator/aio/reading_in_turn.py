"""The first read of an attempt at a transaction: where it would lose, it waits for its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

from percolator.aio.reading import Reading
from percolator.errors import CellAddress
from percolator.protocol.contention.baton import Baton
from percolator.retries import Attempts


class ReadingInTurn(Reading):
    """Reads whose timestamp is fetched when the transaction has its turn (hot_cells.py).

    A snapshot that is taken before the turn would lose. So all that needs the timestamp waits
    together with the first read, at whichever cell.
    """

    _attempts: Attempts | None = None
    """The attempts of which this transaction is one."""
    _taking_turn: asyncio.Future[None] | None = None
    """Done when the first read no longer waits for the turn."""

    def _begin_at(self, address: CellAddress, deadline: float) -> Awaitable[int]:
        # Two looks at dictionaries that are nearly always empty, with every first read.
        attempts = self._attempts
        if attempts is None or self._taking_turn or not self._env.is_contended(address):
            return self._begin(deadline)
        if self._starting is not None:  # too late: another read has asked for the timestamp
            return self._begin(deadline)
        return self._begin_in_turn(attempts, address, deadline)

    def _begin(self, deadline: float) -> Coroutine[Any, Any, int]:
        if self._taking_turn is not None:
            return self._begin_after(self._taking_turn, deadline)
        return super()._begin(deadline)

    async def _begin_in_turn(
        self, attempts: Attempts, address: CellAddress, deadline: float
    ) -> int:
        """Fetches the timestamp when it is this transaction's turn at a cell where it would lose.

        It waits for half of the call's time at most, since the call needs some of it.
        """
        taking = self._taking_turn = asyncio.get_running_loop().create_future()
        try:
            baton = await attempts.take_turn(address, _half_way(self._engine.now(), deadline))
            if baton is not None and not self._start and self._starting is None:
                self._begin_after_winner(baton, address)
        finally:
            self._taking_turn = None
            taking.set_result(None)
        return self._start or await super()._begin(deadline)

    def _begin_after_winner(self, baton: Baton, address: CellAddress) -> None:
        """Begins directly above the commit of the transaction that had the turn before."""
        self._set_start(baton.start)
        self._require_older_tables()
        self._known = baton.known(address)

    async def _begin_after(self, taking: asyncio.Future[None], deadline: float) -> int:
        """Fetches the timestamp when another read no longer waits for the turn."""
        now = self._engine.now()
        await asyncio.wait((taking,), timeout=max(_half_way(now, deadline) - now, 0.0))
        return self._start or await super()._begin(deadline)


def _half_way(now: float, deadline: float) -> float:
    return now + (deadline - now) / 2
