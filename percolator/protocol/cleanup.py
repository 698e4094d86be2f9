"""Resolving the locks that others have left behind.

A transaction that is stopped by a lock asks the cell that decides, the primary of the lock's
transaction, and then rolls the locked cell forward or back. Any client may do this, at any time,
and any number of them at once.

Rules, each with the failure that it prevents:
- Only the primary decides. A cell judged by itself would be rolled back while its transaction
  commits: half a transaction.
- Nothing is rolled back without a durable marker on the primary, and a transaction is dead only
  when that marker was seen or written. "Neither lock nor record" may be a prewrite on its way.
- While the owner is alive, wait. Its session is looked up after the lock was seen, and only "gone"
  is conclusive; otherwise the lock's time to live, measured in the oracle's time, decides. A live
  owner that is declared dead meets the marker and aborts: a nuisance, never a wrong result.
- A lock whose time has run out is rolled back only if it is still as it was seen: a heartbeat since
  then proves that the owner is alive.
- Once the primary's history has been collected, its decision can no longer be learned. But every
  older lock was resolved before that, and no older transaction commits after it. If such a lock
  turns up nevertheless, in a table created since, it is rolled back without its primary, and no
  verdict is recorded.
- A lock whose primary is locked by its transaction for yet another primary is an error for whoever
  meets it: one transaction with two deciding cells would be committed and rolled back. A program
  that sends its own steps can leave such locks, which must not hold up collection for ever. Once
  its transaction can no longer commit, such a lock is rolled back, and no verdict is recorded: the
  cell that it names has decided nothing, and never will.
- If a table is gone for good, no primary in it has committed anything that is still locked. Only
  the leading master can say so: another master may not know a table because it is new. A lock that
  is still there is rolled back, but no verdict is recorded: the transaction may have committed, and
  been rolled forward, since its lock was met.
- A reader may push a live writer's commit above itself instead of waiting for it (`Pushing`); it
  passes the lock only after the push is durable on the primary.
- A reader that knows a commit at or below its snapshot reads the value in the lock, and leaves the
  cell to be rolled forward in the background. While it is locked, no other commit can be newer.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

from percolator.errors import CellAddress, InvariantViolation, SchemaError, SnapshotTooOld
from percolator.formats.records import ATTEMPT_FINISHED, ATTEMPT_OPEN, LockRecord
from percolator.protocol import steps
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import ROLLED_BACK, Environment
from percolator.protocol.roll_forward import About, AskedOnce, Rolling
from percolator.routing.cells import (
    APPLIED,
    Answer,
    CellMutation,
    FoundCell,
    Mutations,
    Refused,
    ResolvesLocks,
)
from percolator.timestamps import SEQUENCE_BITS, seconds_between
from percolator.v1.cells_pb2 import SPACE_LOCK
from percolator.wire.liveness import Liveness

_REMEMBERED_MAX = 4_096
_PARTICIPANT = re.compile(rb"\d+\.\d+\.\d+\..+", re.DOTALL)
"""The column of the primary of a participant in a shared transaction (shared/participant.py)."""


class _Undecided(NamedTuple):
    """A transaction without a verdict."""

    met: MetLock
    primary: LockRecord | None
    """The lock that was seen on the primary; None if there was none."""

    @property
    def seen(self) -> bytes:
        """The beginning of that lock, for compare-and-set."""
        return b"" if self.primary is None else self.primary.prefix


class Cleanup:
    """Resolves locks for all transactions of one client."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._primaries = Primaries(env)
        self._once = AskedOnce(env, self._primaries)
        self._pushing = Pushing(env)
        self._rolling = Rolling(env, self._once)

    async def resolve(
        self,
        met: Sequence[MetLock],
        *,
        deadline: float,
        known_now: int,
        waited_seconds: float,
        read_at: int = 0,
        reads_values: bool = False,
        ended_below: int = 0,
    ) -> set[int]:
        """Resolves what can be resolved now, with one round trip for each kind of step.

        `known_now` is any timestamp that the oracle has already issued. `waited_seconds` is how
        long the caller has waited so far; it begins at 0, because a lock that was just met is most
        likely about to be released. For a reader at `read_at`, returns the start timestamps whose
        locks it may pass. One that `reads_values` goes on with the locks that it can `read`: it
        need not wait until they have become records. A reader of the change feed has to, or what
        was committed would seem not to be settled yet. A transaction that began below `ended_below`
        has no time left, whatever its owner says.
        """
        if self._env.resolves_locks is not None:
            return await self._resolved_by(
                self._env.resolves_locks, met, read_at, waited_seconds, deadline
            )
        verdicts = self._env.verdicts
        by_start = {lock.lock.start_timestamp: lock for lock in met}
        unknown = {start: lock for start, lock in by_start.items() if verdicts.get(start) is None}
        passable: set[int] = set()
        if read_at:
            passable = {start for start in unknown if self._pushing.is_above(start, read_at)}
            for start in passable:
                del unknown[start]
        lost: set[int] = set()
        strays: set[tuple[int, CellAddress]] = set()
        if unknown:
            undecided, lost = await self._ask_primaries(
                list(unknown.values()), deadline, ended_below, strays
            )
            undecided, collected = await self._roll_back_dead(
                undecided, deadline, known_now, waited_seconds, ended_below
            )
            lost |= collected
            if read_at:
                # Without a lock on the primary, its prewrite may be in flight: there is nothing to
                # push yet.
                passable |= await self._pushing.push(
                    [one.primary for one in undecided if one.primary is not None],
                    read_at,
                    waited_seconds=waited_seconds,
                    deadline=deadline,
                )
        to_resolve: list[MetLock] = []
        readable: list[MetLock] = []
        for lock in met:
            start = lock.lock.start_timestamp
            verdict = verdicts.get(start)
            if verdict is None:
                continue
            if read_at and (verdict == ROLLED_BACK or verdict > read_at):
                passable.add(start)
                self._pushing.note(start, verdict)  # all that a snapshot below it has to know
            # The step that has just decided the primary has also resolved it. A lock on a primary
            # that was decided before belongs to another write set, wrongly sent under the same
            # timestamp, and would never be resolved otherwise.
            resolved = lock.on_primary and start in unknown
            # A commit above the reader is most likely being completed by its owner now.
            if resolved or verdict > read_at > 0:
                continue
            can_read = reads_values and self._rolling.read(lock, read_at) is not None
            (readable if can_read else to_resolve).append(lock)
        if readable:
            to_resolve += await self._rolling.leave_behind(readable)
        if to_resolve:
            await self._rolling.roll(to_resolve, deadline)
        if lost or strays:
            left = [
                one
                for one in met
                if one.lock.start_timestamp in lost
                or (one.lock.start_timestamp, one.lock.primary) in strays
            ]
            await self._roll_back_lost(left, deadline)
        return passable

    async def _resolved_by(
        self,
        others: ResolvesLocks,
        met: Sequence[MetLock],
        read_at: int,
        waited_seconds: float,
        deadline: float,
        *,
        remove: bool = False,
    ) -> set[int]:
        """Leaves locks to others. As `resolve`, whose rules they follow."""
        known = {
            start
            for start in (lock.lock.start_timestamp for lock in met)
            if read_at and not remove and self._pushing.is_above(start, read_at)
        }
        asked = [
            (lock.address, lock.lock.start_timestamp)
            for lock in met
            if lock.lock.start_timestamp not in known
        ]
        if not asked:
            return known
        found = await others.resolve(
            asked,
            read_at=read_at,
            waited_seconds=waited_seconds,
            deadline=deadline,
            remove=remove,
        )
        for start, verdict in found.verdicts.items():
            self._env.verdicts.put(start, verdict)
        for start in found.passable:
            self._pushing.note(start, read_at + 1)
        return known | found.passable

    def passable(self, read_at: int, most: int) -> tuple[int, ...]:
        """The start timestamps of transactions whose locks a snapshot may pass: `most` at most."""
        return self._pushing.passable(read_at, most)

    def read(self, met: MetLock, read_at: int) -> FoundCell | None:
        """Cell as a snapshot sees it under a lock, if the lock itself tells (roll_forward.py)."""
        return self._rolling.read(met, read_at)

    async def _ask_primaries(
        self,
        unknown: Sequence[MetLock],
        deadline: float,
        ended_below: int,
        strays: set[tuple[int, CellAddress]],
    ) -> tuple[list[_Undecided], set[int]]:
        """Returns the transactions without a verdict, and the start timestamps of others whose
        primary's table is gone for good. Adds to `strays` the transactions that began below
        `ended_below`, with a cell that some locks name as primary and that decides nothing."""
        gone: set[int] = set()
        undecided = [_Undecided(met, met.lock) for met in unknown if met.on_primary]
        asked = [met for met in unknown if not met.on_primary]
        if not asked:
            return undecided, gone
        requests = {}
        for _, lock, _ in asked:
            (table_id, row, column), start = lock.primary, lock.start_timestamp
            request = CellMutation(table_id, steps.status(row, column, start))
            requests[About("status", lock.primary, start)] = request
        answers = await self._once.mutate(requests, deadline)
        for met, answer in zip(asked, answers, strict=True):
            start = met.lock.start_timestamp
            if answer is APPLIED:
                undecided.append(_Undecided(met, None))
            elif self._primaries.is_gone(answer):
                gone.add(start)
            elif isinstance(answer, InvariantViolation):
                raise copy(answer)  # waiting will not decide it
            elif not isinstance(answer, Refused):
                continue  # no answer: nothing is known, and the caller will ask again
            elif not learn_outcome(self._env, start, answer):
                lock = LockRecord.decode(answer.offender.value)
                if lock.primary != met.lock.primary:
                    if start < ended_below:
                        strays.add((start, met.lock.primary))
                        continue
                    # One transaction with two deciding cells would be committed and rolled back.
                    raise InvariantViolation(
                        f"transaction {start} has two primaries: {lock.primary} and "
                        f"{met.lock.primary}"
                    )
                undecided.append(_Undecided(met, lock))
        return undecided, gone

    async def _roll_back_dead(
        self,
        undecided: list[_Undecided],
        deadline: float,
        known_now: int,
        waited_seconds: float,
        ended_below: int,
    ) -> tuple[list[_Undecided], set[int]]:
        """Rolls back, on its primary, every transaction whose owner is gone.

        Returns the live ones, and the start timestamps of others whose outcome is lost: the primary
        no longer knows it, because its history was collected, or its table is gone for good.
        """
        lost: set[int] = set()
        if not undecided:
            return undecided, lost
        gone: set[bytes] = set()
        now = known_now
        if waited_seconds > 0:
            gone = await self._gone_sessions(undecided)
            now = await self._env.timestamp(deadline)
        requests, dead, alive = [], [], []
        for one in undecided:
            lock = one.met.lock
            start = lock.start_timestamp
            table_id, row, column = lock.primary
            if start < ended_below or lock.session in gone:
                requests.append(CellMutation(table_id, steps.roll_back(row, column, start)))
            elif _has_expired(one.primary or lock, now):
                requests.append(
                    CellMutation(table_id, steps.roll_back_expired(row, column, start, one.seen))
                )
            else:
                alive.append(one)
                continue
            dead.append(one)
        if requests:
            answers = await self._primaries.mutate(requests, deadline)
            for one, answer in zip(dead, answers, strict=True):
                start = one.met.lock.start_timestamp
                if answer is APPLIED:
                    self._env.verdicts.put(start, ROLLED_BACK)
                elif isinstance(answer, Refused) and answer.condition == steps.OWN_COMMIT:
                    self._env.verdicts.put(start, answer.offender.timestamp)
                elif isinstance(answer, SnapshotTooOld) or self._primaries.is_gone(answer):
                    lost.add(start)
        return alive, lost

    async def _roll_back_lost(self, met: Sequence[MetLock], deadline: float) -> None:
        """Rolls back cells without a decision. On a cell that was committed, the tablet refuses:
        it finds the commit record, or knows that history there was collected."""
        left = {
            About("resolve", address, lock.start_timestamp): CellMutation(
                address.table_id,
                steps.roll_back(address.row, address.column, lock.start_timestamp),
            )
            for address, lock, _ in met
        }
        await self._once.mutate(left, deadline)

    async def _gone_sessions(self, undecided: Sequence[_Undecided]) -> set[bytes]:
        sessions = sorted({one.met.lock.session for one in undecided} - {b""})
        if not sessions:
            return set()
        answers = await self._env.owners.liveness(sessions)
        return {
            session
            for session, liveness in zip(sessions, answers, strict=True)
            if liveness is Liveness.DEAD
        }

    async def resolve_passable(
        self, met: Sequence[MetLock], *, read_at: int, deadline: float
    ) -> None:
        """Removes or pushes locks that a reader may pass, when they are too many to list in a read.

        Locks of decided transactions are resolved. If the transaction is live, its primary has been
        pushed already, and the locked cell is pushed as well: it commits with the primary, so above
        the reader.
        """
        if self._env.resolves_locks is not None:
            patience = self._env.limits.push_after_seconds
            await self._resolved_by(
                self._env.resolves_locks, met, read_at, patience, deadline, remove=True
            )
            return
        verdicts = self._env.verdicts
        decided: list[MetLock] = []
        alive: list[MetLock] = []
        for lock in met:
            known = verdicts.get(lock.lock.start_timestamp) is not None
            (decided if known else alive).append(lock)
        if decided:
            await self._rolling.roll(decided, deadline)
        if alive:
            # A lock that has changed in the meantime is met again, in its new form.
            pushes = [push_step(address, lock, read_at + 1) for address, lock, _ in alive]
            await self._env.cells.mutate(pushes, deadline)


def _has_expired(lock: LockRecord, now: int) -> bool:
    """Judges by the oracle's clock alone: the clocks of machines differ, and jump."""
    age = (now >> SEQUENCE_BITS) - (lock.start_timestamp >> SEQUENCE_BITS)
    return age > lock.ttl_milliseconds


def learn_outcome(env: Environment, start: int, answer: Refused) -> bool:
    """Remembers the transaction's outcome, if the refusal of `steps.status` names it."""
    if answer.condition == steps.OWN_COMMIT:
        env.verdicts.put(start, answer.offender.timestamp)
    elif answer.condition == steps.OWN_ROLLBACK:
        env.verdicts.put(start, ROLLED_BACK)
    else:
        return False
    return True


def lock_in(answer: Answer, start: int) -> LockRecord | None:
    """The transaction's lock, if a step was refused because of it."""
    if not isinstance(answer, Refused) or answer.cell is None or answer.cell.space != SPACE_LOCK:
        return None
    lock = LockRecord.decode(answer.cell.value)
    return lock if lock.start_timestamp == start else None


class Primaries:
    """Sends steps to the cells that decide, also in tables that are being deleted.

    Deleting a table does not wait for the transactions that write to it. Their locks in other
    tables would hold up every reader if the cells that decide about them could no longer be asked.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env

    async def mutate(self, steps: Sequence[CellMutation], deadline: float) -> list[Answer]:
        """Like `Mutations.mutate`."""
        answers = await self._env.cells.mutate(steps, deadline)
        deleted = self._env.deleted_tables
        if deleted is None:
            return answers
        places = [place for place, one in enumerate(answers) if isinstance(one, SchemaError)]
        if places:
            again = await deleted.mutate([steps[place] for place in places], deadline)
            for place, answer in zip(places, again, strict=True):
                answers[place] = answer
        return answers

    def is_gone(self, answer: Answer) -> bool:
        """True if the cell no longer exists and never will, so that it decides nothing.

        A table is removed only when no lock has its primary in it. A lock that appears later was
        sent late, by a transaction that has not committed: until a transaction commits, its locks
        stay where they are.
        """
        return self._env.deleted_tables is not None and isinstance(answer, SchemaError)


async def commits_of(
    cells: Mutations, transactions: Sequence[tuple[CellAddress, int]], deadline: float
) -> list[int]:
    """When these transactions have committed, as the primaries say that are given with their start
    timestamps; 0 for each that is not known to have. Changes nothing."""
    asked = [
        CellMutation(primary.table_id, steps.status(primary.row, primary.column, start))
        for primary, start in transactions
    ]
    return [
        answer.offender.timestamp
        if isinstance(answer, Refused) and answer.condition == steps.OWN_COMMIT
        else 0
        for answer in await cells.mutate(asked, deadline)
    ]


class Pushing:
    """The pushes of one client, and the least commit timestamps that it has seen.

    A reader makes a live writer commit above its snapshot, instead of waiting for it. A push raises
    the least commit timestamp in the lock on the writer's primary. That number only grows while the
    lock exists, and no commit below it is ever applied. So a client that has seen it in a primary's
    lock knows for good: snapshots below it show nothing of the transaction. It is remembered, and a
    snapshot that meets a thousand locks of one transaction pushes once.

    How long a reader waits first:
    - For an ordinary transaction, a short time: it is most likely about to commit.
    - For a participant in a shared transaction whose attempt still writes, not at all: the
      timestamp of its commit is fetched later. It is pushed a little ahead, so that the next
      readers need not push.
    - For a participant that has finished, until the snapshot is as old as that short time. Its
      driver may hold a commit timestamp. That is overtaken only by a younger snapshot, so the
      driver has that much time for its commit, however many readers there are. Older snapshots have
      waited enough.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._min_commits: OrderedDict[int, int] = OrderedDict()
        """By start timestamp."""

    def is_above(self, start: int, read_at: int) -> bool:
        """True if the transaction is known to commit above the snapshot, if at all."""
        return self._min_commits.get(start, 0) > read_at

    def passable(self, read_at: int, most: int) -> tuple[int, ...]:
        """The transactions known to commit above the snapshot, if at all: the last of them."""
        known = [start for start, min_commit in self._min_commits.items() if min_commit > read_at]
        return tuple(known[-most:])

    def note(self, start: int, min_commit: int) -> None:
        """Remembers that the transaction commits at this timestamp or above, if at all."""
        remembered = self._min_commits
        if min_commit > remembered.get(start, 0):
            remembered[start] = min_commit
            remembered.move_to_end(start)
        if len(remembered) > _REMEMBERED_MAX:
            remembered.popitem(last=False)

    async def push(
        self,
        primaries: Sequence[LockRecord],
        read_at: int,
        *,
        waited_seconds: float,
        deadline: float,
    ) -> set[int]:
        """Pushes the locks that have been waited for long enough. Returns the start timestamps of
        all transactions among them that commit above the snapshot. `waited_seconds` is how long the
        caller has waited."""
        for lock in primaries:
            self.note(lock.start_timestamp, lock.min_commit_timestamp)
        below = [lock for lock in primaries if lock.min_commit_timestamp <= read_at]
        due = await self._due(below, read_at, waited_seconds, deadline)
        if due:
            pushes = [push_step(lock.primary, lock, min_commit) for lock, min_commit in due]
            answers = await self._env.cells.mutate(pushes, deadline)
            for (lock, min_commit), answer in zip(due, answers, strict=True):
                if answer is APPLIED:
                    self.note(lock.start_timestamp, min_commit)
                elif (there := lock_in(answer, lock.start_timestamp)) is not None:
                    # Another reader may have pushed it.
                    self.note(there.start_timestamp, there.min_commit_timestamp)
        starts = {lock.start_timestamp for lock in primaries}
        return {start for start in starts if self.is_above(start, read_at)}

    async def _due(
        self, locks: Sequence[LockRecord], read_at: int, waited_seconds: float, deadline: float
    ) -> list[tuple[LockRecord, int]]:
        """The locks to push now, and up to where."""
        env = self._env
        patience = env.limits.push_after_seconds
        min_commit = read_at + 1
        if waited_seconds >= patience:
            return [(lock, min_commit) for lock in locks]
        ahead = min_commit + (int(patience * 1000) << SEQUENCE_BITS)
        due = [(lock, ahead) for lock in locks if _is_participant(lock, ATTEMPT_OPEN)]
        finished = [lock for lock in locks if _is_participant(lock, ATTEMPT_FINISHED)]
        if finished:
            left = patience - seconds_between(read_at, await env.timestamp(deadline))
            if left < deadline - env.now():
                await env.clock.sleep(max(left, 0.0))
                due += [(lock, min_commit) for lock in finished]
        return due


def _is_participant(primary: LockRecord, state: bytes) -> bool:
    """True if this is the lock on the primary of a participant whose attempt is in this state."""
    return (
        primary.value == state
        and not primary.session
        and _PARTICIPANT.fullmatch(primary.primary.column) is not None
    )


def push_step(address: CellAddress, lock: LockRecord, min_commit: int) -> CellMutation:
    """The step that raises the lock's least commit timestamp."""
    table_id, row, column = address
    raised = replace(lock, min_commit_timestamp=min_commit)
    return CellMutation(table_id, steps.replace_lock(row, column, lock.prefix, raised.encode()))
