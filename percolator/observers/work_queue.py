"""The queue of one worker: each cell once per observer, the oldest change first.

Invariants:
- A cell is queued or being run at most once per observer, however often it is found.
- The queue is bounded in number and bytes. Work that finds no space stays where it is stored, and
  is found again.
- An observer that is busy, failing or paused holds up only itself: however much waits for it, there
  is space for the others.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from percolator.codecs.readable import quoted
from percolator.observers.watched import Watched
from percolator.protocol.contention import Contender, HotCells
from percolator.timestamps import SEQUENCE_BITS

TIMESTAMPS_MAX = 2_048
"""The most timestamps kept for one work item. Those above it are found again by scans, a few at a
time: a cell that is notified very often would be looked at for minutes after its last run."""
_OTHER_BYTES = 400
"""The memory of one work item, besides row and column."""

Key = tuple[Watched, bytes, bytes]


class Work:
    """One observer's notifications about one cell, as the worker that has found them knows them."""

    __slots__ = (
        "attempts",
        "column",
        "contender",
        "found_seconds",
        "has_lost",
        "is_alone",
        "is_known",
        "is_led",
        "is_locked",
        "is_running",
        "key",
        "retries",
        "row",
        "size_bytes",
        "timestamps",
        "tried_commit",
        "watched",
    )

    def __init__(self, watched: Watched, row: bytes, column: bytes, found_seconds: float) -> None:
        self.watched = watched
        self.row = row
        self.column = column
        self.key: Key = (watched, row, column)
        self.size_bytes = len(row) + len(column) + _OTHER_BYTES
        self.found_seconds = found_seconds
        """When this worker learned of it, by its monotonic clock."""
        self.timestamps: set[int] = set()
        """The timestamps of its known notifications."""
        self.is_known = False
        """It is in the queue: not finished, and not dropped."""
        self.is_running = False
        self.is_led = False
        """It is being run along with other work, which counts as the run."""
        self.is_alone = False
        """A run for it and other rows has failed: until it is done, its runs are for no others."""
        self.is_locked = False
        """This worker holds the advisory lock."""
        self.attempts = 0
        """Failed runs for the change at `tried_commit`."""
        self.tried_commit = 0
        self.retries = 0
        """Consecutive runs that conflicted, or that the cluster did not answer."""
        self.contender: Contender | None = None
        """Set while it stands in line at cells where it has lost, or where it would lose."""
        self.has_lost = False
        """A run has lost to another transaction, and none has committed since."""

    @property
    def in_line(self) -> bool:
        """True if it stands in line at hot cells, or is at the head of one."""
        return self.contender is not None and self.contender.in_line

    def leave(self) -> None:
        """Gives up its place in line: if it was waiting, it runs at once."""
        if self.contender is not None:
            self.contender.leave()
            self.contender = None

    def note(self, timestamps: Iterable[int], most: int = TIMESTAMPS_MAX) -> None:
        """Adds notifications. If there are too many, the newest is always kept, since it decides
        whether another run is due. The others are found again."""
        known = self.timestamps
        for timestamp in timestamps:
            if len(known) >= most:
                newest = max(known)
                if timestamp <= newest:
                    continue
                known.discard(newest)
            known.add(timestamp)

    def seconds_until(self, commit: int | None) -> float | None:
        """The seconds from its oldest change to a commit, by the oracle's clock: the clocks of
        machines do not matter."""
        if commit is None:
            return None
        waited = (commit >> SEQUENCE_BITS) - (min(self.timestamps) >> SEQUENCE_BITS)
        return max(waited, 0) / 1000

    def __repr__(self) -> str:
        return f"Work({self.watched.observer.name!r}, {quoted(self.row)}, {quoted(self.column)})"


_FINISHED_MAX = 16_384
"""Cells remembered after their run, since a scan that was in progress may still report them."""
TIMESTAMPS_OF_ALL_MAX = 262_144
"""While this many are kept for all work together, one item gets no more than the next number."""
_TIMESTAMPS_WHEN_FULL = 128
_TIMES_FREE_MAX = 4
"""One observer's work may take at most this many times the space that is still free: one observer
alone gets 4/5 of the queue, two get 4/9 each. So however many are stuck, others find space."""
_TIMES_FREE_AGAIN = 2
"""An observer that was refused space is notified when its work takes less than this many times the
free space. By then there is enough space to make another scan worthwhile."""
IN_LINE_MAX = 16
"""While this much of an observer's work stands in line at a hot cell, the rest stays in the queue.
It is enough to keep the line from running empty, and little if the next runs write other cells."""
_LOOKED_AT_PER_ROW = 8
"""How much of the oldest work is looked at for each row of a batch: the other rows may be in other
tablets."""
_OLDEST_OF_ALL = 0
"""The place in the queue of work at the head of a line: others wait until it has ended."""

_ReadyWork = tuple[int, int, Work]
"""The oldest change, a number that is unique, so that a comparison never reaches the work, and the
work."""


class _Lane:
    """The work of one observer."""

    __slots__ = ("backlog", "in_line", "ready", "running", "size_bytes", "watched")

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.backlog = 0
        """How many known cells it has not finished."""
        self.size_bytes = 0
        self.ready: list[_ReadyWork] = []
        """A heap. It may contain some that was dropped."""
        self.running = 0
        self.in_line: dict[Work, None] = {}
        """Work that waits at a hot cell."""

    @property
    def may_run(self) -> bool:
        watched, hung = self.watched, self.watched.counters.hung
        has_place = hung < watched.observer.threads and self.running + hung < watched.runs_max
        return watched.is_active and has_place


class _Finished(NamedTuple):
    """The last run for a cell."""

    seen: int
    """The timestamp of its snapshot."""
    pauses_until: float
    """When the observer's pause ends, by the worker's monotonic clock."""


_NEVER = _Finished(-1, 0.0)


class WorkQueue:
    """The work of all observers of one worker. Belongs to its event loop."""

    def __init__(
        self,
        *,
        rows_max: int,
        bytes_max: int,
        now: Callable[[], float],
        hot_cells: HotCells,
        on_ready: Callable[[], None],
        on_finished_before: Callable[[Work, Sequence[int]], None],
        on_space: Callable[[], None],
    ) -> None:
        """`on_ready` is called when there is work to take; `on_finished_before` when work was found
        that a run has already done; `on_space` when there is space again for an observer whose work
        was refused."""
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._now = now
        self._hot_cells = hot_cells
        self._on_ready = on_ready
        self._on_finished_before = on_finished_before
        self._on_space = on_space
        self._known: dict[Key, Work] = {}
        self._bytes = 0
        self._timestamps = 0
        """How many timestamps all work has together."""
        self._lanes: dict[Watched, _Lane] = {}
        self._refused: set[Watched] = set()
        """Observers whose work was refused for lack of space."""
        self._delayed: dict[Key, asyncio.TimerHandle] = {}
        self._finished: OrderedDict[Key, _Finished] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def _lane(self, watched: Watched) -> _Lane:
        lane = self._lanes.get(watched)
        if lane is None:
            lane = self._lanes[watched] = _Lane(watched)
        return lane

    def has_space(self, watched: Watched) -> bool:
        """True if this observer may queue more work. If not, `on_space` is called later."""
        if self._takes_at_most(self._lane(watched), _TIMES_FREE_MAX, more=1):
            return True
        self._refused.add(watched)
        return False

    def _takes_at_most(self, lane: _Lane, times: int, *, more: int = 0) -> bool:
        free_rows, free_bytes = self._rows_max - len(self._known), self._bytes_max - self._bytes
        return (
            free_rows > 0
            and free_bytes > 0
            and lane.backlog + more <= times * free_rows
            and lane.size_bytes <= times * free_bytes
        )

    def all(self) -> Iterable[Work]:
        return self._known.values()

    def backlog(self, watched: Watched) -> int:
        """How many known cells this observer has not finished. May be called in any thread."""
        lane = self._lanes.get(watched)
        return 0 if lane is None else lane.backlog

    def offer(
        self, watched: Watched, row: bytes, column: bytes, timestamps: Iterable[int]
    ) -> Work | None:
        """Adds work that was found. Returns None if there is no space, or nothing to do."""
        if not watched.is_active or not watched.watches(column):
            return None
        key = watched, row, column
        work = self._known.get(key)
        if work is not None:
            before = len(work.timestamps)
            work.note(timestamps, self._most_timestamps())
            self._timestamps += len(work.timestamps) - before
            return work
        if not self.has_space(watched):
            return None
        work = Work(watched, row, column, self._now())
        work.note(timestamps, self._most_timestamps())
        if max(work.timestamps) <= self._finished.get(key, _NEVER).seen:
            self._on_finished_before(work, sorted(work.timestamps))
            return None
        self._known[key] = work
        work.is_known = True
        self._timestamps += len(work.timestamps)
        self._bytes += work.size_bytes
        lane = self._lane(watched)
        lane.backlog += 1
        lane.size_bytes += work.size_bytes
        self._make_ready_after_pause(work)
        return work

    def _most_timestamps(self) -> int:
        is_full = self._timestamps >= TIMESTAMPS_OF_ALL_MAX
        return _TIMESTAMPS_WHEN_FULL if is_full else TIMESTAMPS_MAX

    def in_line(self, watched: Watched) -> Sequence[Work]:
        """This observer's work that waits in line at cells where it would lose."""
        return list(self._lane(watched).in_line)

    def _make_ready_after_pause(self, work: Work) -> None:
        """If the last run for the cell was not long ago, waits for more changes to it."""
        seconds = 0.0
        if work.watched.observer.pause_seconds:
            seconds = self._finished.get(work.key, _NEVER).pauses_until - self._now()
        if seconds > 0.0:
            self._delay(work, seconds)
        else:
            self._make_ready(work)

    def _make_ready(self, work: Work) -> None:
        oldest = min(work.timestamps) if work.contender is None else _OLDEST_OF_ALL
        heappush(self._lane(work.watched).ready, (oldest, next(self._numbers), work))
        self._on_ready()

    def take(self) -> Work | None:
        """The work with the oldest change among the observers that may run now."""
        best: _Lane | None = None
        lowest = 0
        for lane in self._lanes.values():
            ready = lane.ready
            while ready and not ready[0][2].is_known:
                heappop(ready)  # dropped meanwhile
            if not ready:
                continue
            oldest, _, work = ready[0]
            if (
                (best is None or oldest < lowest)
                and lane.may_run
                and (work.contender is not None or self._may_begin(lane))
            ):
                best, lowest = lane, oldest
        if best is None:
            return None
        work = heappop(best.ready)[2]
        work.is_running = True
        best.running += 1
        return work

    def take_along(self, first: Work, place: Callable[[int, bytes], Hashable]) -> list[Work]:
        """The work, and more of its observer to be done in the same transaction, the oldest first:
        other rows of its column and its `place`. None of it has lost or failed."""
        watched, works = first.watched, [first]
        if watched.batch_max == 1 or first.is_alone or first.contender or watched.hot_cell:
            return works
        ready, left = self._lane(watched).ready, list[_ReadyWork]()
        here = place(watched.table_id, first.row)
        for _ in range(_LOOKED_AT_PER_ROW * watched.batch_max):
            if not ready or len(works) == watched.batch_max:
                break
            entry = heappop(ready)
            work = entry[2]
            if not work.is_known:
                continue  # dropped meanwhile
            if (
                work.is_alone
                or work.contender
                or work.column != first.column
                or place(watched.table_id, work.row) != here
            ):
                left.append(entry)
                continue
            work.is_running = work.is_led = True
            works.append(work)
        for entry in left:
            heappush(ready, entry)
        return works

    def _may_begin(self, lane: _Lane) -> bool:
        """Work that has not lost yet may be taken, even if it would only stand in line."""
        cell = lane.watched.hot_cell
        if cell is None or cell not in self._hot_cells.lines:
            return True
        return len(lane.in_line) < IN_LINE_MAX

    def finished(self, work: Work, seen: int) -> None:
        """A run has handled everything up to `seen`. Later notifications are queued again."""
        self._stopped(work)
        work.leave()
        self._remember(work, seen)
        before = len(work.timestamps)
        work.timestamps = {timestamp for timestamp in work.timestamps if timestamp > seen}
        self._timestamps += len(work.timestamps) - before
        work.attempts = work.retries = 0
        work.has_lost = work.is_alone = False
        if work.timestamps:
            self._make_ready_after_pause(work)
        else:
            self._forget(work)

    def again(self, work: Work, seconds: float) -> None:
        """Queues the work again after a pause, and at the head of the line if it is a contender."""
        self._stopped(work)
        if seconds:
            self._delay(work, seconds)
        else:
            self._due(work)

    def drop(self, work: Work) -> None:
        """Forgets the work: it is left to other workers, or found again."""
        if work.is_running:
            self._stopped(work)
        self._forget(work)

    def drop_inactive(self) -> Sequence[Work]:
        """Forgets the work of observers that no longer run, and returns it. Their notifications
        stay stored."""
        return self._drop_all([one for one in self._idle() if not one.watched.is_active])

    def drop_idle(self) -> Sequence[Work]:
        """Forgets all work of which no run is in progress, and returns it."""
        return self._drop_all(self._idle())

    def _idle(self) -> list[Work]:
        return [work for work in self._known.values() if not work.is_running]

    def _drop_all(self, dropped: Sequence[Work]) -> Sequence[Work]:
        for work in dropped:
            self._forget(work)
        return dropped

    def close(self) -> None:
        for timer in self._delayed.values():
            timer.cancel()
        self._delayed.clear()
        for work in self._known.values():
            work.leave()

    def _delay(self, work: Work, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._delayed[work.key] = loop.call_later(seconds, self._due, work)

    def _due(self, work: Work) -> None:
        self._delayed.pop(work.key, None)
        if work.contender is None:
            self._make_ready(work)
        else:
            self._lane(work.watched).in_line[work] = None
            work.contender.stand_in_line().add_done_callback(partial(self._out_of_line, work))

    def _out_of_line(self, work: Work, _: asyncio.Future[None]) -> None:
        del self._lane(work.watched).in_line[work]
        if work.is_known:
            self._make_ready(work)

    def _stopped(self, work: Work) -> None:
        work.is_running = False
        if work.is_led:
            work.is_led = False
        else:
            self._lane(work.watched).running -= 1

    def _forget(self, work: Work) -> None:
        work.leave()
        if not work.is_known:
            return
        work.is_known = False
        del self._known[work.key]
        self._timestamps -= len(work.timestamps)
        self._bytes -= work.size_bytes
        lane = self._lane(work.watched)
        lane.backlog -= 1
        lane.size_bytes -= work.size_bytes
        timer = self._delayed.pop(work.key, None)
        if timer is not None:
            timer.cancel()
        again = {
            one for one in self._refused if self._takes_at_most(self._lane(one), _TIMES_FREE_AGAIN)
        }
        if again:
            self._refused -= again
            self._on_space()

    def _remember(self, work: Work, seen: int) -> None:
        pause = work.watched.observer.pause_seconds
        self._finished[work.key] = _Finished(seen, self._now() + pause if pause else 0.0)
        self._finished.move_to_end(work.key)
        if len(self._finished) > _FINISHED_MAX:
            self._finished.popitem(last=False)
