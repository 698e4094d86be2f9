"""Committing with one message, when all that a transaction writes is in one tablet.

The tablet does what prewrite and commit do, for all cells at one moment: it checks what a prewrite
checks, keeps everything else away from the cells, fetches the commit timestamp, and writes. No lock
is ever stored. If it cannot, two phases follow.

Rules, each with the failure that it prevents:
- While a message is unanswered, the only way on is the same message again, or the roll-back of the
  primary. In two phases, the transaction could be given up, and reported as such, while the message
  is still in the network and commits it.
- Even after an answer, a copy of the message may arrive late: networks repeat. It is harmless to
  two phases, since it is stopped by their locks, their commit and their marker. But until one of
  these is durable, it may still commit. So once a message was sent, a transaction counts as aborted
  only when its marker is durable, or when another commit above its start stops it forever.
- A lock of the transaction itself was set by another committer, in two phases. Then only two phases
  remain for us, too.
"""

from __future__ import annotations

from collections.abc import Awaitable

from percolator.errors import (
    CellAddress,
    InvalidArgument,
    Overloaded,
    PercolatorError,
    PermissionDenied,
    Retry,
    SchemaChanged,
    SchemaError,
    SnapshotTooOld,
    Unauthenticated,
    UsageError,
)
from percolator.protocol import conflicts, steps
from percolator.protocol.commit_message import commit_message
from percolator.protocol.environment import Environment
from percolator.protocol.lock_waiting import LockWaiting
from percolator.protocol.met_lock import MetLock
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.same_codecs import require_same_codecs
from percolator.protocol.same_writes import is_own_lock, require_same
from percolator.protocol.statistics import Statistics
from percolator.protocol.write_steps import WriteSteps
from percolator.routing.cells import CommitAnswer, NotInOneRound, NotSent, Refused
from percolator.routing.table_info import TableSchema
from percolator.wire.backoff import asked_pause_seconds

_NO_COPY_IS_READ = (NotSent, UsageError, PermissionDenied, Unauthenticated)
"""It was not sent at all; or its sender was refused, before anything of it was read."""
_NO_COPY_IS_EXECUTED = (SnapshotTooOld, SchemaError, InvalidArgument)
"""Neither now nor later: safe points only rise, tables do not come back, and each copy says the
same. This is as final as a marker, except for what an unanswered message may have done."""


class OneRound:
    """The message that commits one transaction, and what is known about it."""

    __slots__ = (
        "_cleanup",
        "_env",
        "_is_followed",
        "_statistics",
        "_was_out",
        "_was_unanswered",
        "_write",
        "is_lost",
        "is_out",
        "is_unanswered",
        "is_whole",
    )

    def __init__(
        self,
        env: Environment,
        cleanup: Cleanup,
        write: WriteSteps,
        statistics: Statistics,
        is_followed: bool,
    ) -> None:
        self._env = env
        self._cleanup = cleanup
        self._write = write
        self._statistics = statistics
        self._is_followed = is_followed
        self.is_out = False
        """The message was sent: a copy of it may commit the transaction as long as no lock, commit
        or marker of it is durable."""
        self.is_unanswered = False
        """It was sent, and may have been executed without our knowing."""
        self._was_out = self._was_unanswered = False
        """The same of the messages before the last one."""
        self.is_whole = False
        """It was answered with the commit: no cell has a lock left."""
        self.is_lost = False
        """Another transaction committed a cell above our start: this stops every copy forever."""

    async def run(self, answer: CommitAnswer, deadline: float) -> int:
        """Goes on after the first answer, with the same message again where that makes sense.
        Returns the commit timestamp, or 0 if it takes two phases.

        Raises conflicts, and what prevents the commit for good although a message is unanswered.
        """
        write = self._write
        met: list[MetLock] = []
        waiting: LockWaiting | None = None
        while not isinstance(answer, int):
            problem: PercolatorError | None = None
            if isinstance(answer, Refused):
                found = answer.offender
                cell = CellAddress(write.primary.table_id, found.row, found.column)
                if answer.condition == steps.OWN_COMMIT:
                    require_same(write, cell, answer)
                    return found.timestamp
                if not is_own_lock(write, cell, answer):
                    self.is_lost = answer.condition == steps.PREWRITE_NEWER_COMMIT
                    conflict = conflicts.obstacle(self._env, write, cell, answer, met)
                    if conflict is not None:
                        raise conflict
                elif not self.is_unanswered:
                    return 0  # another committer is at it, in two phases
            elif answer.retry is Retry.UNKNOWN:
                problem = answer
            elif isinstance(answer, SchemaChanged):
                await self._env.schemas.refresh(write.primary.table_id, deadline)
            elif isinstance(answer, Overloaded):
                await self._leave_alone(answer, deadline)
            elif not self.is_unanswered:
                return 0
            elif isinstance(answer, NotInOneRound):
                # The tablet was split while an answer was missing. Two phases are ruled out: only
                # the marker decides.
                raise conflicts.given_up(write)
            elif answer.retry is Retry.USELESS:
                # Resending is useless too; the attempt to write the marker will show the outcome.
                raise answer
            waiting = waiting or LockWaiting(self._env, write.start, self._statistics)
            await waiting.settle(met, self._cleanup, deadline)
            await waiting.pause(problem, deadline)
            met.clear()
            schema = await self._env.schema(write.primary.table_id, deadline)
            answer = self.heard(await self.send(schema, deadline))
        return answer

    async def _leave_alone(self, overloaded: Overloaded, deadline: float) -> None:
        """Waits as long as the server asks for. In two phases it would have more to do."""
        seconds = asked_pause_seconds(self._env.random, overloaded.retry_after_seconds)
        left = deadline - self._env.now()
        if seconds >= left and not self.is_unanswered:
            raise overloaded  # now, while there is time for the marker
        await self._env.clock.sleep(max(min(seconds, left), 0.0))

    def send(self, schema: TableSchema, deadline: float) -> Awaitable[CommitAnswer]:
        """Sends the message, once. Its answer has to be given to `heard`."""
        env, write = self._env, self._write
        require_same_codecs(write.writes, write.tables, env.schemas)
        message = commit_message(
            write.start,
            write.cells,
            write.writes,
            write.inline_bytes_max,
            schema,
            write.weak_notifications,
            is_followed=self._is_followed,
        )
        self.sent()
        return env.cells.commit(message, deadline)

    def sent(self) -> None:
        """Notes that the message leaves: from here on it may be executed, even if the caller is
        cancelled."""
        self._was_out, self._was_unanswered = self.is_out, self.is_unanswered
        self.is_out = self.is_unanswered = True

    def heard(self, answer: CommitAnswer) -> CommitAnswer:
        """Notes what the answer says about the message, and returns it."""
        if isinstance(answer, int):
            self.is_whole = True
        if isinstance(answer, _NO_COPY_IS_READ):
            self.is_out = self._was_out
        else:
            if isinstance(answer, _NO_COPY_IS_EXECUTED):
                self.is_out = self._was_unanswered
            self._statistics.round_trips += 1
        if not isinstance(answer, PercolatorError) or answer.retry is not Retry.UNKNOWN:
            self.is_unanswered = self._was_unanswered
        return answer

    def ended(self) -> None:
        """The outcome is final: late copies can no longer change it."""
        self.is_out = self.is_unanswered = False
