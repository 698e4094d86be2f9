"""One run of an observer for one cell, from its snapshot to its commit: the paper's section 2.4.

    begin    take a snapshot; read the cell and its acknowledgement; is there anything to do?
    (call)   call the observer's function, in this transaction
    commit   commit its writes and the acknowledgement together
    (later)  delete the notifications that the snapshot covers, in the background

Rules, each with the failure that it prevents:
- It runs only if the newest put or delete of the cell is newer than the last acknowledged snapshot.
  Otherwise, two workers that found the same notification would both do the work.
- The acknowledgement is in the same transaction. If it were written before, a crash would lose the
  work; if after, a crash would repeat it.
- Only notifications that are known and not newer than the snapshot are deleted, and only once the
  run that handled them has committed. A newer one is about a change that the snapshot lacks.
- If it is unknown whether the run has committed, nothing is deleted: the notification is found
  again, and the acknowledgement says whether it was handled.
- If deletes do not wake the observer and the snapshot shows no value, every change that it covers
  counts as handled: earlier values are gone. Nothing is written, since each look finds the same
  until the cell is written again. Only a dead letter of an earlier change is deleted.
- Weak observers acknowledge nothing, since their notifications come without a change.
"""

from __future__ import annotations

from percolator.errors import UsageError
from percolator.observers.context import RunTransaction, WorkerContext
from percolator.observers.running.acknowledgement import NOTHING_SEEN, Acknowledgement
from percolator.observers.running.dead_letter import DeadLetters
from percolator.observers.running.watched_cell import WatchedCell, look
from percolator.observers.work import Work
from percolator.protocol.known_row import KnownRow
from percolator.timestamps import SEQUENCE_BITS


class ObserverRun:
    """One attempt to run an observer for a cell."""

    __slots__ = ("_context", "_dead_letters", "_row", "_work", "cell", "start", "transaction")

    def __init__(self, context: WorkerContext, dead_letters: DeadLetters, work: Work) -> None:
        self._context = context
        self._dead_letters = dead_letters
        self._work = work
        self._row: KnownRow | None = None
        self.transaction: RunTransaction = context.begin(work)
        self.start = 0
        """The snapshot's timestamp; 0 until it has one."""
        self.cell = WatchedCell(None, NOTHING_SEEN)
        """The cell as the snapshot shows it."""

    async def begin(self) -> bool:
        """Whether there is anything to do. If not, the notifications have been handled already, or
        the cell was deleted and deletes do not wake the observer."""
        work, transaction = self._work, self.transaction
        self.start = await transaction.timestamp()
        cell = self.cell = await look(self._context, work, transaction, self.start)
        # If the table was dropped and created again, the function must not write into the new one.
        watched, internal = work.watched, transaction.internal
        internal.bind(watched.observer.table.name, watched.table_id)
        self._row = cell.known_row(work)
        internal.know(self._row)
        is_weak = watched.observer.weak
        is_unwanted = not (watched.observer.deletes or cell.has_value)
        has_dead_letter = cell.acknowledged.has_dead_letter
        if (not is_weak and cell.is_handled) or (is_unwanted and not has_dead_letter):
            transaction.rollback()
            return False
        # Written before the function is called, so that its writes cannot be committed without it,
        # whatever the function does.
        if has_dead_letter:
            self._dead_letters.clear(transaction, work)
        if has_dead_letter or not is_weak:
            now = Acknowledgement(0 if is_weak else self.start)
            internal.writes.put(watched.acknowledgement(work.row, work.column), now.encode())
        if is_unwanted:
            await transaction.commit()
        return not is_unwanted

    async def commit(self) -> float | None:
        """Commits. Returns the seconds from the change to the commit; None if nothing was written.

        Raises the error that prevented it; only `OutcomeUnknown` leaves open whether it committed.
        """
        transaction = self.transaction
        if self._row is not None:
            self._work.watched.note_read(self._row.read)
        if not transaction.ended:
            await transaction.commit()
        elif transaction.commit_timestamp is None and transaction.internal.writes.cells:
            raise UsageError("the observer ended its own transaction without committing it")
        return self._latency()

    def _latency(self) -> float | None:
        """The seconds from the change to the commit. Both timestamps are the oracle's, so the
        clocks of machines do not matter."""
        commit = self.transaction.commit_timestamp
        if commit is None:
            return None
        waited = (commit >> SEQUENCE_BITS) - (min(self._work.timestamps) >> SEQUENCE_BITS)
        return max(waited, 0) / 1000
