"""The live notifications of a tablet, in memory and in order, as many as it may hold.

Like locks, notifications are deleted soon after they were written, so that finding the live ones
with an iterator means walking over the dead. The index holds those that came first, up to a limit.
Beyond it the index is *incomplete*, from a known key on: behind that only the store knows all of
them, and whoever asks has to walk. Once enough of them are done, the index is filled from there;
the dead before it are not walked over again.
"""

from __future__ import annotations

from collections.abc import Iterator

from percolator.tablet.ordered_keys import OrderedKeys


class NotifyIndex:
    """Keys of SPACE_NOTIFY, without their space byte."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._keys: set[bytes] = set()
        self._order = OrderedKeys()
        self.missing_from: bytes | None = None
        """Every live notification below this key is in the index; None: every one there is."""

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def complete(self) -> bool:
        """Whether every live notification is in the index."""
        return self.missing_from is None

    @property
    def worth_filling(self) -> bool:
        """Whether looking for more in the store would find room for many."""
        return self.missing_from is not None and len(self._keys) <= self._entries_max // 2

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def put(self, key: bytes) -> bool:
        """Whether there was room for it."""
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
        """The indexed keys with start <= key < stop, in order. Must not change meanwhile."""
        return self._order.between(start, stop, reverse=reverse)
