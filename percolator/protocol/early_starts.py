"""Start timestamps fetched in advance, for transactions that have read nothing.

Such a transaction shows no snapshot to anybody: its start timestamp is only its name. So it may be
older than the transaction, and a commit in one round is one message instead of two.

A stock is fetched when transactions want it, never by a clock. It is as large as what they take
while a few requests for timestamps are answered: the younger a start, the fewer commits are newer.

Rules, each with the failure that it prevents:
- No transaction that reads begins early. It would miss what was committed before it began.
- No start is handed out twice: it is how a transaction is told from all others.
- An obstacle to an early start says nothing about the transaction: what is above the start may have
  ended before the transaction began. So it begins anew, at a timestamp fetched then, as soon as its
  first attempt can no longer commit. If it began anew sooner, it might commit twice.
- A table that is younger than the start is not written with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from math import inf

from percolator.errors import PercolatorError
from percolator.protocol.first_message import FirstMessage
from percolator.routing.table_info import TableInfo
from percolator.wire.timestamp_source import TimestampSource

AGE_SECONDS_MAX = 0.5
"""Locks count as old from their start, and what is below the safe point is refused."""
FETCH_SECONDS = 2.0
STOCK_MIN = 16
STOCK_MAX = 4_096
REST_MIN = 4
"""After an obstacle, so many transactions fetch their own timestamps; twice as many after each
further one, until a stock meets none. An early start in vain costs a message and a round trip."""
REST_MAX = 1_024


class EarlyStarts:
    """The stock of one client. It is a taker of the timestamps that fill it, too."""

    def __init__(self, source: TimestampSource, now: Callable[[], float]) -> None:
        """`now` is the monotonic clock."""
        self._source = source
        self._now = now
        self._call_soon = asyncio.get_running_loop().call_soon
        self._first = self._next = self._end = 0
        self.received_seconds = -inf
        """When the stock came."""
        self._asked = 0
        """How many timestamps are on their way."""
        self._low = 0
        self._wanted = 0
        """How many were wanted since the stock was last asked for."""
        self._resting = 0
        self._rest = REST_MIN
        self._met_obstacle = False
        """Since the stock came."""
        self._beginning: list[tuple[FirstMessage, int]] = []

    def begin(self, message: FirstMessage, tables: Iterable[TableInfo]) -> int:
        """The start of a transaction that has read nothing, or 0 if it has to fetch its own. Its
        message leaves in the next turn of the event loop, together with those of others."""
        if self._resting:
            self._resting -= 1
            return 0
        self._wanted += 1
        start = self._next
        age = self._now() - self.received_seconds
        if self._end - start <= self._low or age > AGE_SECONDS_MAX / 2:
            self._fetch()
            if start == self._end or age > AGE_SECONDS_MAX:
                return 0
        for table in tables:
            if table.created_at > start:
                return 0
        self._next = start + 1
        if not self._beginning:
            self._call_soon(self._send)
        self._beginning.append((message, start))
        return start

    def _send(self) -> None:
        """Hands the messages over one after the other. That takes a processor less time than all
        steps of one transaction, and then all of the next."""
        beginning, self._beginning = self._beginning, []
        for message, start in beginning:
            if not message.done():
                message.set_result(start)

    def met_obstacle(self, start: int) -> None:
        """The transaction that began early at `start` was stopped by what is newer."""
        if start >= self._first and not self._met_obstacle:  # else others of its stock did, too
            self._met_obstacle = True
            self._begin_rest()

    def _begin_rest(self) -> None:
        self._resting, self._rest = self._rest, min(self._rest * 2, REST_MAX)
        self._next = self._end

    # ------------------------------------------------------------------ the stock comes

    def _fetch(self) -> None:
        if self._asked:
            return
        # Half of a stock is used up before the next is asked for. So it comes to be four times as
        # large as what is taken while a request is answered, and does not grow further.
        self._asked = min(max(self._wanted * 4 // 3, STOCK_MIN), STOCK_MAX)
        self._wanted = 0
        try:
            self._source.give(self, self._asked, FETCH_SECONDS)
        except PercolatorError as error:
            self.set_exception(error)

    def done(self) -> bool:
        """Whether it no longer wants timestamps."""
        return False

    def set_result(self, first: int) -> None:
        """Replaces what is left of the stock before: younger starts meet fewer obstacles."""
        if not self._met_obstacle:
            self._rest = REST_MIN
        self._met_obstacle = False
        self._first = self._next = first
        self._end = first + self._asked
        self._low = self._asked // 2
        self._asked = 0
        self.received_seconds = self._now()

    def set_exception(self, error: PercolatorError) -> None:
        """Transactions that want it ask for timestamps of their own, and hear of the error."""
        self._asked = 0
        self._begin_rest()
