"""The live notifications of a tablet, in memory and in order, up to a limit.

Like locks, notifications are deleted soon after they are written, so finding the live ones with an
iterator means walking over deleted ones. The index holds the first ones, up to a limit. Beyond
that, it is *incomplete* from a known key on: from there only the store has all of them, and a
search has to walk over it. Once enough of them are handled, the index is filled from that key on;
the deleted ones before it are not walked over again.
"""

from __future__ import annotations

from collections.abc import Iterator

from percolator.tablet.memory.ordered_keys import OrderedKeys


class NotifyIndex:
    """Keys of SPACE_NOTIFY, without their space byte."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._keys: set[bytes] = set()
        self._order = OrderedKeys()
        self.missing_from: bytes | None = None
        """Every live notification below this key is in the index. None: all of them are."""

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def complete(self) -> bool:
        """Whether every live notification is in the index."""
        return self.missing_from is None

    @property
    def worth_filling(self) -> bool:
        """Whether the index has room for many more notifications from the store."""
        return self.missing_from is not None and len(self._keys) <= self._entries_max // 2

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def put(self, key: bytes) -> bool:
        """Adds a key. Returns False if there is no room for it."""
        if key in self._keys:
            return True
        if len(self._keys) >= self._entries_max:
            if self.missing_from is None or key < self.missing_from:
                self.missing_from = key
            return False
        self._keys.add(key)
        self._order.add(key)
        return True

    def remove(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.remove(key)
            self._order.remove(key)

    def between(
        self, start: bytes, stop: bytes | None, *, reverse: bool = False
    ) -> Iterator[bytes]:
        """The indexed keys with start <= key < stop, in order. They must not change meanwhile."""
        return self._order.between(start, stop, reverse=reverse)
