"""The driver of a shared transaction commits the participants that it has chosen, or none.

All chosen participants become committed with one group of mutations of one row, at one timestamp,
and with them the transaction is closed (participant.py): that comes first in the group and its
answers. While the group is unanswered, the only way on is the same group again: with another
timestamp, participants could be committed at two. The one exception is as for other transactions: a
participant that a reader has pushed above the timestamp can never be committed at it, and so
neither can the group.

Even if the answer is that the group was not executed, a copy of it may arrive late, at a server
that has the tablet by then. So once it was sent, only a durable marker, on the transaction or on
one of the participants, proves that they are not committed.

That the transaction is closed as committed says only that some driver has committed it: its ticket
may be in the hands of two, and the first of them has committed the participants that it had chosen.
This one has succeeded if each of the participants that it has named is committed. Those of the
entries that it has added itself do not matter: the other one has added its own for these tasks. But
then they are rolled back, and neither this client nor tablets may take them for committed.

Where the store asks for it (protocol/announcing.py says why), the driver knows from the receipts to
which observers each table's cells were announced. An observer that was registered since, which the
epoch of the commit timestamp tells, gets its intents from the driver before it commits. What the
participants have locked is found by a scan of the table: none of their locks can go before the
commit, or they cannot be committed. If a table is gone by then, nothing is committed, and neither
if it has other indexes than those whose entries were added (entries.py): no tablet says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from percolator.codecs.indexes import IndexDefinition
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
from percolator.formats.records import KIND_LOCK_ONLY, WRITE_HEADER
from percolator.protocol import steps
from percolator.protocol.announcing import learn_schemas
from percolator.protocol.cleanup import lock_in
from percolator.protocol.commit import Sent
from percolator.protocol.environment import ROLLED_BACK, Environment
from percolator.protocol.shared.participant import (
    CLOSED,
    Job,
    Observed,
    ParticipantKey,
    ParticipantName,
    locks_of,
    observed_in,
    roll_back,
)
from percolator.routing.cells import APPLIED, Answer, Groups, Refused
from percolator.v1.tabletserver_pb2 import Mutation


class SharedCommit:
    """The commit of one shared transaction, by its driver. Only one call at a time: a second one
    would take another timestamp while the first one's group is on its way."""

    def __init__(
        self,
        env: Environment,
        groups: Groups,
        job: Job,
        participants: Sequence[ParticipantKey],
        announced: Mapping[int, Observed],
        indexes: Mapping[int, tuple[IndexDefinition, ...]],
    ) -> None:
        """`participants`: those that are committed; at least one. `announced`: by table, the
        observers to which all of their cells were announced. `indexes`: by table, those whose
        entries the driver has added."""
        self._env = env
        self._groups = groups
        self._job = job
        self._participants = participants
        self._announced = dict(announced)
        self._indexes = indexes
        self._commit: int | None = None
        """The commit timestamp that was taken for it."""
        self.sent = Sent.NOTHING

    async def commit(self, deadline: float) -> int:
        """Returns the commit timestamp. Raises `ConflictError` when the transaction was rolled
        back, `OtherDriverCommitted` when it was committed without one of these participants, and
        `OutcomeUnknown` when it is not known; then this may be called again. After any other error,
        too, it may still be committed unless nothing is `sent`, until a marker is durable."""
        try:
            commit_ts = await self._reach(deadline)
        except PercolatorError as problem:
            is_decided = isinstance(problem, ConflictError | OtherDriverCommitted)
            if self.sent is Sent.UNANSWERED and not is_decided:
                raise self.unknown(problem) from problem
            raise
        self.sent = Sent.NOTHING
        return commit_ts

    def unknown(self, problem: PercolatorError) -> OutcomeUnknown:
        """The error for a caller who cannot be told the outcome because of this problem."""
        return OutcomeUnknown(
            f"could not find out whether the shared transaction has committed: {problem}",
            start_timestamp=self._participants[0].start,
            primary=self._job.primary_of(self._participants[0]),
        )

    async def _reach(self, deadline: float) -> int:
        backoff = self._env.backoff()
        while True:
            if self._commit is None:
                commit_ts = await self._new_timestamp(deadline)
                await self._renew_announcement(deadline)
                self._commit = commit_ts
            commit_ts = self._commit
            sent_before, self.sent = self.sent, Sent.UNANSWERED
            try:
                answers = await self._groups.mutate_together(
                    self._job.table_id, self._steps(commit_ts), deadline
                )
            except PercolatorError as error:
                if error.retry is not Retry.UNKNOWN:
                    self.sent = sent_before.after_answer()
                    raise
                if not await backoff.pause(deadline):
                    raise
                continue
            if all(answer is APPLIED for answer in answers):
                for participant in self._participants:
                    self._env.verdicts.put(participant.start, commit_ts)
                return commit_ts
            self.sent = sent_before.after_answer()
            committed = self._committed_before(answers)
            if committed is not None:
                return await self._require_committed(committed, deadline)
            self._require_open(answers[0])
            lost = self._lost(answers[1:], commit_ts)
            if lost is not None:
                return await self._give_up(lost, deadline)
            # One was pushed above the timestamp: nothing that was sent can still be applied.
            self.sent = Sent.NOTHING
            self._commit = None
            if not await backoff.pause(deadline):
                raise DeadlineExceeded(
                    "readers kept pushing the shared transaction's commit timestamp until the "
                    "deadline; commit again"
                )

    async def _new_timestamp(self, deadline: float) -> int:
        """Never before the last participant was named: a reader above it might have missed a
        lock."""
        left = deadline - self._env.now()
        if left <= 0:
            raise DeadlineExceeded("no time was left to commit")
        commit_ts = await self._env.timestamps.get(timeout_seconds=left)
        newest = max(participant.start for participant in self._participants)
        if commit_ts <= newest:
            raise TimestampRegression(f"the oracle gave {commit_ts} after {newest} was in use")
        return commit_ts

    async def _renew_announcement(self, deadline: float) -> None:
        """Announces what is locked to observers that were registered meanwhile. Called after the
        commit timestamp was received, and before it is used: observers that were registered below
        it have to be notified. Raises `SchemaError` if a table is gone, and `ConflictError` if it
        has other indexes by now."""
        store = self._env.announcing
        if store is None:
            return
        await learn_schemas(self._env, self._announced, deadline)
        starts = frozenset(participant.start for participant in self._participants)
        for table_id, known in list(self._announced.items()):
            schema = await self._env.schema(table_id, deadline)
            if schema.indexes != self._indexes.get(table_id, ()):
                raise ConflictError(
                    f"the indexes of {schema.codecs.table!r} were changed while a shared "
                    "transaction was written to it",
                    start_timestamp=self._participants[0].start,
                )
            missing = observed_in(schema) - known
            if missing:
                await store.announce_locked(table_id, missing, starts, deadline)
                self._announced[table_id] = known | missing

    def _steps(self, commit_ts: int) -> list[Mutation]:
        job = self._job
        record = WRITE_HEADER.pack(job.began, KIND_LOCK_ONLY)
        found = [steps.close_committed(job.row, CLOSED, job.began, commit_ts, record)]
        for start, column in self._participants:
            record = WRITE_HEADER.pack(start, KIND_LOCK_ONLY)
            found.append(steps.commit_part(job.row, column, start, commit_ts, record))
        return found

    def _committed_before(self, answers: Sequence[Answer]) -> int | None:
        """The commit timestamp if the transaction, or a participant, is committed, else None."""
        commits = {
            answer.offender.timestamp
            for answer in answers
            if isinstance(answer, Refused) and answer.condition == steps.OWN_COMMIT
        }
        if len(commits) > 1:
            raise InvariantViolation(
                f"participants in one shared transaction are committed at {sorted(commits)}"
            )
        return commits.pop() if commits else None

    def _require_open(self, answer: Answer) -> None:
        """Raises if the transaction was rolled back, or if sending this again is useless."""
        if isinstance(answer, Refused):
            self.sent = Sent.NOTHING
            raise ConflictError(
                "the shared transaction was rolled back: none of it is committed",
                cell=CellAddress(self._job.table_id, self._job.row, CLOSED),
                start_timestamp=self._job.began,
            )
        if isinstance(answer, PercolatorError) and answer.retry is Retry.USELESS:
            raise answer

    def _lost(self, answers: Sequence[Answer], commit_ts: int) -> ParticipantKey | None:
        """A participant that was rolled back, or has lost its lock. Raises if sending is
        useless."""
        for participant, answer in zip(self._participants, answers, strict=True):
            if isinstance(answer, PercolatorError) and answer.retry is Retry.USELESS:
                raise answer
            if isinstance(answer, Refused):
                lock = lock_in(answer, participant.start)
                if lock is None:
                    return participant
                if lock.min_commit_timestamp <= commit_ts:
                    raise InvariantViolation(
                        f"the lock of {participant} was refused without a reason"
                    )
        return None

    async def _give_up(self, lost: ParticipantKey, deadline: float) -> int:
        """Makes sure that it is rolled back. The absence of a lock alone proves nothing."""
        primary = self._job.primary_of(lost)
        (commit_ts,) = await roll_back(self._env, [(primary, lost.start)], deadline)
        if commit_ts != ROLLED_BACK:
            return await self._require_committed(commit_ts, deadline)
        self.sent = Sent.NOTHING
        raise ConflictError(
            f"a participant in the shared transaction (begun at {lost.start}) was presumed dead, "
            "or replaced by a later attempt, and rolled back: none of it is committed",
            cell=primary,
            start_timestamp=lost.start,
        )

    async def _require_committed(self, commit_ts: int, deadline: float) -> int:
        # Until each participant has been asked for, this may be its commit.
        self.sent = Sent.UNANSWERED
        await require_committed(self._env, self._job, self._participants, commit_ts, deadline)
        return commit_ts


def announced_by_all(attempts: Iterable[Mapping[int, Observed]]) -> dict[int, Observed]:
    """By table, the observers to which all attempts that write it have announced their cells."""
    found: dict[int, Observed] = {}
    for announced in attempts:
        for table_id, observed in announced.items():
            found[table_id] = found.get(table_id, observed) & observed
    return found


async def roll_back_all(
    env: Environment, job: Job, named: Sequence[ParticipantKey], deadline: float
) -> int:
    """Closes the transaction, and rolls back every participant that was begun. Returns ROLLED_BACK,
    or the commit timestamp if the transaction turns out to be committed: then nothing is undone.

    `named` are participants that are known already, such as those that may have been sent to be
    committed. Raises `OtherDriverCommitted` if the transaction was committed without one of them.
    """
    closed = CellAddress(job.table_id, job.row, CLOSED)
    (commit_ts,) = await roll_back(env, [(closed, job.began)], deadline)
    if commit_ts != ROLLED_BACK:
        await require_committed(env, job, named, commit_ts, deadline)
        return commit_ts
    await roll_back(env, [(job.primary_of(one), one.start) for one in named], deadline)
    await roll_back_left(env, job, deadline)
    return ROLLED_BACK


async def require_committed(
    env: Environment, job: Job, named: Sequence[ParticipantKey], commit_ts: int, deadline: float
) -> None:
    """Returns if all that these participants of a transaction that was committed have locked for
    tasks is committed with it. Rolls back what is not, which never can be, and raises
    `OtherDriverCommitted`."""
    primaries = [(job.primary_of(one), one.start) for one in named]
    commits = await roll_back(env, primaries, deadline)
    without = [
        str(ParticipantName.decode(one.column))
        for one, own in zip(named, commits, strict=True)
        if not own and not one.is_of_driver
    ]
    if without:
        of = sum(not one.is_of_driver for one in named)
        raise OtherDriverCommitted(commit_ts, without, of=of)


async def roll_back_left(env: Environment, job: Job, deadline: float) -> None:
    """Rolls back the participants of a closed transaction that the driver has not chosen."""
    while found := await locks_of(env, job, deadline):
        await roll_back(env, [(lock.primary, lock.start_timestamp) for lock in found], deadline)
