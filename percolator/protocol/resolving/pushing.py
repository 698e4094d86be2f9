"""Pushing: a reader makes a live writer commit above its snapshot, instead of waiting for it.

A push raises the least commit timestamp in the lock on the writer's primary. That number only grows
while the lock exists, and no commit below it is ever applied. So whoever has seen it in a primary's
lock knows for good: snapshots below it show nothing of the transaction. It is remembered, and a
snapshot that meets a thousand locks of one transaction pushes once.

How long a reader waits first:
- For an ordinary transaction, a short time: it is most likely about to commit.
- For a part of a shared transaction whose attempt still writes, not at all: the timestamp of its
  commit is fetched later. It is pushed a little ahead, so that the next readers need not push.
- For a part that has finished, until the snapshot is as old as that short time. Its driver may hold
  a commit timestamp. That is overtaken only by a younger snapshot, so the driver has that much time
  for its commit, however many readers there are. Older snapshots have waited enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from percolator.errors import CellAddress
from percolator.formats.records import LockRecord, timestamp_bytes
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.protocol.part_states import has_finished, is_being_written
from percolator.routing.cells import APPLIED, CellMutation, Refused
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1.cells_pb2 import SPACE_LOCK

_REMEMBERED_MAX = 4_096


class Pushing:
    """The pushes of one client, and the least commit timestamps that it has seen."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._least: OrderedDict[int, int] = OrderedDict()
        """By start timestamp."""

    def is_above(self, start: int, read_at: int) -> bool:
        """Whether the transaction is known to commit above the snapshot, if at all."""
        return self._least.get(start, 0) > read_at

    def passable(self, read_at: int, most: int) -> tuple[int, ...]:
        """The transactions known to commit above the snapshot, if at all: the last of them."""
        known = [start for start, least in self._least.items() if least > read_at]
        return tuple(known[-most:])

    def decided(self, start: int, commit: int) -> None:
        """Remembers a commit, which is all that a snapshot below it has to know."""
        self._note(start, commit)

    def seen(self, primary: LockRecord) -> None:
        """Remembers the lock on a primary, as it is stored."""
        self._note(primary.start_timestamp, primary.min_commit_timestamp)

    async def push(
        self,
        primaries: Sequence[LockRecord],
        read_at: int,
        *,
        waited_seconds: float,
        deadline: float,
    ) -> set[int]:
        """Pushes those whose time has come. Returns the start timestamps of all transactions among
        them that commit above the snapshot. `waited_seconds` is how long the caller has waited."""
        below = []
        for lock in primaries:
            self.seen(lock)
            if lock.min_commit_timestamp <= read_at:
                below.append(lock)
        due = await self._due(below, read_at, waited_seconds, deadline)
        if due:
            pushes = [push_step(lock.primary, lock, least) for lock, least in due]
            answers = await self._env.cells.mutate(pushes, deadline)
            for (lock, least), answer in zip(due, answers, strict=True):
                if answer is APPLIED:
                    self._note(lock.start_timestamp, least)
                elif isinstance(answer, Refused):
                    self._learn(lock, answer)
        starts = {lock.start_timestamp for lock in primaries}
        return {start for start in starts if self.is_above(start, read_at)}

    async def _due(
        self, locks: Sequence[LockRecord], read_at: int, waited_seconds: float, deadline: float
    ) -> list[tuple[LockRecord, int]]:
        """The locks to push now, and up to where."""
        patience = self._env.limits.push_after_seconds
        least = read_at + 1
        if waited_seconds >= patience:
            return [(lock, least) for lock in locks]
        ahead = least + (int(patience * 1000) << SEQUENCE_BITS)
        due = [(lock, ahead) for lock in locks if is_being_written(lock)]
        finished = [lock for lock in locks if has_finished(lock)]
        if finished:
            left = await self._until_old(read_at, deadline)
            if left < deadline - self._env.now():
                await self._env.clock.sleep(max(left, 0.0))
                due += [(lock, least) for lock in finished]
        return due

    async def _until_old(self, read_at: int, deadline: float) -> float:
        """In how many seconds the snapshot is old enough, by the oracle's clock."""
        seconds = max(deadline - self._env.now(), 0.001)
        now = await self._env.timestamps.get(timeout_seconds=seconds)
        age = ((now >> SEQUENCE_BITS) - (read_at >> SEQUENCE_BITS)) / 1000
        return self._env.limits.push_after_seconds - age

    def _learn(self, lock: LockRecord, answer: Refused) -> None:
        """Takes over the lock that is there instead: another reader may have pushed it."""
        cell = answer.cell
        if cell is None or cell.space != SPACE_LOCK:
            return
        if cell.value.startswith(timestamp_bytes(lock.start_timestamp)):
            self.seen(LockRecord.decode(cell.value))

    def _note(self, start: int, least: int) -> None:
        remembered = self._least
        if least > remembered.get(start, 0):
            remembered[start] = least
            remembered.move_to_end(start)
        if len(remembered) > _REMEMBERED_MAX:
            remembered.popitem(last=False)


def push_step(address: CellAddress, lock: LockRecord, least: int) -> CellMutation:
    """The step that raises the lock's least commit timestamp."""
    table_id, row, column = address
    raised = replace(lock, min_commit_timestamp=least)
    return CellMutation(table_id, steps.replace_lock(row, column, lock.prefix, raised.encode()))
