"""Notifications in a row store: intents, which say that a cell may have changed.

**Why no change is lost.** The intents of a transaction are durable before its commit point
(percolator/protocol/announcing.py). An intent is deleted only by somebody who has seen, in the cell
that it names,

- the commit of its transaction, and that a run whose snapshot is at or above that commit has
  committed, or that the acknowledgement says so: then the change is handled;
- or the rollback marker of its transaction: then it never changes this cell.

Both are final: a cell that has a transaction's commit never gets its marker, nor the other way
round. As long as the cell has a lock of the transaction, or nothing, the intent stays. An old lock
is resolved, as whoever meets it may do. If there is nothing for long, the transaction is dead, or
its prewrite on its way: a marker is put into the cell, which refuses a late prewrite, and only then
the intent goes. If the prewrite was faster than the marker, the marker is refused: the transaction
may have committed elsewhere by then, and its lock here is all that is left of this change. If the
history of the cell was collected above the start, nobody can see any more what became of the
transaction: the observer runs once. An intent without a change costs no run: the acknowledgement
says that nothing is new.

**Finding them.** Intents do not come in the order of their starts: a transaction may begin long
before it writes. So there are two kinds of passes. Most read from a *low-water mark* on, a little
before now, so that rows deleted long ago are not walked over; the mark is never above an intent
that was seen and is still there, unless its transaction is still open: that is watched by itself
(`Undecided`). From time to time, a pass reads everything. Nothing but the delay of a change
depends on the mark.

**Proving that none is left** (percolator/observers/quiet.py). Before handled intents are deleted,
a mark in the table is changed. Suppose that there was work at the instant between two surveys. It
was visible as an intent: that of a change is there until the run for it has committed, and by then
the intents of the run's own writes are there. If neither survey has found this intent, it was
written after the first had looked, and deleted before the second did; so in between, the mark was
changed. The first survey has read it before it looked, and the second reads it after that.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from math import inf
from typing import TypeGuard

from percolator.errors import CellAddress, PercolatorError, SchemaError, UsageError
from percolator.formats.records import LockRecord
from percolator.history.fates import Fates, Judged, ObservedCell
from percolator.observers.context import (
    Admission,
    Claim,
    FoundWork,
    Waiting,
    WorkHints,
    WorkRequest,
)
from percolator.protocol import steps
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import Environment
from percolator.routing.cells import Answer, CellMutation, Refused
from percolator.rowstore.intents import BUCKETS, Intent, Intents, exactly, key_from
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1.cells_pb2 import Cell
from percolator.world import World

_PAUSE_SECONDS_MAX = 0.5
"""The longest pause between passes: nobody announces what was written."""
_FULL_PASS_SECONDS = 10.0
"""How often a pass reads everything, unless that takes long."""
_FULL_PASS_FRACTION = 0.25
"""The most of a worker's time that such passes take."""
_LATE_MILLISECONDS = 10_000
"""How far before now the low-water mark is: most transactions are shorter."""
_OLD_LOCK_MILLISECONDS = 1_000
_NO_TRACE_SECONDS = 5.0
"""How long an intent is seen without any trace of its transaction before a marker is put."""
_RESOLVE_SECONDS = 2.0
_KNOWN_SECONDS = 0.1
"""The wait reported to `cleanup`. The locks are old, so it should check their owners at once."""
_REMEMBERED_MAX = 65_536

_ByCommit = Mapping[int, list[Intent]]
"""Intents by the commit timestamps of their transactions, or what stands for them."""


class IntentNotifications:
    """`percolator.observers.context.Notifications` of a row store."""

    pause_seconds_max = _PAUSE_SECONDS_MAX

    def __init__(self, world: World, env: Environment, cleanup: Cleanup, intents: Intents) -> None:
        self._world = world
        self._now = world.clock.monotonic_seconds
        self._env = env
        self._cleanup = cleanup
        self._intents = intents
        self._fates = Fates(env)
        self._undecided = Undecided(env)
        self._from: dict[int, int] = {}
        """The low-water mark of each bucket."""
        self._watched: frozenset[tuple[int, bytes]] = frozenset()
        """The observers for which the marks hold."""
        self._full_pass_at = -inf
        self._first_seen: OrderedDict[bytes, float] = OrderedDict()
        """When an intent was first seen without a trace of its transaction, by its key."""
        self._found: OrderedDict[ObservedCell, dict[int, list[Intent]]] = OrderedDict()
        """The intents behind what was reported."""

    async def look(self, admission: Admission, *, everything: bool) -> int:
        watched = frozenset((one.table_id, one.id) for one in admission.watched)
        if not watched:
            return 0
        now = await self._env.timestamps.get(timeout_seconds=self._env.limits.call_seconds)
        began = self._now()
        is_full = watched != self._watched or began >= self._full_pass_at
        if is_full:
            self._watched = watched
            self._from.clear()
        # Goes back to the intents of transactions that were open, and are decided now.
        decided, locks = await self._undecided.look(self._env.deadline())
        for bucket, mark in self._from.items():
            self._from[bucket] = min([mark, *decided])
        await self._resolve(locks, now)
        buckets = list(BUCKETS)
        self._world.random.shuffle(buckets)
        looks = [self._look_into(bucket, admission, now) for bucket in buckets]
        waiting = len(locks) + sum(await asyncio.gather(*looks))
        if is_full:
            self._full_pass_at = began + max(
                _FULL_PASS_SECONDS, (self._now() - began) / _FULL_PASS_FRACTION
            )
        return waiting + admission.admitted

    async def _look_into(self, bucket: int, admission: Admission, now: int) -> int:
        """Returns how many intents wait for their transactions."""
        columns = [exactly(one.table_id, one.id) for one in admission.watched]
        at = key_from(bucket, self._from.get(bucket, 0))
        oldest = max(now - (_LATE_MILLISECONDS << SEQUENCE_BITS), 0)
        undecided = 0
        while at:
            end = key_from(bucket + 1)
            page, at = await self._intents.page(at, end, columns, self._env.deadline())
            undecided += await self._process(self._not_open(page), admission, now)
            if left := self._not_open(page):
                oldest = min(oldest, left[0].timestamp)
            if at and page and self._undecided.knows(page[-1]):
                at = key_from(bucket, page[-1].timestamp + 1)  # behind all of its intents
        self._from[bucket] = oldest
        return undecided

    def _not_open(self, page: Sequence[Intent]) -> list[Intent]:
        return [one for one in page if not self._undecided.knows(one)]

    async def _process(self, found: Sequence[Intent], admission: Admission, now: int) -> int:
        claims: dict[Claim, list[Intent]] = defaultdict(list)
        for intent in found:
            watched = admission.observer(intent.table_id, intent.observer)
            if watched is None:
                continue
            claim = Claim(watched, intent.row, intent.column)
            # What is queued is found again after its run, which has mostly handled it.
            if not admission.knows(claim) and admission.has_space(watched):
                claims[claim].append(intent)
        fresh = list(claims)
        taken = await admission.claim(fresh)
        held = [claim for claim, is_held in zip(fresh, taken, strict=True) if is_held]
        judged = await self._fates.judge([one for claim in held for one in claims[claim]])
        await self._mark_dead(judged)
        for claim in held:
            cell = claim.watched.table_id, claim.row, claim.column, claim.watched.id
            by_commit = judged.committed.get(cell)
            if by_commit is None:
                admission.release([claim])
            else:
                self._remember(cell, by_commit)
                admission.admit(claim, by_commit)
        if judged.rolled_back:
            await self._intents.delete(judged.rolled_back, self._env.deadline())
        self._undecided.learn(judged.locked)
        locks = [MetLock.of(intent.table_id, cell) for intent, cell in judged.locked]
        await self._resolve(locks, now)
        return len(judged.locked) + len(judged.without_trace)

    async def _mark_dead(self, judged: Judged) -> None:
        """Puts markers where there has been no trace of the transaction for long."""
        dead: list[Intent] = []
        for intent in judged.without_trace:
            since = self._first_seen.setdefault(intent.key, self._now())
            if self._now() >= since + _NO_TRACE_SECONDS:
                dead.append(intent)
        while len(self._first_seen) > _REMEMBERED_MAX:
            self._first_seen.popitem(last=False)
        for intent in await self._fates.put_markers(dead, judged):
            self._first_seen.pop(intent.key, None)

    async def _resolve(self, locks: Sequence[MetLock], now: int) -> None:
        """Resolves those that are old, if their owners are dead."""
        before = now - (_OLD_LOCK_MILLISECONDS << SEQUENCE_BITS)
        old = [one for one in locks if one.lock.start_timestamp < before]
        if old:
            await self._cleanup.resolve(
                old,
                deadline=self._now() + _RESOLVE_SECONDS,
                known_now=now,
                waited_seconds=_KNOWN_SECONDS,
            )

    def hints(
        self, watched: Mapping[int, Sequence[bytes]], *, listen_only: bool = False
    ) -> AsyncGenerator[WorkHints, None]:
        if listen_only:
            raise UsageError(
                "a row store does not announce what is written; list what waits instead"
            )
        return _no_hints()

    async def survey(
        self, request: WorkRequest, deadline: float = inf
    ) -> AsyncGenerator[FoundWork, None]:
        """If locks are asked for, transactions are judged: those that were rolled back are left
        out, locked cells are reported as such, and timestamps are those of commits. Otherwise,
        every intent is reported, by the start of its transaction. Raises if a cell does not answer.
        """

        def until() -> float:
            return min(self._env.deadline(), deadline)

        yield _answer(request, mark=await self._intents.mark(until()))
        pages = self._intents.all_of(request.table_id, request.observers, until)
        async with aclosing(pages):
            async for page in pages:
                found = [
                    one
                    for one in page
                    if request.start <= one.row and (not request.end or one.row < request.end)
                ]
                judged = Judged(without_trace=found)
                if request.locks_before:
                    judged = await self._fates.judge(found)
                if judged.problem is not None:
                    raise judged.problem  # what is not known may well be waiting
                for intent in judged.without_trace:
                    judged.commit(intent, intent.timestamp)
                waiting = []
                for cell, by_commit in sorted(judged.committed.items()):
                    self._remember(cell, by_commit)
                    waiting.append(Waiting(*cell, tuple(sorted(by_commit, reverse=True))))
                yield _answer(request, waiting, [cell for _, cell in judged.locked])
        yield _answer(request, mark=await self._intents.mark(until()))

    def _remember(self, cell: ObservedCell, by_commit: _ByCommit) -> None:
        self._found.setdefault(cell, {}).update(by_commit)
        self._found.move_to_end(cell)
        while len(self._found) > _REMEMBERED_MAX:
            self._found.popitem(last=False)

    async def forget(self, handled: Sequence[Waiting], deadline: float) -> PercolatorError | None:
        intents: list[Intent] = []
        for one in handled:
            cell = one.table_id, one.row, one.column, one.observer
            by_commit = self._found.get(cell)
            if by_commit is None:
                continue  # not remembered: it is found again
            for timestamp in one.timestamps:
                intents += by_commit.pop(timestamp, ())
            if not by_commit:
                del self._found[cell]
        try:
            if intents:
                await self._intents.touch(deadline)
                await self._intents.delete(intents, deadline)
        except PercolatorError as error:
            return error
        return None


def _answer(
    request: WorkRequest,
    waiting: Sequence[Waiting] = (),
    locks: Sequence[Cell] = (),
    mark: Hashable = None,
) -> FoundWork:
    place = None if mark is None else "the table of intents"
    return FoundWork(request, list(waiting), list(locks), None, None, place, mark)


async def _no_hints() -> AsyncGenerator[WorkHints, None]:
    await asyncio.Event().wait()
    yield WorkHints("", began=True, notifications=(), left_out=0)


_OF_ITS_AGE = 1 / 8
"""A transaction that has been known for so long is looked at again after this fraction."""
_AGAIN_SECONDS_MAX = 2.0
_KNOWN_MAX = 65_536
"""Further transactions are looked at cell by cell. Also the most remembered as decided."""


@dataclass(slots=True)
class _Open:
    """A transaction that was open when somebody looked last."""

    primary: CellAddress
    since: float
    due: float


class Undecided:
    """The open transactions that one worker knows, by their starts. Each is looked at, at its
    primary.

    A worker that finds a cell locked has to come back to it. If it did so cell by cell, a job that
    changes a million observed cells in one transaction would cost each worker a million looks in
    every pass, for as long as the job runs. So a pass leaves the intents of such a transaction
    alone, and its low-water mark goes past them. Instead, it asks the primary what has become of
    the transaction: the longer that is open, the less often. Once it is decided, the passes begin
    at its intents again.

    Only the delay of a change depends on this. Cells are judged by themselves, as before.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._open: dict[int, _Open] = {}
        self._decided: OrderedDict[int, None] = OrderedDict()
        """Their cells may still be locked, and have to be looked at one by one."""

    def knows(self, intent: Intent) -> bool:
        """True if it is of such a transaction: then it can be left alone."""
        return not intent.is_certain and intent.timestamp in self._open

    def learn(self, locked: Sequence[tuple[Intent, Cell]]) -> None:
        """These cells were found with locks of their transactions."""
        now = self._env.now()
        for intent, cell in locked:
            start = intent.timestamp
            if start in self._decided or start in self._open or len(self._open) >= _KNOWN_MAX:
                continue
            self._open[start] = _Open(LockRecord.decode(cell.value).primary, now, now)

    async def look(self, deadline: float) -> tuple[list[int], list[MetLock]]:
        """Looks at those that are due. Returns the starts of those that are open no more, or of
        which the primary does not tell; and the primaries' locks of the others."""
        now = self._env.now()
        due = [(start, one) for start, one in self._open.items() if one.due <= now]
        if not due:
            return [], []
        questions = [
            CellMutation(
                one.primary.table_id, steps.status(one.primary.row, one.primary.column, start)
            )
            for start, one in due
        ]
        answers = await self._env.cells.mutate(questions, deadline)
        decided: list[int] = []
        locks: list[MetLock] = []
        for (start, one), answer in zip(due, answers, strict=True):
            if isinstance(answer, PercolatorError) and not isinstance(answer, SchemaError):
                continue  # it did not answer: it is asked again in the next pass
            if _is_locked(answer):
                one.due = now + min((now - one.since) * _OF_ITS_AGE, _AGAIN_SECONDS_MAX)
                locks.append(MetLock.of(one.primary.table_id, answer.offender))
            else:
                decided.append(start)
                del self._open[start]
                self._decided[start] = None
        while len(self._decided) > _KNOWN_MAX:
            self._decided.popitem(last=False)
        return decided, locks


def _is_locked(answer: Answer) -> TypeGuard[Refused]:
    if not isinstance(answer, Refused):
        return False
    return answer.condition not in (steps.OWN_COMMIT, steps.OWN_ROLLBACK)
