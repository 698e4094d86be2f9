"""Reading at a timestamp: the paper's Figure 6, `Get`.

A snapshot at r shows exactly the commits with commit timestamp <= r. A lock with start timestamp
<= r is in the way: its owner may already hold a commit timestamp below r. So the reader resolves
the lock if the owner has finished or is gone. It waits if the owner is alive, and after a while
pushes the owner's commit above r.

If it has committed at or below r, the lock says what the cell holds, and no further read is needed.
Once a lock cannot affect this snapshot, it never will, since r does not change. The row is read
again with the start timestamps of such locks, which the read may pass. That list has a limit; if a
row has more such locks, the rest are removed, or pushed one by one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Final, Protocol

from percolator.errors import CellAddress, DeadlineExceeded, InvalidArgument
from percolator.protocol import conflicts
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import Environment, LockWait, Statistics
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.routing.cells import FoundCell, RowRequest, RowResult
from percolator.routing.lanes import CellAnswer
from percolator.timestamps import NEWEST
from percolator.v1.tabletserver_pb2 import RowRead

PASSING_MAX = 256
"""How many start timestamps a read of one row may carry."""


async def read_rows(
    env: Environment,
    cleanup: Cleanup,
    requests: Sequence[RowRequest],
    deadline: float,
    statistics: Statistics,
    *,
    bytes_max: int = 0,
) -> list[RowResult]:
    """Reads the rows, all at the same timestamp. No rows, no round trip.

    Raises `InvalidArgument` if they have more than `bytes_max` bytes; 0 means any number.
    """
    if not requests:
        return []
    statistics.round_trips += 1
    statistics.rows_read += len(requests)
    answers = await env.cells.read(requests, deadline, bytes_max=bytes_max)
    for answer in answers:
        if answer.locks:
            timestamp = requests[0].read.timestamp
            resolver = LockResolver(env, cleanup, timestamp, deadline, statistics)
            await resolver.read_past(requests, answers, bytes_max=bytes_max)
            break
    return answers


class LockResolver:
    """One reader that has met locks: patient at first, then more and more insistent."""

    def __init__(
        self,
        env: Environment,
        cleanup: Cleanup,
        timestamp: int,
        deadline: float,
        statistics: Statistics,
        *,
        reads_values: bool = True,
    ) -> None:
        """It reads at the timestamp, until the deadline.

        `reads_values` is whether it goes on with what a lock says (`Cleanup.read`).
        """
        self._env = env
        self._cleanup = cleanup
        self._timestamp = timestamp
        self._deadline = deadline
        self._statistics = statistics
        self._reads_values = reads_values
        self._backoff = env.backoff()
        self._began = env.now()
        self._waits: dict[int, LockWait] = {}
        self._decided: set[int] = set()
        self._passable: set[int] = set()

    async def read_past(
        self, requests: Sequence[RowRequest], answers: list[RowResult], *, bytes_max: int = 0
    ) -> None:
        """Resolves the locks that the answers report, and completes those answers: with what the
        locks say, or by reading the rows again."""
        blocked = [index for index, answer in enumerate(answers) if answer.locks]
        while blocked:
            met = {
                index: [MetLock.of(requests[index].table_id, cell) for cell in answers[index].locks]
                for index in blocked
            }
            try:
                await self.resolve([lock for locks in met.values() for lock in locks])
                for index in blocked:
                    if self._complete(requests[index].read, answers[index], met[index]):
                        del met[index]
                blocked = list(met)
                if not blocked:
                    return
                again = [requests[index] for index in blocked]
                surplus: list[MetLock] = []
                for index, locks in met.items():
                    surplus += _pass(requests[index].read, self.passable(locks))
                if surplus:
                    await self.remove(surplus)
                self._statistics.round_trips += 1
                self._statistics.retries += 1
                found = await self._env.cells.read(again, self._deadline, bytes_max=bytes_max)
            except DeadlineExceeded as late:
                # The time ran out in the middle of a call, but the lock is what used it up.
                raise conflicts.locked(self._env, self._timestamp, met[blocked[0]][0]) from late
            for index, answer in zip(blocked, found, strict=True):
                answers[index] = answer
            blocked = [index for index in blocked if answers[index].locks]

    def _complete(self, read: RowRead, answer: RowResult, met: Sequence[MetLock]) -> bool:
        """Adds what the locks say, if all of them say what their cells hold."""
        found = [(lock.address.column, self._cleanup.read(lock, self._timestamp)) for lock in met]
        if any(cell is None for _, cell in found):
            return False
        answer.locks = []
        for column, cell in found:
            if cell is not None and (cell.value is not None or read.report_deletes):
                answer.found[column] = cell
        return True

    async def resolve(self, met: Sequence[MetLock]) -> None:
        """Returns when reading again is worthwhile. Raises `ConflictError` when the time is up, as
        a commit does that meets a lock, so that one handler serves both."""
        waited = self._env.now() - self._began
        self._note(met, waited)
        if self._backoff.rounds == 0:
            waited = 0.0
        starts = {lock.lock.start_timestamp for lock in met}
        passable = await self._cleanup.resolve(
            met,
            deadline=self._deadline,
            known_now=self._timestamp,
            waited_seconds=waited,
            read_at=self._timestamp,
            reads_values=self._reads_values,
        )
        self._passable |= passable
        verdicts = self._env.verdicts
        decided = {
            start for start in starts if start in passable or verdicts.get(start) is not None
        }
        if decided == starts and not decided <= self._decided:
            self._decided |= decided
            return  # read again at once; if that meets the same locks once more, we pause
        if not await self._backoff.pause(self._deadline):
            raise conflicts.locked(self._env, self._timestamp, met[0])

    def passable(self, met: Sequence[MetLock]) -> list[MetLock]:
        """The locks among these that do not matter to this reader."""
        return [lock for lock in met if lock.lock.start_timestamp in self._passable]

    async def remove(self, surplus: Sequence[MetLock]) -> None:
        """Removes or pushes passable locks for which a read has no room."""
        await self._cleanup.resolve_passable(
            surplus, read_at=self._timestamp, deadline=self._deadline
        )

    def _note(self, met: Sequence[MetLock], waited: float) -> None:
        for address, lock, _ in met:
            start = lock.start_timestamp
            wait = self._waits.get(start)
            if wait is None:
                wait = self._waits[start] = LockWait(*address, start, 0.0)
                self._statistics.lock_waits.append(wait)
            else:
                wait.seconds = waited


def _pass(read: RowRead, passable: Sequence[MetLock]) -> list[MetLock]:
    """Lets the next read of the row pass these locks. Returns those for which there is no room."""
    passing = dict.fromkeys(read.passing)
    surplus = []
    for lock in passable:
        start = lock.lock.start_timestamp
        if start in passing or len(passing) < PASSING_MAX:
            passing[start] = None
        else:
            surplus.append(lock)
    del read.passing[:]
    read.passing.extend(passing)
    return surplus


# Reading one cell as it is now, in one round trip: its tablet says what is newest.
#
# A snapshot needs a timestamp so that all its reads show the same moment. A read that is the only
# one does not: it shows the moment at which the tablet looks. That is the same as if the oracle had
# handed out a timestamp at this moment:
#
# - Every commit that has a timestamp by then is shown, or is in the way. A commit in one round
#   holds its cells before it asks for its timestamp, and the tablet waits for held cells. A commit
#   in two phases has a lock before that, and *every* lock is in the way: its owner may have
#   committed at its primary already, and said so.
# - Every later commit of the cell asks for its timestamp later.
#
# Nothing can be decided about a lock without a timestamp, since its owner may be pushed above none.
# So if one is met, the cell is read again, in a snapshot. So is a cell whose values expire: only a
# timestamp decides which have.

TIMESTAMPS_SECONDS = 60.0
"""After a server has refused such a read, timestamps are used for this long: it may be upgraded."""


class NotNow(Enum):
    """The answer that takes a snapshot instead."""

    NOT_NOW = "not now"


NOT_NOW: Final = NotNow.NOT_NOW


class ReadsCells(Protocol):
    """What reads single cells."""

    def read_cell(
        self, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> Awaitable[CellAnswer]: ...


class NewestReads:
    """Reads of single cells without a timestamp, and what is known about the servers' releases."""

    def __init__(self, cells: ReadsCells, now: Callable[[], float]) -> None:
        self._cells = cells
        self._now = now
        self._timestamps_until = 0.0

    @property
    def are_possible(self) -> bool:
        return self._now() >= self._timestamps_until

    async def read(self, cell: CellAddress, deadline: float) -> FoundCell | NotNow | None:
        """The newest version of the cell; None if there is none. NOT_NOW if it takes a snapshot."""
        table_id, row, column = cell
        try:
            found = await self._cells.read_cell(table_id, row, column, NEWEST, deadline)
        except InvalidArgument as refused:
            if not refused.field.endswith(".timestamp"):
                raise
            # Values of the column expire, and this client does not know it yet.
            self._timestamps_until = self._now() + TIMESTAMPS_SECONDS
            return NOT_NOW
        return NOT_NOW if isinstance(found, RowResult) else found
