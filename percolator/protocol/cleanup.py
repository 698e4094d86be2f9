"""Settling the locks that others have left behind.

Whoever is stopped by a lock asks the cell that decides, the primary of the lock's transaction, and
then rolls the met cell forward or back. Anybody may do it, at any time, and any number at once.

Rules, each with the failure that it prevents:
- Only the primary decides. A cell judged by itself would be rolled back while its transaction
  commits: half a transaction.
- Nothing is rolled back without a durable marker on the primary, and a transaction is dead only
  when that marker was seen or written. "Neither lock nor record" may be a prewrite on its way.
- A living owner is waited for. Its session is asked after the lock was seen, and tells only that it
  is gone; otherwise the lock's time to live, in the oracle's time, decides. A live owner that is
  declared dead meets the marker and aborts: a nuisance, never a wrong result.
- Judged by time, a lock is rolled back only as it was seen: a heartbeat since then proves life.
- Where the primary's history was collected, nobody can say any more what was decided. But all older
  locks were settled before that, and nothing older commits after it: a lock that is there all the
  same, in a table made since, is rolled back by itself. Of the transaction, nothing is concluded.
- Of a table that is gone for good, no primary has committed anything that is still locked. Only the
  leading master says so: to another one, a table may be unknown that is new.
- A reader may push a living writer's commit above itself instead of waiting for it; it passes the
  lock only after the push is durable on the primary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from percolator.errors import CellAddress, InvariantViolation, SchemaChanged, SnapshotTooOld
from percolator.protocol import steps
from percolator.protocol.asked_once import About, AskedOnce
from percolator.protocol.primaries import Primaries
from percolator.protocol.records import (
    KIND_LOCK_ONLY,
    WRITE_HEADER,
    LockRecord,
    lock_prefix,
)
from percolator.protocol.surroundings import Surroundings
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1.cells_pb2 import Cell
from percolator.wire.liveness import Liveness
from percolator.wire.questions import APPLIED, Refused, Step


class MetLock(NamedTuple):
    """A lock of somebody else's, and where it stands."""

    address: CellAddress
    lock: LockRecord

    @classmethod
    def of(cls, table_id: int, cell: Cell) -> MetLock:
        return cls(CellAddress(table_id, cell.row, cell.column), LockRecord.decode(cell.value))

    @property
    def on_primary(self) -> bool:
        return self.address == self.lock.primary


class _Undecided(NamedTuple):
    """A transaction without a verdict."""

    met: MetLock
    primary: LockRecord | None
    """The lock that was seen on the primary; None if there was none."""

    @property
    def seen(self) -> bytes:
        return b"" if self.primary is None else _seen(self.primary)


class Cleanup:
    """Settles locks for all transactions of one client."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._primaries = Primaries(around)
        self._once = AskedOnce(around, self._primaries)

    async def clear(
        self,
        met: Sequence[MetLock],
        *,
        deadline: float,
        known_now: int,
        waited_seconds: float,
        read_at: int = 0,
    ) -> set[int]:
        """Settles what can be settled now, in as few round trips as there are kinds of steps.

        `known_now` is any timestamp that the oracle has handed out already. `waited_seconds` grows
        from 0 with the caller's patience: a lock that was just met is most likely about to go.
        For a reader, at `read_at`, returns the start timestamps whose locks it may pass.
        """
        verdicts = self._around.verdicts
        by_start = {lock.lock.start_timestamp: lock for lock in met}
        unknown = {start: lock for start, lock in by_start.items() if verdicts.get(start) is None}
        passable: set[int] = set()
        overtaken: set[int] = set()
        if unknown:
            undecided = await self._ask_primaries(list(unknown.values()), deadline)
            undecided, overtaken = await self._bury_the_dead(
                undecided, deadline, known_now, waited_seconds
            )
            if read_at and waited_seconds >= self._around.limits.push_after_seconds:
                passable = await self._push(undecided, read_at, deadline)
        to_settle = []
        for lock in met:
            start = lock.lock.start_timestamp
            verdict = verdicts.get(start)
            if verdict is None:
                continue
            if read_at and (verdict == ROLLED_BACK or verdict > read_at):
                passable.add(start)
            # The primary was settled by what has just decided it. One that is met although it was
            # decided before is that of another write set, wrongly sent under the same timestamp:
            # nobody else would ever settle it.
            settled = lock.on_primary and start in unknown
            # A commit above the reader is most likely being finished by its owner at this moment.
            if not settled and not verdict > read_at > 0:
                to_settle.append(lock)
        if to_settle:
            await self._settle(to_settle, deadline)
        if overtaken:
            await self._take_back(
                [one for one in met if one.lock.start_timestamp in overtaken], deadline
            )
        return passable

    async def _ask_primaries(self, unknown: Sequence[MetLock], deadline: float) -> list[_Undecided]:
        undecided = [_Undecided(met, met.lock) for met in unknown if met.on_primary]
        asked = [met for met in unknown if not met.on_primary]
        if not asked:
            return undecided
        questions = {}
        for _, lock in asked:
            (table_id, row, column), start = lock.primary, lock.start_timestamp
            question = Step(table_id, steps.status(row, column, start))
            questions[About("status", lock.primary, start)] = question
        answers = await self._once.mutate(questions, deadline)
        for met, answer in zip(asked, answers, strict=True):
            start = met.lock.start_timestamp
            if answer is APPLIED:
                undecided.append(_Undecided(met, None))
            elif self._primaries.is_gone(answer):
                self._around.verdicts.put(start, ROLLED_BACK)
            elif not isinstance(answer, Refused):
                continue  # nobody answered: nothing is known, and the caller comes again
            elif answer.condition == steps.OWN_COMMIT:
                self._around.verdicts.put(start, _commit_timestamp(answer))
            elif answer.condition == steps.OWN_ROLLBACK:
                self._around.verdicts.put(start, ROLLED_BACK)
            else:
                undecided.append(_Undecided(met, _primary_lock(met, answer)))
        return undecided

    async def _bury_the_dead(
        self,
        undecided: list[_Undecided],
        deadline: float,
        known_now: int,
        waited_seconds: float,
    ) -> tuple[list[_Undecided], set[int]]:
        """Rolls back, on its primary, every transaction whose owner is gone.

        Returns the others, and those of which the primary cannot tell: collection came before.
        """
        overtaken: set[int] = set()
        if not undecided:
            return undecided, overtaken
        gone: set[bytes] = set()
        now = known_now
        if waited_seconds > 0:
            gone = await self._gone_sessions(undecided)
            now = await self._now(deadline)
        burials, buried, living = [], [], []
        for one in undecided:
            lock = one.met.lock
            start = lock.start_timestamp
            table_id, row, column = lock.primary
            if lock.session in gone:
                burials.append(Step(table_id, steps.roll_back(row, column, start)))
            elif _expired(one.primary or lock, now):
                burials.append(
                    Step(table_id, steps.roll_back_expired(row, column, start, one.seen))
                )
            else:
                living.append(one)
                continue
            buried.append(one)
        if burials:
            answers = await self._primaries.mutate(burials, deadline)
            for one, answer in zip(buried, answers, strict=True):
                start = one.met.lock.start_timestamp
                if answer is APPLIED or self._primaries.is_gone(answer):
                    self._around.verdicts.put(start, ROLLED_BACK)
                elif isinstance(answer, Refused) and answer.condition == steps.OWN_COMMIT:
                    self._around.verdicts.put(start, _commit_timestamp(answer))
                elif isinstance(answer, SnapshotTooOld):
                    overtaken.add(start)
        return living, overtaken

    async def _take_back(self, met: Sequence[MetLock], deadline: float) -> None:
        """Rolls back cells that do not decide. One that was committed has its record, or that was
        collected, too: either way its tablet refuses."""
        left = {
            About("settle", address, lock.start_timestamp): Step(
                address.table_id,
                steps.roll_back(address.row, address.column, lock.start_timestamp),
            )
            for address, lock in met
        }
        await self._once.mutate(left, deadline)

    async def _gone_sessions(self, undecided: Sequence[_Undecided]) -> set[bytes]:
        sessions = sorted({one.met.lock.session for one in undecided} - {b""})
        if not sessions:
            return set()
        answers = await self._around.owners.liveness(sessions)
        return {
            session
            for session, liveness in zip(sessions, answers, strict=True)
            if liveness is Liveness.DEAD
        }

    async def _now(self, deadline: float) -> int:
        left = deadline - self._around.clock.monotonic_seconds()
        return await self._around.timestamps.get(timeout_seconds=max(left, 0.001))

    async def _push(
        self, undecided: Sequence[_Undecided], read_at: int, deadline: float
    ) -> set[int]:
        """Makes living writers commit above `read_at`. Returns those that surely will."""
        passable = set()
        pushes, pushed = [], []
        for one in undecided:
            lock = one.primary
            if lock is None:
                continue  # its prewrite is on the way: nothing there to push yet
            if lock.min_commit_timestamp > read_at:
                passable.add(lock.start_timestamp)
                continue
            pushes.append(_push_step(lock.primary, lock, read_at))
            pushed.append(lock.start_timestamp)
        if pushes:
            answers = await self._around.cells.mutate(pushes, deadline)
            passable.update(
                start for start, answer in zip(pushed, answers, strict=True) if answer is APPLIED
            )
        return passable

    async def clear_away(self, met: Sequence[MetLock], *, read_at: int, deadline: float) -> None:
        """Makes locks that a reader may pass pass it by themselves: they are too many to name.

        What is decided is settled. Of a living transaction, whose primary is pushed already, the
        met cell is pushed as well: it is committed with the primary, so above the reader.
        """
        verdicts = self._around.verdicts
        decided: list[MetLock] = []
        living: list[MetLock] = []
        for lock in met:
            known = verdicts.get(lock.lock.start_timestamp) is not None
            (decided if known else living).append(lock)
        if decided:
            await self._settle(decided, deadline)
        if living:
            # A lock that has changed meanwhile is met again, as it is then.
            pushes = [_push_step(address, lock, read_at) for address, lock in living]
            await self._around.cells.mutate(pushes, deadline)

    async def _settle(self, met: Sequence[MetLock], deadline: float) -> None:
        """Rolls the met cells forward or back, as the verdicts of their transactions say."""
        settling: dict[About, Step] = {}
        for address, lock in met:
            (table_id, row, column), start = address, lock.start_timestamp
            verdict = self._around.verdicts.get(start)
            if verdict is None:
                continue  # forgotten since: the cache is bounded, and the caller comes again
            about = About("settle", address, start)
            if verdict == ROLLED_BACK:
                settling[about] = Step(table_id, steps.roll_back(row, column, start))
                continue
            schema = await self._around.schema(table_id, deadline)
            observers = () if lock.kind == KIND_LOCK_ONLY else schema.observers.get(column, ())
            record = WRITE_HEADER.pack(start, lock.kind) + lock.value
            step = steps.commit_secondary(row, column, start, verdict, record, observers)
            settling[about] = Step(table_id, step, schema.version)
        answers = await self._once.mutate(settling, deadline)
        for about, answer in zip(settling, answers, strict=True):
            # Other answers change nothing: whoever met the lock looks again.
            if isinstance(answer, SchemaChanged):
                await self._around.schemas.refresh(about.cell.table_id, deadline)


def _expired(lock: LockRecord, now: int) -> bool:
    """By the oracle's clock alone: machines' clocks differ, and jump."""
    age = (now >> SEQUENCE_BITS) - (lock.start_timestamp >> SEQUENCE_BITS)
    return age > lock.ttl_milliseconds


def _seen(lock: LockRecord) -> bytes:
    return lock_prefix(lock.start_timestamp, lock.min_commit_timestamp, lock.ttl_milliseconds)


def _push_step(address: CellAddress, lock: LockRecord, read_at: int) -> Step:
    """Raises the lock's least commit timestamp above the reader's."""
    table_id, row, column = address
    raised = replace(lock, min_commit_timestamp=read_at + 1)
    return Step(table_id, steps.replace_lock(row, column, _seen(lock), raised.encode()))


def _commit_timestamp(answer: Refused) -> int:
    if answer.cell is None:
        raise InvariantViolation("a tablet refused for a commit record and did not show it")
    return answer.cell.timestamp


def _primary_lock(met: MetLock, answer: Refused) -> LockRecord:
    if answer.cell is None:
        raise InvariantViolation("a tablet refused for a lock and did not show it")
    lock = LockRecord.decode(answer.cell.value)
    if lock.primary != met.lock.primary:
        # One transaction with two deciding cells would be committed and rolled back at once.
        raise InvariantViolation(
            f"transaction {lock.start_timestamp} has two primaries: "
            f"{lock.primary} and {met.lock.primary}"
        )
    return lock
