"""One run of an observer for one cell, from its snapshot to its commit: the paper's section 2.4.

    begin    the snapshot; the cell and its acknowledgement in one read; is there anything to do?
    (call)   the observer's function, in this transaction
    commit   its writes and the acknowledgement, at once
    (later)  the notifications that the snapshot contains are deleted, in the background

Rules, each with the failure that it prevents:
- It runs only if the newest put or delete of the cell is newer than the last acknowledged snapshot.
  Without that, two workers that found the same notification would both do the work.
- The acknowledgement is in the same transaction. Written before, a crash loses the work; written
  after, a crash does it twice.
- Only notifications known to exist and not newer than the snapshot are deleted, and only once that
  is committed which has answered them. A newer one tells of a change that the snapshot lacks.
- When nobody knows whether the run has committed, nothing is deleted: the notification is found
  again, and the acknowledgement tells.
- Weak observers acknowledge nothing: their notifications come without a change.
"""

from __future__ import annotations

from percolator.errors import CellAddress, UsageError
from percolator.observers.acknowledgement import NOTHING_SEEN, Acknowledgement
from percolator.observers.change import Change, look
from percolator.observers.client import Client, RunTransaction
from percolator.observers.dead_letter import DeadLetters
from percolator.observers.work import Work
from percolator.timestamps import SEQUENCE_BITS


class ObserverRun:
    """One attempt."""

    __slots__ = ("_client", "_dead_letters", "_work", "change", "start", "transaction")

    def __init__(self, client: Client, dead_letters: DeadLetters, work: Work) -> None:
        self._client = client
        self._dead_letters = dead_letters
        self._work = work
        self.transaction: RunTransaction = client.begin(work)
        self.start = 0
        """The snapshot; 0 as long as it has none."""
        self.change = Change(None, NOTHING_SEEN)
        """The cell, in the snapshot."""

    async def begin(self) -> bool:
        """Whether there is anything to run for. If not, the notifications are answered already."""
        work, transaction = self._work, self.transaction
        self.start = await transaction.timestamp()
        change = self.change = await look(self._client, work, transaction, self.start)
        address = CellAddress(work.watched.table_id, work.row, work.column)
        transaction.remember(address, change.cell)
        is_weak = work.watched.observer.weak
        if not is_weak and change.is_answered:
            transaction.rollback()
            return False
        # Before the function is called: whatever that does, its writes go with this or not at all.
        if change.acknowledged.has_dead_letter:
            self._dead_letters.clear_away(transaction, work)
        if change.acknowledged.has_dead_letter or not is_weak:
            now = Acknowledgement(0 if is_weak else self.start)
            transaction.writes.put(
                work.watched.acknowledgement(work.row, work.column), now.encode()
            )
        return True

    async def commit(self) -> float | None:
        """Returns how long after the change it committed; None when nothing was written.

        Raises what made it impossible; of these only `OutcomeUnknown` leaves open whether it did.
        """
        transaction = self.transaction
        if not transaction.ended:
            await transaction.commit()
        elif transaction.commit_timestamp is None and transaction.writes.cells:
            raise UsageError("the observer has ended its own transaction, without committing it")
        return self._latency()

    def _latency(self) -> float | None:
        """Both timestamps are the oracle's: no machine's clock matters."""
        commit = self.transaction.commit_timestamp
        if commit is None:
            return None
        waited = (commit >> SEQUENCE_BITS) - (min(self._work.timestamps) >> SEQUENCE_BITS)
        return max(waited, 0) / 1000
