"""A set of keys that is sorted only when its order is needed.

Most locks live for milliseconds and no scan ever sees them: keeping them sorted would cost more
than judging their mutations. So a new key stays unsorted until the next iteration; a key that is
removed before that has cost only two set operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sortedcontainers import SortedList

UNSORTED_MAX = 1024
"""Limits what the next iteration has to sort: about 3 ms."""


class OrderedKeys:
    """Distinct keys, iterated in byte order."""

    def __init__(self) -> None:
        self._sorted: SortedList = SortedList()
        self._unsorted: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._unsorted)

    def add(self, key: bytes) -> None:
        """The key must not be in the set. Callers know that; checking it would cost a search."""
        self._unsorted.add(key)
        if len(self._unsorted) > UNSORTED_MAX:
            self._sort()

    def add_all(self, keys: Sequence[bytes]) -> None:
        """As `add`, for distinct keys."""
        self._unsorted.update(keys)
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
