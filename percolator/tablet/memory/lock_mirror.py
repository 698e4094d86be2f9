"""All locks of a tablet, in memory: the header of each, found by cell or in order.

Locks come and go with every transaction, and LevelDB keeps a tombstone for each one removed: an
iterator that seeks among them walks over all tombstones up to the next live key. So locks in
LevelDB are never iterated while serving; the mirror is filled once, when the tablet is opened.

The order of use makes the mirror equivalent to one snapshot of locks and writes:
* a commit first becomes durable in LevelDB, and then removes its lock from the mirror;
* a reader first looks into the mirror, and then opens its cursor.
So if a lock has already left the mirror, its write record is in the cursor's view; and a lock that
is added later will get a commit timestamp above every timestamp issued so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from percolator.formats.records import LOCK_HEADER_BYTES, START_TIMESTAMP_BYTES
from percolator.tablet.memory.ordered_keys import OrderedKeys


class LockMirror:
    """Locked cells (`keys.cell_prefix`), each with the header of its lock."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        """Public for lookups on the hottest paths; changed only through `put` and `remove`."""
        self._order = OrderedKeys()
        self._starts: dict[bytes, int] = {}
        """The number of locks by their transaction's start, as it is stored. One transaction may
        hold millions, and this shows whether any is old without looking at each of them."""

    def __len__(self) -> int:
        return len(self.headers)

    def put(self, cell: bytes, record: bytes) -> None:
        self.put_all(((cell, record),))

    def put_all(self, locks: Iterable[tuple[bytes, bytes]]) -> None:
        """Puts the locks of a batch: cells, each at most once, and records."""
        headers, starts, added = self.headers, self._starts, []
        for cell, record in locks:
            before = headers.get(cell)
            if before is None:
                added.append(cell)
            else:
                self._forget_start(before)
            start = record[:START_TIMESTAMP_BYTES]
            starts[start] = starts.get(start, 0) + 1
            headers[cell] = record[:LOCK_HEADER_BYTES]
        self._order.add_all(added)

    def remove(self, cell: bytes) -> None:
        header = self.headers.pop(cell, None)
        if header is not None:
            self._forget_start(header)
            self._order.remove(cell)

    def has_older(self, below: int) -> bool:
        """Whether a transaction that began below this timestamp has a lock."""
        before = below.to_bytes(START_TIMESTAMP_BYTES, "big")
        # They may be a million, of as many clients, and no step of Python's is spent on each.
        return min(self._starts, default=before) < before

    def _forget_start(self, header: bytes) -> None:
        start = header[:START_TIMESTAMP_BYTES]
        left = self._starts[start] - 1
        if left:
            self._starts[start] = left
        else:
            del self._starts[start]

    def between(
        self, start: bytes, stop: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Cells with start <= cell < stop, and their lock's header, in order. No lock may be added
        or removed while this is iterated."""
        headers = self.headers
        for cell in self._order.between(start, stop, reverse=reverse):
            yield cell, headers[cell]
