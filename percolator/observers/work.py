"""What waits to be run in one worker: each cell once per observer, the oldest change first.

Invariants:
- A cell is queued or being run at most once per observer, however often it is found.
- What waits is bounded in number and bytes. What finds no room is left where it is stored, and
  found again.
- An observer that is busy, failing or paused holds up nobody but itself: however much waits for it,
  there is room for the others.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from percolator.observers.watched import Watched

_FINISHED_MAX = 16_384
"""Cells remembered after their run, for findings that were under way meanwhile."""
_TIMESTAMPS_MAX = 128
"""Of one piece of work."""
_PARTS_OF_FREE_MAX = 4
"""One observer's work takes at most so many times the room that is left free: one alone 4 of 5
parts, two of them 4 of 9 each. So some is left for the others, however many are stuck."""
_PARTS_OF_FREE_ROOMY = 2
"""Whoever was refused is told when he has not more: then looking again is worth its while."""
_OTHER_BYTES = 400
"""Of one piece of work, besides row and column."""

Key = tuple[Watched, bytes, bytes]


class Work:
    """One observer's notifications about one cell."""

    __slots__ = (
        "attempts",
        "column",
        "found_seconds",
        "is_locked",
        "is_running",
        "retries",
        "row",
        "timestamps",
        "tried_commit",
        "watched",
    )

    def __init__(self, watched: Watched, row: bytes, column: bytes, found_seconds: float) -> None:
        self.watched = watched
        self.row = row
        self.column = column
        self.found_seconds = found_seconds
        """When this worker learned of it, on its monotonic clock."""
        self.timestamps: set[int] = set()
        """Of the notifications that are known."""
        self.is_running = False
        self.is_locked = False
        """This worker holds the advisory lock."""
        self.attempts = 0
        """Runs that have failed, for the change at `tried_commit`."""
        self.tried_commit = 0
        self.retries = 0
        """Runs in a row that were lost to others, or to a cluster that did not answer."""

    def note(self, timestamps: Iterable[int]) -> None:
        """Takes in notifications. Of very many the newest is kept in any case: it decides whether
        another run is due. The others are found again."""
        known = self.timestamps
        for timestamp in timestamps:
            if len(known) >= _TIMESTAMPS_MAX:
                newest = max(known)
                if timestamp <= newest:
                    continue
                known.discard(newest)
            known.add(timestamp)

    @property
    def key(self) -> Key:
        return self.watched, self.row, self.column

    @property
    def size_bytes(self) -> int:
        return len(self.row) + len(self.column) + _OTHER_BYTES

    def __repr__(self) -> str:
        return f"Work({self.watched.observer.name!r}, {self.row!r}, {self.column!r})"


class _Waiting(NamedTuple):
    oldest: int
    number: int
    """So that no two are compared any further."""
    work: Work


class WorkQueue:
    """Of all observers of one worker. Belongs to its event loop."""

    def __init__(
        self,
        *,
        rows_max: int,
        bytes_max: int,
        now: Callable[[], float],
        on_ready: Callable[[], None],
        on_finished_before: Callable[[Work, Sequence[int]], None],
        on_room: Callable[[], None],
    ) -> None:
        """`on_ready` is called when there is something to take; `on_finished_before` when something
        was found that a run has answered already; `on_room` when there is room again for work of
        an observer for which there was none."""
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._now = now
        self._on_ready = on_ready
        self._on_finished_before = on_finished_before
        self._on_room = on_room
        self._known: dict[Key, Work] = {}
        self._bytes = 0
        self._backlog: dict[Watched, int] = {}
        self._bytes_of: dict[Watched, int] = {}
        self._refused: set[Watched] = set()
        """They were told that there is no room."""
        self._ready: dict[Watched, list[_Waiting]] = {}
        self._running: dict[Watched, int] = {}
        self._delayed: dict[Key, asyncio.TimerHandle] = {}
        self._finished: OrderedDict[Key, int] = OrderedDict()
        self._numbers = itertools.count()

    # ------------------------------------------------------------------ state

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def has_room(self, watched: Watched) -> bool:
        """Whether more is taken in for this observer. If not, `on_room` is called later."""
        if self._takes_at_most(watched, _PARTS_OF_FREE_MAX, more=1):
            return True
        self._refused.add(watched)
        return False

    def _takes_at_most(self, watched: Watched, parts: int, *, more: int = 0) -> bool:
        free_rows, free_bytes = self._rows_max - len(self._known), self._bytes_max - self._bytes
        return (
            free_rows > 0
            and free_bytes > 0
            and self.backlog(watched) + more <= parts * free_rows
            and self._bytes_of.get(watched, 0) <= parts * free_bytes
        )

    def all(self) -> Iterable[Work]:
        return self._known.values()

    def backlog(self, watched: Watched) -> int:
        """What this worker knows of and has not finished. May be asked in any thread."""
        return self._backlog.get(watched, 0)

    # ------------------------------------------------------------------ coming in

    def offer(
        self, watched: Watched, row: bytes, column: bytes, timestamps: Iterable[int]
    ) -> Work | None:
        """Takes in what was found. None when there is no room, or nothing to do."""
        if not watched.is_active or not watched.watches(column):
            return None
        key = watched, row, column
        work = self._known.get(key)
        if work is not None:
            work.note(timestamps)
            return work
        if not self.has_room(watched):
            return None
        work = Work(watched, row, column, self._now())
        work.note(timestamps)
        seen = self._finished.get(key, 0)
        if seen and max(work.timestamps) <= seen:
            self._on_finished_before(work, sorted(work.timestamps))
            return None
        self._known[key] = work
        self._bytes += work.size_bytes
        self._backlog[watched] = self._backlog.get(watched, 0) + 1
        self._bytes_of[watched] = self._bytes_of.get(watched, 0) + work.size_bytes
        self._make_ready(work)
        return work

    def _make_ready(self, work: Work) -> None:
        ready = self._ready.setdefault(work.watched, [])
        heappush(ready, _Waiting(min(work.timestamps), next(self._numbers), work))
        self._on_ready()

    # ------------------------------------------------------------------ going out

    def take(self) -> Work | None:
        """The work with the oldest change among the observers that may run now."""
        best: Watched | None = None
        oldest = 0
        for watched, ready in self._ready.items():
            while ready and self._known.get(ready[0].work.key) is not ready[0].work:
                heappop(ready)  # dropped since
            if not ready or not self.may_run(watched):
                continue
            if best is None or ready[0].oldest < oldest:
                best, oldest = watched, ready[0].oldest
        if best is None:
            return None
        work = heappop(self._ready[best]).work
        work.is_running = True
        self._running[best] = self._running.get(best, 0) + 1
        return work

    def may_run(self, watched: Watched) -> bool:
        running = self._running.get(watched, 0) + watched.counters.hung
        return watched.is_active and running < watched.observer.concurrency

    def finished(self, work: Work, seen: int) -> None:
        """A run has answered everything up to `seen`. What came since then begins anew."""
        self._stopped(work)
        self._remember(work.key, seen)
        work.timestamps = {timestamp for timestamp in work.timestamps if timestamp > seen}
        work.attempts = work.retries = 0
        if work.timestamps:
            self._make_ready(work)
        else:
            self._forget(work)

    def again(self, work: Work, seconds: float) -> None:
        """It is to be run again, after a pause."""
        self._stopped(work)
        loop = asyncio.get_running_loop()
        self._delayed[work.key] = loop.call_later(seconds, self._due, work)

    def drop(self, work: Work) -> None:
        """It is left to others, or to be found again."""
        if work.is_running:
            self._stopped(work)
        self._forget(work)

    def drop_inactive(self) -> None:
        """What waits for observers that are not run any more stays stored, and is forgotten."""
        for work in list(self._known.values()):
            if not work.watched.is_active and not work.is_running:
                self._forget(work)

    def close(self) -> None:
        for timer in self._delayed.values():
            timer.cancel()
        self._delayed.clear()

    def _due(self, work: Work) -> None:
        self._delayed.pop(work.key, None)
        self._make_ready(work)

    def _stopped(self, work: Work) -> None:
        work.is_running = False
        self._running[work.watched] -= 1

    def _forget(self, work: Work) -> None:
        if self._known.get(work.key) is not work:
            return
        del self._known[work.key]
        self._bytes -= work.size_bytes
        self._backlog[work.watched] -= 1
        self._bytes_of[work.watched] -= work.size_bytes
        timer = self._delayed.pop(work.key, None)
        if timer is not None:
            timer.cancel()
        if self._refused:
            self._tell_of_room()

    def _tell_of_room(self) -> None:
        roomy = {one for one in self._refused if self._takes_at_most(one, _PARTS_OF_FREE_ROOMY)}
        if roomy:
            self._refused -= roomy
            self._on_room()

    def _remember(self, key: Key, seen: int) -> None:
        self._finished[key] = seen
        self._finished.move_to_end(key)
        if len(self._finished) > _FINISHED_MAX:
            self._finished.popitem(last=False)
