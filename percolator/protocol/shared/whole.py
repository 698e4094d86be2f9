"""The decision on a shared transaction: its driver commits the chosen parts, or none.

All chosen parts become committed with one group of mutations of one row, at one timestamp, and with
them the transaction is closed (closing.py): that comes first in the group and its answers. While
the group is unanswered, the only way on is the same group again: with another timestamp, parts of
the transaction could end up at two. The one exception is as for other transactions: a part that a
reader has pushed above the timestamp can never be committed at it, and so neither can the group.

Even if the answer is that the group was not executed, a copy of it may arrive late, at a server
that has the tablet by then. So once it was sent, only a durable marker, on the transaction or on
one of the parts, proves that they are not committed.

That the transaction is closed as committed says only that some driver has committed it. This one
has succeeded if each of the parts that it has named is committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    InvariantViolation,
    OtherDriverCommitted,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    TimestampRegression,
)
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    LOCK_HEADER,
    WRITE_HEADER,
    timestamp_bytes,
)
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.protocol.shared.announcing import Observed, announce_to_newer
from percolator.protocol.shared.closing import close
from percolator.protocol.shared.names import CLOSED, Job, PartKey
from percolator.protocol.shared.rolling_back import require_committed, roll_back_part
from percolator.routing.cells import APPLIED, Answer, Groups, Refused
from percolator.v1.cells_pb2 import SPACE_LOCK
from percolator.v1.tabletserver_pb2 import Mutation


class Whole:
    """The decision on one shared transaction, made by its driver. Only one call at a time: a second
    one would take another timestamp while the first one's group is on its way."""

    def __init__(
        self,
        env: Environment,
        groups: Groups,
        job: Job,
        parts: Sequence[PartKey],
        announced: Mapping[int, Observed],
    ) -> None:
        """`parts`: those that are committed; at least one. `announced`: by table, the observers to
        which all of their cells were announced."""
        self._env = env
        self._groups = groups
        self._job = job
        self._parts = parts
        self._announced = announced
        self._commit = 0
        self._sent = False
        """A commit was sent, and it is not known whether it was applied."""
        self.is_out = False
        """A commit was sent, and a copy of it may still be executed, whatever was answered."""

    async def commit(self, deadline: float) -> int:
        """Returns the commit timestamp. Raises `ConflictError` when the transaction was rolled
        back, `OtherDriverCommitted` when it was committed without a part of these, and
        `OutcomeUnknown` when it is not known; then this may be called again. After any other error,
        too, it may still be committed if `is_out`, until a marker is durable."""
        try:
            commit = await self._reach(deadline)
        except PercolatorError as problem:
            if not self._sent or isinstance(problem, ConflictError | OtherDriverCommitted):
                raise
            raise self.unknown(problem) from problem
        self._sent = self.is_out = False
        for part in self._parts:
            self._env.verdicts.put(part.start, commit)
        return commit

    def unknown(self, problem: PercolatorError) -> OutcomeUnknown:
        """The error for a caller who cannot be told the outcome because of this problem."""
        return OutcomeUnknown(
            f"could not find out whether the shared transaction has committed: {problem}",
            start_timestamp=self._parts[0].start,
            primary=self._job.primary_of(self._parts[0]),
        )

    async def _reach(self, deadline: float) -> int:
        env = self._env
        backoff = env.backoff()
        while True:
            if not self._commit:
                commit = await self._new_timestamp(deadline)
                await self._renew_announcement(deadline)
                self._commit = commit
            commit = self._commit
            sent_before, self._sent = self._sent, True
            self.is_out = True
            try:
                answers = await self._groups.mutate_together(
                    self._job.table_id, self._steps(commit), deadline
                )
            except PercolatorError as error:
                if error.retry is not Retry.UNKNOWN:
                    self._sent = sent_before
                    raise
                if not await backoff.pause(deadline):
                    raise
                continue
            if all(answer is APPLIED for answer in answers):
                return commit
            self._sent = sent_before
            committed = self._committed_before(answers)
            if committed:
                self._sent = True  # until each part has been asked for, this may be its commit
                await require_committed(env, self._job, self._parts, committed, deadline)
                return committed
            self._require_open(answers[0])
            lost = self._lost(answers[1:], commit)
            if lost is not None:
                return await self._give_up(lost, deadline)
            # A part was pushed above the timestamp: nothing that was sent can still be applied.
            self._sent = self.is_out = False
            self._commit = 0
            if not await backoff.pause(deadline):
                raise DeadlineExceeded(
                    "readers kept pushing the shared transaction's commit timestamp until the "
                    "deadline; commit again"
                )

    async def _new_timestamp(self, deadline: float) -> int:
        """Never before the last part was named: a reader above it might have missed a lock."""
        left = deadline - self._env.now()
        if left <= 0:
            raise DeadlineExceeded("no time was left to commit")
        commit = await self._env.timestamps.get(timeout_seconds=left)
        newest = max(part.start for part in self._parts)
        if commit <= newest:
            raise TimestampRegression(f"the oracle gave {commit} after {newest} was in use")
        return commit

    async def _renew_announcement(self, deadline: float) -> None:
        """Before a commit timestamp is used, and after it was received: observers that were
        registered below it have to be notified."""
        store = self._env.announcing
        if store is not None:
            starts = [part.start for part in self._parts]
            self._announced = await announce_to_newer(
                self._env, store, starts, self._announced, deadline
            )

    def _steps(self, commit: int) -> list[Mutation]:
        found = [close(self._job, commit)]
        for part in self._parts:
            record = WRITE_HEADER.pack(part.start, KIND_LOCK_ONLY)
            found.append(steps.commit_part(self._job.row, part.column, part.start, commit, record))
        return found

    def _committed_before(self, answers: Sequence[Answer]) -> int:
        """The commit timestamp if the transaction, or a part of it, is committed, else 0."""
        commits = {
            answer.offender.timestamp
            for answer in answers
            if isinstance(answer, Refused) and answer.condition == steps.OWN_COMMIT
        }
        if len(commits) > 1:
            raise InvariantViolation(
                f"parts of one shared transaction are committed at {sorted(commits)}"
            )
        return int(commits.pop()) if commits else 0

    def _require_open(self, answer: Answer) -> None:
        """Raises if the transaction was rolled back, or if sending this again is useless."""
        if isinstance(answer, Refused):
            self._sent = self.is_out = False
            raise ConflictError(
                "the shared transaction was rolled back: none of it is committed",
                cell=CellAddress(self._job.table_id, self._job.row, CLOSED),
                start_timestamp=self._job.began,
            )
        if isinstance(answer, PercolatorError) and answer.retry is Retry.USELESS:
            raise answer

    def _lost(self, answers: Sequence[Answer], commit: int) -> PartKey | None:
        """A part that was rolled back, or has lost its lock. Raises if sending is useless."""
        for part, answer in zip(self._parts, answers, strict=True):
            if not isinstance(answer, Refused):
                if isinstance(answer, PercolatorError) and answer.retry is Retry.USELESS:
                    raise answer
                continue
            cell = answer.cell
            if answer.condition == steps.OWN_ROLLBACK or cell is None or cell.space != SPACE_LOCK:
                return part
            if not cell.value.startswith(timestamp_bytes(part.start)):
                return part
            _, min_commit, _, _ = LOCK_HEADER.unpack_from(cell.value)
            if min_commit <= commit:
                raise InvariantViolation(f"the lock of {part} was refused without a reason")
        return None

    async def _give_up(self, lost: PartKey, deadline: float) -> int:
        """Makes sure that it is rolled back. The absence of a lock alone proves nothing."""
        primary = self._job.primary_of(lost)
        commit = await roll_back_part(self._env, primary, lost.start, deadline)
        if commit:
            self._sent = True
            await require_committed(self._env, self._job, self._parts, commit, deadline)
            return commit
        self._sent = self.is_out = False
        raise ConflictError(
            f"a part of the shared transaction (begun at {lost.start}) was presumed dead, or "
            "replaced by a later attempt, and rolled back: none of it is committed",
            cell=primary,
            start_timestamp=lost.start,
        )
