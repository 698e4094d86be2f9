"""Where the newest change of a cell is, so that readers need not walk over lock-only records.

A lock-only commit changes nothing, and readers want what is below it. A cell that is locked two
hundred times a second collects 720,000 such records within an hour of history. So each of them
names the commit timestamp of the newest put or deletion below it, or 0 if there was none, and a
reader that meets one gets there with a single seek. (TiKV calls this last_change.)

A record says that *no put or deletion of its cell lies between the two timestamps*. It does not say
that the record it names still exists. Collection may delete that record; a reader that seeks there
then finds the next one below it, which is correct.

* The tablet fills in the timestamp when it stores the record. A client cannot know it.
* A record would become false if a put or deletion were later committed between the two timestamps.
  Locks keep the commits of a cell in order, and the judge refuses anything that is out of order.
* Records in the earlier format name nothing. Readers step over them, in slices.

For cells that were locked or read recently, the tablet keeps the newest change in memory. Then a
read costs one seek, as for any other cell, and the next lock-only commit costs none. Memory forgets
a cell *before* its next commit is written. The storage shows that commit, and that its lock is
gone, before the writer hears that its write has ended; a reader in between would be sent below
a commit that it has to see.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from percolator.formats.records import KIND_LOCK_ONLY, WRITE_KIND_OFFSET, last_change
from percolator.tablet.keys import W, inverted, timestamp_of
from percolator.world import Cursor

STEPS_MAX = 64
"""How many records that name nothing are stepped over while a commit waits. If there are more, the
new record names nothing either, until a read has found the change or they are collected."""


class LastChanges:
    """The newest change of some cells, as `RecentWrites` keeps the newest commit.

    Invariant: the storage shows no put or deletion of a cell above the timestamp kept for it.
    """

    def __init__(self, cells_max: int) -> None:
        self._cells_max = cells_max
        self.inverted: dict[bytes, bytes] = {}
        """Timestamps as encoded in keys, by cell. Public for lookups on the hottest path."""
        self.published = 0
        """The number of batches with commits. An older view lacks the commits of the last one."""
        self._being_written: Collection[bytes] = ()
        """The cells whose commits are on their way to the disk, and may show at any moment."""

    def of(self, cell: bytes) -> int | None:
        """The commit timestamp, or 0 if the cell was never changed; None if it is not known."""
        found = self.inverted.get(cell)
        return None if found is None else timestamp_of(found)

    def learn(self, cell: bytes, timestamp: int) -> None:
        """Records a change that was read in a view that shows everything published so far."""
        if cell in self._being_written:
            return
        if len(self.inverted) >= self._cells_max:
            self.inverted.clear()
        self.inverted[cell] = inverted(timestamp)

    def begin(self, committed: Collection[bytes]) -> None:
        """Forgets the cells with commits in a batch that is about to be written."""
        self._being_written = committed
        if self.inverted:
            for cell in committed:
                self.inverted.pop(cell, None)

    def publish(self, under_locks: Mapping[bytes, int]) -> None:
        """Records that the batch is durable, and the changes below its lock-only commits."""
        self.published += 1
        self._being_written = ()
        for cell, timestamp in under_locks.items():
            self.learn(cell, timestamp)

    def forget(self) -> None:
        """Forgets everything, because cells may have been changed without being published."""
        self.published += 1
        self.inverted.clear()


def newest_change_below(cursor: Cursor, cell: bytes, timestamp: int) -> int | None:
    """The commit timestamp of the newest put or deletion below this one, or 0 if there is none;
    None if too many records that name nothing are in the way."""
    prefix = W + cell
    cursor.seek(prefix + inverted(timestamp - 1))
    for _ in range(STEPS_MAX):
        key, record = cursor.item()
        if not key.startswith(prefix):
            return 0
        if record[WRITE_KIND_OFFSET] != KIND_LOCK_ONLY:
            return timestamp_of(key)
        named = last_change(record)
        if named is not None:
            return named
        cursor.next()
    return None


def lies_under_a_lock(cursor: Cursor, cell: bytes, timestamp: int) -> bool:
    """Whether the next commit above this timestamp is lock-only and names what is below it."""
    prefix = W + cell
    cursor.seek(prefix + inverted(timestamp))
    cursor.prev()
    key, record = cursor.item()
    if not key.startswith(prefix) or record[WRITE_KIND_OFFSET] != KIND_LOCK_ONLY:
        return False
    named = last_change(record)
    return named is not None and named < timestamp
