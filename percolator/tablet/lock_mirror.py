"""All locks of a tablet, in memory: the header of each, found by cell or in order.

Locks come and go with every transaction, and LevelDB keeps a tombstone for each that went: an
iterator that seeks among them walks over all tombstones up to the next live key. So nobody ever
iterates over locks in LevelDB while serving; the mirror is filled once, when the tablet is opened.

The order of use makes the mirror as good as one snapshot of locks and writes:
* a commit is durable in LevelDB first, and leaves the mirror second;
* a reader looks into the mirror first, and opens its cursor second.
Then a lock that had already gone from the mirror has its write record in the cursor's view, and
one that comes later will get a commit timestamp above every timestamp issued by now.
"""

from __future__ import annotations

from collections.abc import Iterator

from percolator.protocol.records import LOCK_HEADER_BYTES
from percolator.tablet.ordered_keys import OrderedKeys


class LockMirror:
    """Cells (`keys.cell_prefix`) and the header of the lock that each carries."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        """For lookups on the hottest paths; changed only through `put` and `remove`."""
        self._order = OrderedKeys()

    def __len__(self) -> int:
        return len(self.headers)

    def put(self, cell: bytes, record: bytes) -> None:
        if cell not in self.headers:
            self._order.add(cell)
        self.headers[cell] = record[:LOCK_HEADER_BYTES]

    def remove(self, cell: bytes) -> None:
        if self.headers.pop(cell, None) is not None:
            self._order.remove(cell)

    def between(
        self, start: bytes, stop: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Cells with start <= cell < stop, and their lock's header, in order. No lock may come or
        go while this is iterated."""
        headers = self.headers
        for cell in self._order.between(start, stop, reverse=reverse):
            yield cell, headers[cell]
