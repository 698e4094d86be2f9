"""Waiting until observers have nothing left to do, exactly.

A piece of work is, at every moment, covered by something that a tablet can be asked for: a lock on
an observed column, until the commit puts a notification in its place; the notification, until a run
has committed, whose own writes are covered by then. But tablets are asked one after the other, and
work may move from one that was not asked yet to one that was. So two passes are made over all
tablets, one after the other, in which nothing is found, and no tablet may have written any
notification between its answer to the first and its answer to the second.

Suppose that there was work at the instant between the passes, covered in some tablet. A
notification that the first answer of this tablet did not have was written after it, and so was
counted; a lock that it did not have was written after it, and has either become a notification,
which was counted, or is there still, and the second answer has it. Locks count however young they
are.

The tablet has to be the same in both passes, of the same epoch: counts begin anew with each.
Observers that are paused are not waited for, nor is what was put aside as a dead letter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from math import inf

from percolator.arguments import require_seconds
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotExecuted,
    PercolatorError,
    Retry,
    SchemaError,
)
from percolator.observers.client import Client
from percolator.observers.dead_letter import DEAD_LETTERS, LETTER
from percolator.observers.survey import survey
from percolator.protocol.scan import scan_pages
from percolator.protocol.surroundings import Statistics
from percolator.v1 import master_pb2
from percolator.wire.backoff import Backoff
from percolator.wire.notifications import LOCKS_OF_ANY_AGE, WorkQuestion
from percolator.wire.questions import RangeQuestion

_PAUSE_SECONDS_MIN = 0.02
_PAUSE_SECONDS_MAX = 1.0

Name = tuple[str, str]
"""A table and one of its observers."""


@dataclass(frozen=True)
class Remaining:
    """What one pass has found. It looks no further than it must: there may be more."""

    notifications: Mapping[Name, int] = field(default_factory=dict)
    """Cells, by whom they notify."""
    locks: Mapping[str, int] = field(default_factory=dict)
    """On observed columns, by table."""

    def __bool__(self) -> bool:
        return bool(self.notifications or self.locks)

    def __str__(self) -> str:
        parts = [
            f"{count} for {observer!r} of {table!r}"
            for (table, observer), count in sorted(self.notifications.items())
        ]
        parts += [
            f"{count} under a lock in {table!r}" for table, count in sorted(self.locks.items())
        ]
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class Quiet:
    """Nothing is left to do."""

    passes: int
    seconds: float
    paused: Sequence[Name]
    """They were not waited for."""
    dead_letters: Mapping[Name, int]
    """Changes that are put aside, by observer: nothing will be done about them."""


async def wait_until_quiet(
    client: Client,
    timeout_seconds: float | None = None,
    *,
    on_pass: Callable[[Remaining], None] = lambda _: None,
) -> Quiet:
    """Returns when nothing is left to do for any observer of any table that is not paused.

    `on_pass` is told what each pass has found. Raises `DeadlineExceeded`, which says what is left.
    """
    if timeout_seconds is not None:
        require_seconds(timeout_seconds, "timeout")
    started = client.now()
    deadline = inf if timeout_seconds is None else started + timeout_seconds
    backoff = _new_backoff(client)
    before: _Pass | None = None
    passes = 0
    last_found = Remaining()
    while True:
        now = _Pass(client, deadline)
        try:
            await now.run()
            problem: PercolatorError | None = None
        except (NotExecuted, ExecutionUnknown, SchemaError) as error:
            # A tablet that nobody serves yet, a table that is gone by now, masters that are silent.
            problem = error
        passes += 1
        remaining = now.remaining()
        on_pass(remaining)
        if problem is None or not last_found:
            # A pass that the deadline broke off says less than the one before it.
            last_found = remaining
        found_nothing = problem is None and not remaining
        if found_nothing and now.confirms(before):
            letters = await count_dead_letters(client)
            return Quiet(passes, client.now() - started, now.paused(), letters)
        if client.now() >= deadline:
            raise _late(last_found, problem, timeout_seconds)
        if found_nothing and before is None:
            backoff = _new_backoff(client)  # at once: it may well have been the first of two
        else:
            await client.world.clock.sleep(min(backoff.next_seconds(), deadline - client.now()))
        before = now if found_nothing else None


async def count_dead_letters(client: Client) -> dict[Name, int]:
    """By observer. None when no worker has ever run."""
    try:
        info = await client.catalog.table(DEAD_LETTERS.name, client.deadline())
    except SchemaError:
        return {}
    around, seconds = client.around, client.around.limits.call_seconds
    now = await around.timestamps.get(timeout_seconds=seconds)
    question = RangeQuestion(info.table_id, b"", b"", (LETTER.name,), now)
    found: Counter[Name] = Counter()
    pages = scan_pages(around, client.cleanup, question, None, seconds, Statistics())
    async with aclosing(pages):
        async for page in pages:
            for row, _ in page:
                table, observer, _, _ = DEAD_LETTERS.key.decode(row)
                found[table, observer] += 1
    return dict(found)


class _Pass:
    """Every tablet once."""

    def __init__(self, client: Client, deadline: float) -> None:
        self._client = client
        self._deadline = deadline
        self._tables: list[master_pb2.Table] = []
        self._questions: list[WorkQuestion] = []
        self._first: dict[tuple[int, int], int] = {}
        """By tablet and epoch: notifications written, as of its first answer."""
        self._last: dict[tuple[int, int], int] = {}
        """As of its last answer."""
        self._notifications: Counter[Name] = Counter()
        self._locks: Counter[str] = Counter()

    async def run(self) -> None:
        """Raises what was in the way of a whole pass."""
        client = self._client
        self._tables = await client.catalog.describe_all(min(client.deadline(), self._deadline))
        for table in self._tables:
            question = _question(table)
            if question is not None:
                self._questions.append(question)
                await self._look(table.name, question)

    async def _look(self, table: str, question: WorkQuestion) -> None:
        answers = survey(self._client, question, self._deadline)
        async with aclosing(answers):
            async for answer in answers:
                location = answer.location
                if location is None:
                    continue
                tablet = location.tablet_id, location.epoch
                self._first.setdefault(tablet, answer.notifications_written)
                self._last[tablet] = answer.notifications_written
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
        return Remaining(dict(self._notifications), dict(self._locks))

    def confirms(self, before: _Pass | None) -> bool:
        """Whether the same tablets have notified nobody since the pass before, for all of the same
        observers."""
        return (
            before is not None
            and self._questions == before._questions
            and self._last == before._first
        )


def _question(table: master_pb2.Table) -> WorkQuestion | None:
    """What to ask of the tablets of this table; None when nobody observes it."""
    active = [one for one in table.observers if not one.paused]
    if not active or table.deleting:
        return None
    columns = {column for one in active if not one.weak for column in one.columns}
    return WorkQuestion(
        table.table_id,
        observers=tuple(sorted(one.name.encode() for one in active)),
        locked_columns=tuple(sorted(columns)),
        locks_before=LOCKS_OF_ANY_AGE,
    )


def _new_backoff(client: Client) -> Backoff:
    world = client.world
    return Backoff(world.clock, world.random, _PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX)


def _late(
    remaining: Remaining, problem: PercolatorError | None, seconds: float | None
) -> DeadlineExceeded:
    what = f"at least {remaining}" if remaining else "work that comes and goes"
    if problem is not None and not remaining:
        what = f"nobody knows what ({problem.message})"
    error = DeadlineExceeded(f"after {seconds:g} s observers have left to do: {what}")
    error.retry = Retry.SAFE
    return error
