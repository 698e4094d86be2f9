"""Reading at a timestamp: the paper's Figure 6, `Get`.

A snapshot at r shows exactly the commits with commit timestamp <= r. A lock with start timestamp
<= r is in the way: its owner may already hold a commit timestamp below r. So the reader settles the
lock if its owner is done or gone, waits for it if it lives, and after a while pushes it above r.

A lock that is known not to matter for this snapshot stays so for ever, since r does not change:
each row is read again with the start timestamps of those that it may pass. They are few; a row with
more such locks has the rest of them removed, or pushed themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import DeadlineExceeded, Retry
from percolator.protocol.cleanup import Cleanup, MetLock
from percolator.protocol.surroundings import LockWait, Statistics, Surroundings
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.wire.questions import RowAnswer, RowQuestion

PASSING_MAX = 256
"""Of each row: more than that travel with no read."""


async def read_rows(
    around: Surroundings,
    cleanup: Cleanup,
    questions: Sequence[RowQuestion],
    timestamp: int,
    deadline: float,
    statistics: Statistics,
) -> list[RowAnswer]:
    """What the rows are at `timestamp`, which is the one in every question."""
    statistics.round_trips += 1
    answers = await around.cells.read(questions, deadline)
    for answer in answers:
        if answer.locks:
            await read_past_locks(
                around, cleanup, questions, answers, timestamp, deadline, statistics
            )
            break
    return answers


async def read_past_locks(
    around: Surroundings,
    cleanup: Cleanup,
    questions: Sequence[RowQuestion],
    answers: list[RowAnswer],
    timestamp: int,
    deadline: float,
    statistics: Statistics,
) -> None:
    """Settles the locks that the answers report, and reads those rows again into `answers`."""
    clearing = Clearing(around, cleanup, timestamp, deadline, statistics)
    blocked = [index for index, answer in enumerate(answers) if answer.locks]
    while blocked:
        met = {
            index: [MetLock.of(questions[index].table_id, cell) for cell in answers[index].locks]
            for index in blocked
        }
        await clearing.clear([lock for locks in met.values() for lock in locks])
        surplus: list[MetLock] = []
        for index, locks in met.items():
            surplus += _pass(questions[index].read, clearing.passable(locks))
        if surplus:
            await cleanup.clear_away(surplus, read_at=timestamp, deadline=deadline)
        again = [questions[index] for index in blocked]
        statistics.round_trips += 1
        statistics.retries += 1
        for index, answer in zip(blocked, await around.cells.read(again, deadline), strict=True):
            answers[index] = answer
        blocked = [index for index in blocked if answers[index].locks]


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


class Clearing:
    """One reader's dealings with locks: patient at first, then more and more insistent."""

    def __init__(
        self,
        around: Surroundings,
        cleanup: Cleanup,
        timestamp: int,
        deadline: float,
        statistics: Statistics,
    ) -> None:
        self._around = around
        self._cleanup = cleanup
        self._timestamp = timestamp
        self._deadline = deadline
        self._statistics = statistics
        self._backoff = around.backoff()
        self._began = around.clock.monotonic_seconds()
        self._waits: dict[int, LockWait] = {}
        self._decided: set[int] = set()
        self._passable: set[int] = set()

    def passable(self, met: Sequence[MetLock]) -> list[MetLock]:
        """Those of them that do not matter to this reader."""
        return [lock for lock in met if lock.lock.start_timestamp in self._passable]

    async def clear(self, met: Sequence[MetLock]) -> None:
        """Returns when reading again is worthwhile. Raises `DeadlineExceeded`."""
        waited = self._around.clock.monotonic_seconds() - self._began
        self._note(met, waited)
        if self._backoff.rounds == 0:
            waited = 0.0
        starts = {lock.lock.start_timestamp for lock in met}
        passable = await self._cleanup.clear(
            met,
            deadline=self._deadline,
            known_now=self._timestamp,
            waited_seconds=waited,
            read_at=self._timestamp,
        )
        self._passable |= passable
        verdicts = self._around.verdicts
        decided = {
            start for start in starts if start in passable or verdicts.get(start) is not None
        }
        if decided == starts and not decided <= self._decided:
            self._decided |= decided
            return  # there is nothing to wait for; unless it did not help, and we meet again
        if not await self._backoff.pause(self._deadline):
            lock = met[0]
            late = DeadlineExceeded(
                f"{lock.address} is locked by transaction {lock.lock.start_timestamp}"
            )
            late.retry = Retry.SAFE
            raise late

    def _note(self, met: Sequence[MetLock], waited: float) -> None:
        for address, lock in met:
            start = lock.start_timestamp
            wait = self._waits.get(start)
            if wait is None:
                wait = self._waits[start] = LockWait(*address, start, 0.0)
                self._statistics.lock_waits.append(wait)
            else:
                wait.seconds = waited
