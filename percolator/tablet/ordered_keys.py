"""A set of keys that is sorted only as far as somebody asks for its order.

Most locks live for milliseconds and no scan ever sees them: sorting each one in and out costs
more than judging its mutation. So a new key waits, unsorted, until the next look in order; one
that was removed before that has cost two operations of a set.
"""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedList

UNSORTED_MAX = 1024
"""Bounds what the next look in order has to sort: about 3 ms."""


class OrderedKeys:
    """Distinct keys, iterated in order of their bytes."""

    def __init__(self) -> None:
        self._sorted: SortedList = SortedList()
        self._unsorted: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._unsorted)

    def add(self, key: bytes) -> None:
        """The key must not be in the set: whoever calls knows, and a check would cost a search."""
        self._unsorted.add(key)
        if len(self._unsorted) > UNSORTED_MAX:
            self._sort()

    def remove(self, key: bytes) -> None:
        """The key must be in the set."""
        if key in self._unsorted:
            self._unsorted.remove(key)
        else:
            self._sorted.remove(key)

    def between(
        self, start: bytes, stop: bytes | None, *, reverse: bool = False
    ) -> Iterator[bytes]:
        """The keys with start <= key < stop (None: no limit). The set must not change meanwhile."""
        if self._unsorted:
            self._sort()
        keys: Iterator[bytes] = self._sorted.irange(
            start, stop, inclusive=(True, False), reverse=reverse
        )
        return keys

    def _sort(self) -> None:
        self._sorted.update(self._unsorted)
        self._unsorted.clear()
