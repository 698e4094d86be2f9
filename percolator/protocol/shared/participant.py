"""The participants of a shared transaction: their names, their locks, and what keeps them alive.

To all other transactions, a participant is a transaction like any other, with a start timestamp,
locks and a primary. An attempt has one, and a further one each time that others have committed
what it is about to write. The primaries are cells of one row, the row of the shared transaction.

While an attempt writes, its process keeps its participants alive. Once the attempt has finished,
its process may end, so the driver keeps them, and so does every attempt that is still under way:
none of them knows which processes are left. They find them by reading the row (`Keeper`).

The row has one more cell, `closed`, which is never locked and never shown. Like any primary, it has
a commit record or a rollback marker, under the timestamp with which the transaction began. The
driver commits it together with the participants that it has chosen, and a client that rolls the
transaction back writes the marker before anything else. After either, no participant can begin: it
locks its primary in one group with a look at that cell. So the tablet puts it before the end, and
then the client that ends the transaction finds its lock and rolls it back; or after the end, and
then it is refused before it has locked anything. Without that order, a task that continues after
its job has failed would lock rows for as long as a participant lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from percolator.arguments import require_whole
from percolator.errors import (
    CellAddress,
    ConflictError,
    InvalidArgument,
    InvariantViolation,
    PercolatorError,
    Retry,
    UsageError,
)
from percolator.formats.records import (
    ATTEMPT_FINISHED,
    ATTEMPT_OPEN,
    TTL_MILLISECONDS_MAX,
    LockRecord,
    RecordKind,
)
from percolator.protocol import steps
from percolator.protocol.cleanup import lock_in
from percolator.protocol.environment import ROLLED_BACK, Environment
from percolator.protocol.write_set import Margin
from percolator.routing.catalog import TableSchema
from percolator.routing.cells import APPLIED, CellMutation, Groups, Refused, RowRequest
from percolator.tasks import Tasks
from percolator.timestamps import NEWEST, SEQUENCE_BITS
from percolator.v1.tabletserver_pb2 import Mutation, RowRead

_log = logging.getLogger(__name__)

TASK_BYTES_MAX = 128
GENERATION_MAX = 2**31
"""The generation of what a driver adds, above those of all tasks."""

CLOSED = b"closed"
"""The column of the transaction's row that says how it ended. It names no participant."""

Observed = frozenset[tuple[bytes, bytes]]
"""Columns of a table, each with an observer that its changes notify."""


def observed_in(schema: TableSchema) -> Observed:
    """The observed columns of a table under this schema."""
    return frozenset(
        (column, observer) for column, several in schema.observers.items() for observer in several
    )


# ---------------------------------------------------------------------------- names


@dataclass(frozen=True)
class Job:
    """A shared transaction, as all of its processes know it."""

    table_id: int
    """The table of its row."""
    row: bytes
    unchanged_since: int
    """No cell that it writes may have been committed at or above this; 0: by others, while a
    participant is under way."""
    ttl_seconds: float
    """How long a participant outlives the last process that has kept it."""
    began: int
    """A timestamp from before the first participant. No other transaction has it."""

    @property
    def beat_seconds(self) -> float:
        """How long one beat may wait to be sent: two of them fit into a time to live.

        A client waits behind what it writes itself. If a busy cluster takes seconds for that, a
        shorter time would be over with each beat, and the job would seem dead while it works.
        """
        return self.ttl_seconds / 2

    def primary_of(self, participant: ParticipantKey) -> CellAddress:
        return CellAddress(self.table_id, self.row, participant.column)

    def participant_of(self, primary: CellAddress) -> ParticipantName | None:
        """The participant that the primary belongs to; None if that of another transaction."""
        if (primary.table_id, primary.row) != (self.table_id, self.row):
            return None
        return ParticipantName.decode(primary.column)


class ParticipantName(NamedTuple):
    """A participant, as the column of its primary names it."""

    generation: int
    """Counts the runs of all tasks: a later run has a higher generation."""
    attempt: int
    """The start timestamp of the attempt's first participant. A later attempt at a task has a
    higher one."""
    number: int
    """Its place among the attempt's participants."""
    task: str

    def __str__(self) -> str:
        return f"participant {self.number} of task {self.task!r}"

    def encode(self) -> bytes:
        return f"{self.generation}.{self.attempt}.{self.number}.{self.task}".encode()

    @classmethod
    def decode(cls, column: bytes) -> ParticipantName:
        try:
            generation, attempt, number, task = column.decode().split(".", 3)
            return cls(int(generation), int(attempt), int(number), task)
        except ValueError as error:
            raise InvariantViolation(f"{column!r} names no participant: {error}") from error


class ParticipantKey(NamedTuple):
    """The facts that the driver needs of a participant in order to commit it."""

    start: int
    column: bytes

    @property
    def is_of_driver(self) -> bool:
        """True if it has locked what a driver adds to the writes of the tasks."""
        return ParticipantName.decode(self.column).generation == GENERATION_MAX


def check_task(task: object, generation: object) -> None:
    """Raises `InvalidArgument`."""
    try:
        size = len(task.encode()) if isinstance(task, str) else 0
    except UnicodeEncodeError as error:
        raise InvalidArgument("task", f"{task!r} cannot be encoded as UTF-8") from error
    if not 0 < size <= TASK_BYTES_MAX:
        raise InvalidArgument("task", f"expected 1 to {TASK_BYTES_MAX} bytes of text, got {task!r}")
    require_whole(generation, "generation", 0, GENERATION_MAX - 1)


# ---------------------------------------------------------------------------- one participant


class Participant:
    """One participant, from its beginning until its attempt has finished.

    It knows the lock on its primary as the process that has begun it does. Others replace that
    lock, too: readers push its least commit timestamp, and once the attempt has finished, the
    driver and other tasks keep it alive. write_set.py says how it is replaced nevertheless.
    """

    def __init__(
        self, env: Environment, groups: Groups, job: Job, name: ParticipantName, start: int
    ) -> None:
        """Create it when its start timestamp has just been received: its lock lives from then."""
        self._env = env
        self._groups = groups
        self._job = job
        self.name = name
        self.start = start
        self.key = ParticipantKey(start, name.encode())
        self.primary = job.primary_of(self.key)
        self._started_seconds = env.now()
        self._lock = LockRecord(
            start_timestamp=start,
            min_commit_timestamp=start + 1,
            ttl_milliseconds=self._ttl(),
            kind=RecordKind.PUT,
            session=b"",
            primary=self.primary,
            value=ATTEMPT_OPEN,
        )
        self._margin = Margin(env.limits)
        self._has_begun = False
        self._is_finishing = False
        self.is_gone = False
        """The lock is gone: the participant was rolled back by others."""

    async def begin(self, deadline: float) -> None:
        """Locks the primary, unless the transaction has ended. Until this has returned, nothing
        else may be locked for the participant: a transaction that met such a lock could not push
        it."""
        _, row, column = self.primary
        step = steps.prewrite(row, column, self.start, self._lock.encode(), None)
        backoff = self._env.backoff()
        while True:
            try:
                looked, locked = await self._groups.mutate_together(
                    self._job.table_id, (look(self._job), step), deadline
                )
            except PercolatorError as problem:
                # A group that was applied without an answer is refused by its own lock.
                if problem.retry is Retry.USELESS or not await backoff.pause(deadline):
                    raise
                continue
            if isinstance(looked, Refused):
                raise self._too_late(looked)
            if locked is APPLIED or self._learn(locked):
                self._has_begun = True
                return
            if isinstance(locked, Refused):
                raise self.gone()
            for answer in (looked, locked):
                if isinstance(answer, PercolatorError) and answer.retry is Retry.USELESS:
                    raise answer
            if not await backoff.pause(deadline):
                raise locked

    async def finish(self, deadline: float) -> None:
        """Notes that every cell of the attempt is locked. Raises `ConflictError` if the participant
        was rolled back."""
        self._is_finishing = True
        backoff = self._env.backoff()
        while self._lock.value != ATTEMPT_FINISHED:
            try:
                await self._replace(ATTEMPT_FINISHED, deadline)
            except PercolatorError as problem:
                if problem.retry is not Retry.UNKNOWN or not await backoff.pause(deadline):
                    raise

    async def beat(self, deadline: float) -> None:
        """Raises the time to live. Raises `ConflictError` if the participant was rolled back."""
        if not self._has_begun:
            return  # its lock may be on its way: that it is missing would prove nothing
        while not self._is_finishing and not await self._replace(ATTEMPT_OPEN, deadline):
            pass

    async def _replace(self, value: bytes, deadline: float) -> bool:
        """Replaces the lock, or learns what it is now. Returns whether it was replaced."""
        seen, began = self._lock, self._env.now()
        min_commit = self._margin.above(seen.min_commit_timestamp)
        lock = _raised(seen, min_commit, max(self._ttl(), seen.ttl_milliseconds), value)
        (answer,) = await self._env.cells.mutate((_raise_step(lock),), deadline)
        if answer is APPLIED:
            self._margin.applied()
            self._take(lock)
            return True
        if not isinstance(answer, Refused):
            raise answer
        self._margin.refused(self._env.now() - began)
        if not self._learn(answer):
            self.is_gone = True
            raise self.gone()
        return False

    def _learn(self, answer: Refused | PercolatorError) -> bool:
        """Takes over the lock as it is stored. False if none of this participant is named."""
        lock = lock_in(answer, self.start)
        if lock is not None:
            self._take(lock)
        return lock is not None

    def _take(self, lock: LockRecord) -> None:
        """Numbers in the stored lock only grow, and answers may overtake each other."""
        known = self._lock
        if (lock.min_commit_timestamp, lock.ttl_milliseconds) >= (
            known.min_commit_timestamp,
            known.ttl_milliseconds,
        ):
            self._lock = lock

    def gone(self) -> ConflictError:
        """The error for a participant whose lock is gone."""
        return ConflictError(
            f"{self.name}, begun at {self.start}, was rolled back: another attempt has taken its "
            "place, or it was presumed dead",
            cell=self.primary,
            start_timestamp=self.start,
        )

    def _too_late(self, answer: Refused) -> PercolatorError:
        """The error when the transaction has ended, from the answer to `look`."""
        job, task = self._job, self.name.task
        if answer.condition == steps.OWN_COMMIT:
            return UsageError(
                f"the shared transaction was committed while task {task!r} was writing"
            )
        return ConflictError(
            f"the shared transaction has ended: it was rolled back, and task {task!r} comes too "
            "late",
            cell=CellAddress(job.table_id, job.row, CLOSED),
            start_timestamp=job.began,
        )

    def _ttl(self) -> int:
        seconds = self._env.now() - self._started_seconds + self._job.ttl_seconds
        return min(int(seconds * 1000), TTL_MILLISECONDS_MAX)


def look(job: Job) -> Mutation:
    """The step that is refused if the transaction has ended."""
    return steps.require_open(job.row, CLOSED, job.began)


async def roll_back(
    env: Environment, participants: Sequence[tuple[CellAddress, int]], deadline: float
) -> list[int]:
    """Puts the marker on these primaries, which are given with the start timestamps: from then on,
    neither the participants nor the transaction can commit. Returns for each
    ROLLED_BACK, or the timestamp of the commit that was there before."""
    backoff = env.backoff()
    commits = [ROLLED_BACK] * len(participants)
    left = list(range(len(participants)))
    while left:
        sent = [
            CellMutation(primary.table_id, steps.roll_back(primary.row, primary.column, start))
            for primary, start in (participants[at] for at in left)
        ]
        answers = dict(zip(left, await env.cells.mutate(sent, deadline), strict=True))
        problem: PercolatorError | None = None
        left = []
        for at, answer in answers.items():
            primary, start = participants[at]
            if answer is APPLIED:
                env.verdicts.put(start, ROLLED_BACK)
            elif not isinstance(answer, Refused):
                left.append(at)
                problem = answer
                if answer.retry is Retry.USELESS:
                    raise answer
            elif answer.cell is None:
                raise InvariantViolation(f"{primary} refused a rollback without naming a commit")
            else:
                commits[at] = int(answer.cell.timestamp)
                env.verdicts.put(start, commits[at])
        if problem is not None and not await backoff.pause(deadline):
            raise problem
    return commits


# ---------------------------------------------------------------------------- keeping them alive


async def locks_of(env: Environment, job: Job, deadline: float) -> Sequence[LockRecord]:
    """The locks on the primaries of all participants. They are read without a timestamp: readers
    push participants a little ahead of all timestamps, and no snapshot has the lock of such a
    participant in its way."""
    read = RowRead(row=job.row, all_columns=True, timestamp=NEWEST)
    (answer,) = await env.cells.read((RowRequest(job.table_id, read),), deadline)
    return [LockRecord.decode(cell.value) for cell in answer.locks]


def _raised(lock: LockRecord, min_commit: int, ttl_milliseconds: float, value: bytes) -> LockRecord:
    """The lock with a higher least commit timestamp, another time to live, and another state."""
    ttl = min(int(ttl_milliseconds), TTL_MILLISECONDS_MAX)
    return replace(lock, min_commit_timestamp=min_commit, ttl_milliseconds=ttl, value=value)


def _raise_step(lock: LockRecord) -> CellMutation:
    """Puts this lock in the place of the participant's, if that has a lower least commit
    timestamp."""
    table_id, row, column = lock.primary
    below = lock.min_commit_timestamp - 1
    step = steps.raise_lock(row, column, lock.start_timestamp, below, lock.encode())
    return CellMutation(table_id, step)


class Keeper:
    """Raises the time to live of the finished participants of one transaction."""

    def __init__(self, env: Environment, job: Job) -> None:
        self._env = env
        self._job = job

    async def beat(self) -> None:
        """Raises what has less than two thirds left."""
        env = self._env
        deadline = env.now() + self._job.beat_seconds
        now = await env.timestamp(deadline)
        full = int(self._job.ttl_seconds * 1000)
        due: dict[LockRecord, int] = {}
        for lock in await locks_of(env, self._job, deadline):
            ttl = max((now >> SEQUENCE_BITS) - (lock.start_timestamp >> SEQUENCE_BITS), 0) + full
            if lock.value == ATTEMPT_FINISHED and lock.ttl_milliseconds < ttl - full // 3:
                due[lock] = ttl
        margin = Margin(env.limits)
        while due and env.now() < deadline:
            began = env.now()
            sent = [
                _raised(lock, margin.above(lock.min_commit_timestamp), ttl, ATTEMPT_FINISHED)
                for lock, ttl in due.items()
            ]
            answers = await env.cells.mutate([_raise_step(lock) for lock in sent], deadline)
            margin.refused(env.now() - began)
            # A reader may have pushed some. One without an answer is left to the next beat.
            due = {
                there: lock.ttl_milliseconds
                for lock, answer in zip(sent, answers, strict=True)
                if (there := lock_in(answer, lock.start_timestamp)) is not None
            }


class KeptAlive(Protocol):
    """The things to be kept alive: the participants of an attempt, or all that have finished."""

    async def beat(self) -> None:
        """Raises its time to live. Raises only a `PercolatorError`, which is logged."""
        ...


class ParticipantHeartbeats:
    """Everything that a client keeps alive for shared transactions: calls `beat` of each, again and
    again, an interval of heartbeats after the beat before has ended."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._beating: dict[KeptAlive, asyncio.Task[None]] = {}
        self._tasks = Tasks()

    def add(self, one: KeptAlive) -> None:
        self._beating[one] = self._tasks.start(self._keep(one))

    def discard(self, one: KeptAlive) -> None:
        task = self._beating.pop(one, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        self._beating.clear()
        await self._tasks.cancel()

    async def _keep(self, one: KeptAlive) -> None:
        while True:
            await self._env.clock.sleep(self._env.limits.heartbeat_seconds)
            try:
                await one.beat()
            except PercolatorError as error:
                _log.debug("a participant in a shared transaction was not kept alive: %s", error)
