"""Rolling locked cells forward or back, once the outcome of their transactions is known.

A commit is done by whoever meets a lock that it has left: the cell gets its write record and its
notifications. A reader need not wait for that. It reads the value in the lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import SchemaChanged, SnapshotTooOld
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT, WRITE_HEADER
from percolator.protocol import steps
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import ROLLED_BACK, Environment
from percolator.protocol.resolving.asked_once import About, AskedOnce
from percolator.protocol.resolving.rolling_in_bulk import BulkRolling
from percolator.protocol.write_set import CommitSecondary
from percolator.routing.cells import CellMutation, FoundCell
from percolator.timestamps import is_expired

_LEFT_BEHIND_MAX = 4_096
"""How many locks may be rolled forward behind the backs of a client's readers."""


class Rolling:
    """The locks that one client rolls forward or back."""

    def __init__(self, env: Environment, once: AskedOnce) -> None:
        self._env = env
        self._once = once
        self._bulk = BulkRolling(env)
        self._left_behind = 0
        """How many locks are being rolled forward that readers did not wait for."""

    def read(self, met: MetLock, read_at: int) -> FoundCell | None:
        """What a snapshot sees in a locked cell, if the lock itself says so: its transaction is
        known to have committed at or below the snapshot. Nothing newer can be there while the cell
        is locked. None if the cell has to be read again."""
        lock = met.lock
        commit = self._env.verdicts.get(lock.start_timestamp)
        if commit is None or commit == ROLLED_BACK or commit > read_at or met.on_primary:
            return None
        if lock.kind not in (KIND_PUT, KIND_DELETE):
            return None
        # As the tablet judges it once the cell is rolled forward: else the same snapshot would see
        # the value before, and not after.
        ttl = met.ttl_milliseconds
        gone = lock.kind == KIND_DELETE or (ttl and is_expired(commit, read_at, ttl))
        return FoundCell(commit, None if gone else lock.value)

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
        """Has the cells rolled forward in the background, by their tablets if they are many.
        Returns those for which too much of that is going on in this client."""
        env = self._env
        if not env.background_is_full:
            met = await self._bulk.leave(met)
        if not met:
            return ()
        if env.background_is_full or self._left_behind + len(met) > _LEFT_BEHIND_MAX:
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
