"""The live notifications of a tablet, in memory and in order, as many as it may hold.

Like locks, notifications are deleted soon after they were written, so that finding the live ones
with an iterator means walking over the dead. The index holds those that came first, up to a
limit. Beyond it the index is *incomplete*: then only the store knows all of them, and whoever asks
has to walk; once enough of them are done, the index is filled again.
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
        self._overflowed = False
        self.complete = True
        """Whether every live notification is in the index."""

    def __len__(self) -> int:
        return len(self._keys)

    def begin_filling(self) -> None:
        """Before every live notification is put in again, from cursors made after this."""
        self._overflowed = False

    def end_filling(self) -> None:
        """After it: complete, unless one found no room meanwhile."""
        self.complete = not self._overflowed

    @property
    def worth_filling(self) -> bool:
        """Whether looking for more in the store would find room for many."""
        return not self.complete and len(self._keys) <= self._entries_max // 2

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def put(self, key: bytes) -> None:
        if key in self._keys:
            return
        if len(self._keys) >= self._entries_max:
            self.complete = False
            self._overflowed = True
            return
        self._keys.add(key)
        self._order.add(key)

    def remove(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.remove(key)
            self._order.remove(key)

    def between(self, start: bytes, stop: bytes | None) -> Iterator[bytes]:
        """The indexed keys with start <= key < stop, in order. Must not change meanwhile."""
        return self._order.between(start, stop)
