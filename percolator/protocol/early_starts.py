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
from collections.abc import Callable
from math import inf
from typing import Protocol

from percolator.errors import PercolatorError
from percolator.wire.timestamp_source import Taker

AGE_SECONDS_MAX = 0.5
"""Locks count as old from their start, and what is below the safe point is refused."""
FETCH_SECONDS = 2.0
STOCK_MIN = 16
STOCK_MAX = 4_096
REST = 256
"""After each obstacle, this many transactions fetch their own timestamps. An early start that fails
costs a message and a round trip, ten times what a successful one saves. With this rest, no more
than about one transaction in 256 pays for it, however much contention there is."""
REST_MAX = 4_096
"""The longest rest, however many obstacles there were."""


class Source(Protocol):
    """What fetches timestamps."""

    def give(self, taker: Taker, count: int = 1, timeout_seconds: float | None = None) -> None: ...


class Message(Protocol):
    """The first message of a transaction."""

    def done(self) -> bool:
        """Whether it has left, or its caller no longer waits. It must not leave twice."""

    def ask(self) -> None:
        """Fetches its own start, and leaves when that comes."""

    def begin_early(self, start: int, received_seconds: float) -> None:
        """Leaves now, at a start that came then."""


class _Request:
    """A stock on its way. It takes the timestamps, unless it was given up before: then the next one
    may be on its way, and these are too few for that."""

    __slots__ = ("_is_over", "_stock", "count")

    def __init__(self, stock: EarlyStarts, count: int) -> None:
        self._stock = stock
        self._is_over = False
        self.count = count

    def done(self) -> bool:
        return self._is_over

    def set_result(self, first: int) -> None:
        self._is_over = True
        self._stock.came(first, self.count)

    def set_exception(self, error: PercolatorError) -> None:
        self._is_over = True
        self._stock.did_not_come()


class EarlyStarts:
    """The stock of one client."""

    def __init__(self, source: Source, now: Callable[[], float]) -> None:
        """`now` is the monotonic clock."""
        self._source = source
        self._now = now
        self._call_soon = asyncio.get_running_loop().call_soon
        self._first = self._next = self._end = 0
        self._received_seconds = -inf
        """When the stock came."""
        self._asked: _Request | None = None
        """The stock that is on its way."""
        self._wanted = 0
        """How many were wanted since the stock was last asked for."""
        self._most = 0
        """How many were wanted in one turn since the stock came."""
        self._need = 0
        """How many were wanted while the stock was on its way, or in one turn."""
        self.rest = REST
        """For how many transactions it rests after an obstacle."""
        self._resting = 0
        """How many transactions still have to fetch their own."""
        self._beginning: list[Message] = []
        """The messages of this turn."""

    def begin(self, message: Message) -> None:
        """Has the first message of a transaction that has read nothing leave in the next turn of
        the event loop: at an early start, or when one comes that it asks for then."""
        if not self._beginning:
            self._call_soon(self._send)
        self._beginning.append(message)

    def _send(self) -> None:
        """Hands the messages of one turn over, one after the other: that takes a processor less
        time than all steps of one transaction, and then all of the next.

        If there are not enough starts for all of them, all ask for their own. They share calls, and
        go on sharing them if they stay together: a hundred in flight would take twice the calls
        if some of them were a round trip ahead.
        """
        beginning, self._beginning = self._beginning, []
        try:
            if self._has(len(beginning)):
                received_seconds = self._received_seconds
                for message in beginning:
                    start, self._next = self._next, self._next + 1
                    message.begin_early(start, received_seconds)
            else:
                for message in beginning:
                    message.ask()
        except BaseException:  # Ctrl-C, in a program that goes on: else they would wait for ever
            if not self._beginning:
                self._call_soon(self._send)
            self._beginning[:0] = [message for message in beginning if not message.done()]
            raise

    def _has(self, count: int) -> bool:
        """Whether so many transactions may begin early. Sees to it that the next may."""
        if self._resting:
            self._resting = max(self._resting - count, 0)
            return False
        self._wanted += count
        self._most = max(self._most, count)
        left, age = self._end - self._next, self._now() - self._received_seconds
        if left - count <= 2 * self._need or age > AGE_SECONDS_MAX / 2:
            self._fetch()
        return count <= left and age <= AGE_SECONDS_MAX

    def met_obstacle(self, start: int) -> None:
        """The transaction that began early at `start` was stopped by what is newer."""
        self._resting = min(self._resting + self.rest, REST_MAX)
        if start >= self._first:
            self._next = self._end  # the next stock is younger

    # ------------------------------------------------------------------ the stock comes

    def _fetch(self) -> None:
        if self._asked is not None:
            return
        # Half of it is used up before the next is asked for, and half of the rest meanwhile.
        count = min(max(4 * max(self._need, self._most), STOCK_MIN), STOCK_MAX)
        request = self._asked = _Request(self, count)
        self._wanted = 0
        try:
            self._source.give(request, count, FETCH_SECONDS)
        except PercolatorError as error:
            request.set_exception(error)

    def came(self, first: int, count: int) -> None:
        """Replaces what is left of the stock before: younger starts meet fewer obstacles."""
        self._first = self._next = first
        self._end = first + count
        self._asked = None
        self._need, self._most = max(self._wanted, self._most), 0
        self._received_seconds = self._now()

    def did_not_come(self) -> None:
        """Transactions that want it ask for timestamps of their own, and hear of the error."""
        self._asked = None
        self._resting = self.rest
