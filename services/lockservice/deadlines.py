"""When things expire.

One bucket per tick: adding, moving and removing cost the same however many things there are. A
thing is in exactly one bucket, so memory is bounded by the number of things, not of renewals.
Things that expire at the same tick come out in an order that depends only on the calls (buckets are
dictionaries, not sets), so that a simulation runs the same way every time.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Things by the tick at which they expire."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[T, None]] = {}
        # Every bucket's tick, once. An emptied bucket stays until its tick has passed. Otherwise
        # its tick would be pushed again each time the bucket is filled again.
        self._ticks: list[int] = []

    def add(self, thing: T, tick: int) -> None:
        bucket = self._buckets.get(tick)
        if bucket is None:
            bucket = self._buckets[tick] = {}
            heapq.heappush(self._ticks, tick)
        bucket[thing] = None

    def move(self, thing: T, old: int, new: int) -> None:
        self.remove(thing, old)
        self.add(thing, new)

    def remove(self, thing: T, tick: int) -> None:
        del self._buckets[tick][thing]

    def take_due(self, now: int, at_most: int) -> list[T]:
        """Takes out up to `at_most` things that have expired at `now`, earliest first."""
        due: list[T] = []
        while self._ticks and self._ticks[0] <= now:
            bucket = self._buckets[self._ticks[0]]
            while bucket:
                if len(due) >= at_most:
                    return due
                due.append(bucket.popitem()[0])
            del self._buckets[heapq.heappop(self._ticks)]
        return due
