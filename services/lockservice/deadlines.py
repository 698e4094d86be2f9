"""Which things are over by when.

One bucket per tick: adding, moving and removing cost the same however many things there are. A
thing stands in exactly one bucket, so memory is bounded by the number of things, not of renewals.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Things by the tick at which they are over."""

    def __init__(self) -> None:
        self._buckets: dict[int, set[T]] = {}
        # Every bucket's tick once. A bucket that was emptied stays until its tick is past, or it
        # would be pushed here again and again.
        self._ticks: list[int] = []

    def at(self, tick: int) -> set[T]:
        """The things that are over at `tick`, to add to and to remove from."""
        bucket = self._buckets.get(tick)
        if bucket is None:
            bucket = self._buckets[tick] = set()
            heapq.heappush(self._ticks, tick)
        return bucket

    def move(self, thing: T, old: int, new: int) -> None:
        self._buckets[old].remove(thing)
        self.at(new).add(thing)

    def remove(self, thing: T, tick: int) -> None:
        self._buckets[tick].remove(thing)

    def take_due(self, now: int, at_most: int) -> list[T]:
        """Takes out things that are over at `now`, earliest first, but `at_most` of them."""
        due: list[T] = []
        while self._ticks and self._ticks[0] <= now:
            bucket = self._buckets[self._ticks[0]]
            while bucket:
                if len(due) >= at_most:
                    return due
                due.append(bucket.pop())
            del self._buckets[heapq.heappop(self._ticks)]
        return due
