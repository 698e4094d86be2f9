"""Waits until observers have nothing left to do, and proves it.

At any time, each pending piece of work is visible as something that a tablet can be asked for:
a lock on an observed column, until the commit replaces it with a notification; then that
notification, until a run has committed, whose own writes are visible by then. But tablets are asked
one after another, and work may move from a tablet that was not asked yet to one that was. So there
must be two passes over all tablets, one after the other, that find nothing, and no tablet may have
written any notification between its answers to the first and the second. Cells that an observer
was not notified of, because they are older than its registration, are visible in the schema until
all of them have notifications; each pass reads the schemas before it asks the tablets.

Suppose that there was work at the instant between the passes, visible in some tablet. If it was a
notification that this tablet's first answer lacked, it was written after that answer, and so was
counted. If it was a lock that the first answer lacked, it was also written after that answer; it
has either become a notification, which was counted, or still exists, and the second answer has it.
Locks of any age count.

A tablet must have the same epoch in both passes, because its count starts again with each epoch.
It waits neither for paused observers nor for changes put aside as dead letters.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from math import inf

from percolator.arguments import require_seconds
from percolator.codecs.readable import counted
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotExecuted,
    PercolatorError,
    Retry,
    SchemaError,
)
from percolator.observers.context import LOCKS_OF_ANY_AGE, WorkerContext, WorkRequest
from percolator.observers.dead_letters import DEAD_LETTERS, LETTER
from percolator.protocol.environment import Statistics
from percolator.protocol.read import scan_pages
from percolator.routing.cells import RangeRequest
from percolator.v1 import master_pb2
from percolator.wire.backoff import Backoff

_log = logging.getLogger(__name__)

_PAUSE_SECONDS_MIN = 0.02
_PAUSE_SECONDS_MAX = 1.0
_CALL_SECONDS_MIN = 0.001
_WORKERS_SECONDS = 3.0
"""The interval at which workers are asked which observers run."""

Name = tuple[str, str]
"""A table and one of its observers."""


@dataclass(frozen=True)
class Remaining:
    """Work that one pass has found. It stops as soon as it may, so there may be more."""

    notifications: Mapping[Name, int] = field(default_factory=dict)
    """The number of notified cells, by table and observer."""
    locks: Mapping[str, int] = field(default_factory=dict)
    """The number of locks on observed columns, by table."""
    backfills: Mapping[Name, int] = field(default_factory=dict)
    """The number of cells that unfinished backfills have come to, by table and observer."""

    def __bool__(self) -> bool:
        return bool(self.notifications or self.locks or self.backfills)

    def __str__(self) -> str:
        found = [
            f"{count} for {observer!r} of {table!r}"
            for (table, observer), count in sorted(self.notifications.items())
        ]
        found += [f"{count} locked in {table!r}" for table, count in sorted(self.locks.items())]
        found += [
            f"a backfill for {observer!r} of {table!r}, {counted(count, 'cell')} so far"
            for (table, observer), count in sorted(self.backfills.items())
        ]
        return ", ".join(found) or "nothing"


@dataclass(frozen=True)
class Quiet:
    """The result of waiting: nothing is left to do."""

    passes: int
    seconds: float
    paused: Sequence[Name]
    """Paused observers, which were not waited for."""
    dead_letters: Mapping[Name, int]
    """The number of changes put aside, by observer. No observer will run for them."""


async def wait_until_quiet(
    context: WorkerContext,
    timeout_seconds: float | None = None,
    *,
    on_pass: Callable[[Remaining], None] = lambda _: None,
) -> Quiet:
    """Returns when no observer of any table has anything left to do, except paused ones.

    `on_pass` is called with what each pass has found. Raises `DeadlineExceeded`, which says what is
    still pending. Logs a warning if no worker runs what it waits for.
    """
    nobody = NobodyWorks(context)

    def found(remaining: Remaining) -> None:
        nobody.note(remaining)
        on_pass(remaining)

    watching = asyncio.create_task(nobody.watch())
    try:
        return await _wait(context, timeout_seconds, found)
    finally:
        watching.cancel()
        await asyncio.wait([watching])


async def _wait(
    context: WorkerContext, timeout_seconds: float | None, on_pass: Callable[[Remaining], None]
) -> Quiet:
    if timeout_seconds is not None:
        require_seconds(timeout_seconds, "timeout")
    started = context.env.now()
    deadline = inf if timeout_seconds is None else started + timeout_seconds
    backoff = _new_backoff(context)
    before: _Pass | None = None
    passes = 0
    last_found = Remaining()
    while True:
        now = _Pass(context, deadline)
        letters: Mapping[Name, int] | None = None
        try:
            await now.run()
            if not now.remaining() and now.confirms(before):
                letters = await count_dead_letters(context, deadline)
            problem: PercolatorError | None = None
        except (NotExecuted, ExecutionUnknown, SchemaError) as error:
            # A tablet is not served yet, be it that of the dead letters; a table was dropped
            # meanwhile; or masters do not answer.
            problem = error
        passes += 1
        remaining = now.remaining()
        on_pass(remaining)
        if letters is not None:
            return Quiet(passes, context.env.now() - started, now.paused(), letters)
        if problem is None or not last_found:
            # A pass that the deadline interrupted says less than the one before it.
            last_found = remaining
        found_nothing = problem is None and not remaining
        if context.env.now() >= deadline:
            raise _late(last_found, problem, timeout_seconds)
        if found_nothing and before is None:
            backoff = _new_backoff(context)  # repeat at once: this may be the first of the two
        else:
            await context.world.clock.sleep(
                min(backoff.next_seconds(), deadline - context.env.now())
            )
        before = now if found_nothing else None


async def count_dead_letters(context: WorkerContext, deadline: float = inf) -> dict[Name, int]:
    """The number of dead letters by observer; empty if no worker has ever run."""
    deadline = min(context.env.deadline(), deadline)
    try:
        info = await context.catalog.table(DEAD_LETTERS.name, deadline)
    except SchemaError:
        return {}
    env, seconds = context.env, max(deadline - context.env.now(), _CALL_SECONDS_MIN)
    now = await env.timestamps.get(timeout_seconds=seconds)
    request = RangeRequest(info.table_id, b"", b"", (LETTER.name,), now)
    found: Counter[Name] = Counter()
    pages = scan_pages(env, context.cleanup, request, None, seconds, Statistics())
    async with aclosing(pages):
        async for page in pages:
            for row, _ in page:
                table, observer, _, _ = DEAD_LETTERS.key.decode(row)
                found[table, observer] += 1
    return dict(found)


class _Pass:
    """One pass: every tablet is asked once."""

    def __init__(self, context: WorkerContext, deadline: float) -> None:
        self._context = context
        self._deadline = deadline
        self._tables: list[master_pb2.Table] = []
        self._requests: list[WorkRequest] = []
        self._first: dict[Hashable, Hashable] = {}
        """By place, the mark of its first answer: of a tablet at its epoch, how many notifications
        it had written."""
        self._last: dict[Hashable, Hashable] = {}
        """The mark of its last answer."""
        self._notifications: Counter[Name] = Counter()
        self._locks: Counter[str] = Counter()
        self._backfills: dict[Name, int] = {}

    async def run(self) -> None:
        """Asks all tablets. Raises the error that prevented a complete pass."""
        context = self._context
        self._tables = await context.catalog.describe_all(
            min(context.env.deadline(), self._deadline)
        )
        for table in self._tables:
            request = _request(table)
            if request is not None:
                for one in table.observers:
                    if one.HasField("owed") and not one.paused:
                        self._backfills[table.name, one.name] = one.owed.cells
                self._requests.append(request)
                await self._look(table.name, request)

    async def _look(self, table: str, request: WorkRequest) -> None:
        answers = self._context.notifications.survey(request, self._deadline)
        async with aclosing(answers):
            async for answer in answers:
                if answer.place is not None:
                    self._first.setdefault(answer.place, answer.mark)
                    self._last[answer.place] = answer.mark
                for waiting in answer.waiting:
                    observer = waiting.observer.decode(errors="backslashreplace")
                    self._notifications[table, observer] += 1
                if answer.locks:
                    self._locks[table] += len(answer.locks)
                if answer.rest is not None and self.remaining():
                    return

    def paused(self) -> list[Name]:
        return sorted(
            (table.name, one.name)
            for table in self._tables
            for one in table.observers
            if one.paused
        )

    def remaining(self) -> Remaining:
        return Remaining(dict(self._notifications), dict(self._locks), self._backfills)

    def confirms(self, before: _Pass | None) -> bool:
        """The tables, observers and tablets are the same as in the previous pass, and no tablet has
        written a notification since."""
        return (
            before is not None
            and self._requests == before._requests
            and self._last == before._first
        )


def _request(table: master_pb2.Table) -> WorkRequest | None:
    """The request for the tablets of a table; None if the table has no active observer."""
    active = [one for one in table.observers if not one.paused]
    if not active or table.deleting:
        return None
    columns = {column for one in active if not one.weak for column in one.columns}
    return WorkRequest(
        table.table_id,
        observers=tuple(sorted(one.name.encode() for one in active)),
        locked_columns=tuple(sorted(columns)),
        locks_before=LOCKS_OF_ANY_AGE,
    )


class NobodyWorks:
    """Says once, while something is waited for, that no worker runs its observers.

    Otherwise, a program whose worker was forgotten waits forever, and nothing tells why.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._remaining = Remaining()

    def note(self, remaining: Remaining) -> None:
        """Takes in what a pass has found."""
        self._remaining = remaining

    async def watch(self) -> None:
        """Returns when it has said so. To be cancelled at the end of the wait."""
        while True:
            # Longer than the second within which a new worker tells that it runs.
            await self._context.world.clock.sleep(_WORKERS_SECONDS)
            names = {*self._remaining.notifications, *self._remaining.backfills}
            running = await self._context.running_observers() if names else None
            missing = names.difference(running) if running is not None else ()
            for table, observer in sorted(missing):
                _log.warning(
                    "changes wait for observer %r of table %r, and no worker is known that runs "
                    "it: start one with `percolator worker` or db.run_observers",
                    observer,
                    table,
                )
            if missing:
                return


def _new_backoff(context: WorkerContext) -> Backoff:
    world = context.world
    return Backoff(world.clock, world.random, _PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX)


def _late(
    remaining: Remaining, problem: PercolatorError | None, seconds: float | None
) -> DeadlineExceeded:
    if remaining:
        what = f"changes still pending: at least {remaining}"
    elif problem is not None:
        what = f"unknown whether changes are pending: {problem.message}"
    else:
        what = "new changes kept arriving"
    error = DeadlineExceeded(f"timed out after {seconds:g} s; {what}")
    error.retry = Retry.SAFE
    return error
