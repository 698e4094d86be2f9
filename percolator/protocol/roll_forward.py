"""Rolling locked cells forward or back, once the outcome of their transactions is known.

A commit is completed by the clients that meet the locks it has left: the cell gets its write record
and its notifications. A reader need not wait for that. It reads the value in the lock.

A client that meets many locks tells their tablet of the commits, once, and the tablet does the
rest: otherwise the client would read each lock, and send all of it back in another form. The driver
of a shared transaction tells all tablets right after its commit. Nothing depends on it: readers
take the values from the locks meanwhile, and a client that needs a cell now rolls it forward
itself. Only long scans wait shortly, so that the tablet gets ahead of them. A tablet is told only
of a commit that was seen on the primary.

When the writer of a popular cell dies, many transactions meet its lock at once. Each would ask the
same primary about the same transaction, and roll the same cell forward: a crowd of mutations of one
cell, which a tablet has to judge one batch after another. So a step that is in flight is not sent a
second time (`AskedOnce`). That is right only for a step whose answer does not depend on the caller,
and only if an answer already in flight is as good as a later one. It is: a decision never changes,
and where nothing is decided yet, the steps that act on the answer compare the lock again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    PercolatorError,
    SchemaChanged,
    SnapshotTooOld,
    Unavailable,
)
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT, WRITE_HEADER
from percolator.protocol import steps
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import ROLLED_BACK, Environment
from percolator.protocol.write_set import CommitSecondary
from percolator.routing.cells import Answer, CellMutation, FoundCell, Mutations, RollForward
from percolator.timestamps import is_expired

_log = logging.getLogger(__name__)

JOINED_SECONDS = 0.5
"""How long a caller waits for a step that another one has sent. Then it sends it as well: the other
may be waiting for steps of its own that no server answers."""


class About(NamedTuple):
    """The key that distinguishes one shared step from another."""

    what: str
    cell: CellAddress
    start_timestamp: int


class AskedOnce:
    """The shared steps that are in flight."""

    def __init__(self, env: Environment, cells: Mutations) -> None:
        self._env = env
        self._cells = cells
        self._under_way: dict[About, asyncio.Future[Answer]] = {}

    async def mutate(self, steps: Mapping[About, CellMutation], deadline: float) -> list[Answer]:
        """Returns the answers in the order of the steps; an error where there was no answer."""
        answers: dict[About, Answer] = {}
        waited_for: dict[About, asyncio.Future[Answer]] = {}
        while left := {about: step for about, step in steps.items() if about not in answers}:
            under_way = {about: self._under_way.get(about) for about in left}
            joined = {
                about: future
                for about, future in under_way.items()
                if future is not None and future is not waited_for.get(about)
            }
            own = {about: step for about, step in left.items() if about not in joined}
            if own:
                answers |= await self._send(own, deadline)
            if joined:
                seconds = deadline - self._env.now()
                await asyncio.wait(joined.values(), timeout=min(max(seconds, 0.0), JOINED_SECONDS))
                answers |= {about: one.result() for about, one in joined.items() if one.done()}
                if seconds <= JOINED_SECONDS:
                    late = DeadlineExceeded("no answer in time to a request that another sent")
                    answers = dict.fromkeys(joined, late) | answers
            waited_for = joined
        return [answers[about] for about in steps]

    async def _send(
        self, own: Mapping[About, CellMutation], deadline: float
    ) -> dict[About, Answer]:
        loop = asyncio.get_running_loop()
        sent = {about: loop.create_future() for about in own}
        self._under_way.update(sent)
        # If this caller is cancelled, callers that have joined it get this error, and ask again.
        cancelled = Unavailable("the caller that sent this request was cancelled")
        answers: dict[About, Answer] = dict.fromkeys(own, cancelled)
        try:
            told = await self._cells.mutate(list(own.values()), deadline)
            answers = dict(zip(own, told, strict=True))
        finally:
            for about, answer in answers.items():
                sent[about].set_result(answer)
                if self._under_way.get(about) is sent[about]:  # not sent again since
                    del self._under_way[about]
        return answers


LEFT_BEHIND_MAX = 4_096
"""How many locks may be rolled forward in the background for a client's readers."""
MANY = 32
"""From so many locks in one answer on, the tablet is told: there are probably more."""
WHOLE_PAGE = 512
"""A scan that meets so many has a long way to go, and waits for the tablet to get ahead: reading
values from locks costs several times as much as reading commits."""
AHEAD = 16
"""How far ahead, in times of what was met."""


class Rolling:
    """The locks that one client rolls forward or back, or has tablets roll forward."""

    def __init__(self, env: Environment, once: AskedOnce) -> None:
        self._env = env
        self._once = once
        self._left_behind = 0
        """How many locks are being rolled forward that readers did not wait for."""
        self._being_told: set[int] = set()
        """Tables to one of whose tablets a message is on its way."""

    def read(self, met: MetLock, read_at: int) -> FoundCell | None:
        """The cell as a snapshot sees it although it is locked. The lock's transaction is then
        known to have committed at or below the snapshot. Nothing newer can be there while the cell
        is locked. None if the cell has to be read again."""
        lock = met.lock
        commit_ts = self._env.verdicts.get(lock.start_timestamp)
        if commit_ts is None or commit_ts == ROLLED_BACK or commit_ts > read_at or met.on_primary:
            return None
        if lock.kind not in (KIND_PUT, KIND_DELETE):
            return None
        # As the tablet judges it once the cell is rolled forward: else the same snapshot would see
        # the value before, and not after.
        ttl = met.ttl_milliseconds
        gone = lock.kind == KIND_DELETE or (ttl and is_expired(commit_ts, read_at, ttl))
        return FoundCell(commit_ts, None if gone else lock.value)

    async def roll(self, met: Sequence[MetLock], deadline: float) -> list[MetLock]:
        """Rolls the locked cells forward or back, as the verdicts on their transactions say.
        Returns those for which that has to be repeated under a newer schema."""
        rolling: dict[About, CellMutation] = {}
        locks: dict[About, MetLock] = {}
        for one in met:
            address, lock = one.address, one.lock
            (table_id, row, column), start = address, lock.start_timestamp
            verdict = self._env.verdicts.get(start)
            if verdict is None:
                continue  # evicted since: the cache is bounded, and the caller will ask again
            about = About("resolve", address, start)
            locks[about] = one
            if verdict == ROLLED_BACK:
                rolling[about] = CellMutation(table_id, steps.roll_back(row, column, start))
                continue
            schema = await self._env.schema(table_id, deadline)
            observers = () if lock.kind == KIND_LOCK_ONLY else schema.observers.get(column, ())
            record = WRITE_HEADER.pack(start, lock.kind) + lock.value
            step = CommitSecondary(row, column, record, start, verdict, observers=observers)
            rolling[about] = CellMutation(table_id, step, schema.version)
        answers = await self._once.mutate(rolling, deadline)
        again = []
        collected: dict[About, CellMutation] = {}
        for about, answer in zip(rolling, answers, strict=True):
            sent = rolling[about]
            if isinstance(answer, SnapshotTooOld) and isinstance(sent.mutation, CommitSecondary):
                # The lock proves that it was not rolled forward before, so nothing was collected.
                message = sent.message()
                message.not_below = 0
                collected[about] = sent._replace(mutation=message)
            # Other answers need no action: the caller that met the lock looks again.
            if isinstance(answer, SchemaChanged):
                again.append(locks[about])
        await self._env.refresh_schemas(rolling.values(), answers, deadline)
        if collected:
            await self._once.mutate(collected, deadline)
        return again

    async def leave_behind(self, met: Sequence[MetLock]) -> Sequence[MetLock]:
        """Starts to roll the cells forward in the background: by their tablets if they are many.
        Returns the locks that are left to the caller, since too much of that is going on."""
        env = self._env
        if not env.background_is_full:
            met = await self._leave_to_tablets(met)
        if not met:
            return ()
        if env.background_is_full or self._left_behind + len(met) > LEFT_BEHIND_MAX:
            return met
        self._left_behind += len(met)
        env.background.start(self._roll_to_the_end(met, env.now() + env.limits.background_seconds))
        return ()

    async def _roll_to_the_end(self, met: Sequence[MetLock], deadline: float) -> None:
        try:
            left, backoff = met, self._env.backoff()
            while left := await self.roll(left, deadline):
                if not await backoff.pause(deadline):
                    return
        finally:
            self._left_behind -= len(met)

    async def _leave_to_tablets(self, met: Sequence[MetLock]) -> Sequence[MetLock]:
        """Tells the tablets that have many of these locks. Returns the other locks."""
        if len(met) < MANY or self._env.rolls_forward is None:
            return met
        by_table: defaultdict[int, list[MetLock]] = defaultdict(list)
        for one in met:
            by_table[one.address.table_id].append(one)
        left: list[MetLock] = []
        for table_id, locks in by_table.items():
            if len(locks) < MANY:
                left += locks
            elif len(locks) >= WHOLE_PAGE:
                try:
                    await self._tell_tablet(table_id, locks, AHEAD * len(locks))
                except PercolatorError as problem:
                    _log.info("a tablet was not told of commits: %s", problem)
                    left += locks
            elif table_id not in self._being_told:
                self._being_told.add(table_id)
                self._env.background.start(self._tell_in_background(table_id, locks))
        return left

    async def _tell_in_background(self, table_id: int, met: Sequence[MetLock]) -> None:
        try:
            await self._tell_tablet(table_id, met, 0)
        finally:
            self._being_told.discard(table_id)

    async def _tell_tablet(self, table_id: int, met: Sequence[MetLock], await_cells: int) -> None:
        env = self._env
        commits = {
            start: commit_ts
            for start in {one.lock.start_timestamp for one in met}
            if (commit_ts := env.verdicts.get(start)) is not None and commit_ts != ROLLED_BACK
        }
        row = min(one.address.row for one in met)
        deadline = env.now() + env.limits.background_seconds
        await tell_of_commits(env, table_id, commits, deadline, row, await_cells)


async def tell_of_commits(
    env: Environment,
    table_id: int,
    commits: Mapping[int, int],
    deadline: float,
    row: bytes | None = None,
    await_cells: int = 0,
) -> None:
    """Tells the tablet of this row, or all tablets of the table, which transactions have committed,
    and when; may wait until it is so many cells ahead."""
    if env.rolls_forward is None or not commits:
        return
    schema = await env.schema(table_id, deadline)
    order = RollForward(table_id, commits, schema.version, schema.observers, row, await_cells)
    try:
        await env.rolls_forward.roll_forward(order, deadline)
    except SchemaChanged:
        schema = await env.schemas.refresh(table_id, deadline)
        order = order._replace(schema_version=schema.version, observers=schema.observers)
        await env.rolls_forward.roll_forward(order, deadline)
