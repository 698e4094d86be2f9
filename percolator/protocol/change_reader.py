"""Following the changes of a table: how far they are settled, and what they are.

The reader moves from one timestamp to the next. For each step it

1. takes a timestamp `now` from the oracle, and asks all tablets how far up to it every change is
   stored. What may still be committed below it has a lock, and a tablet answers with the timestamp
   below which nothing more can come. The least of these answers holds for the table;
2. resolves the locks that were in the way, as any reader does: it waits for live owners, and pushes
   them after a while;
3. reads the changes between where it is and where everything is settled, from the tablets that
   have any, and moves on.

It never waits for a lock with changes in hand: those below the lock are read first.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

from percolator.errors import (
    ConflictError,
    DeadlineExceeded,
    InvalidArgument,
    Retry,
    SchemaError,
    SnapshotTooOld,
)
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import Environment, Statistics
from percolator.protocol.read import PASSING_MAX, LockResolver
from percolator.routing.catalog import TableInfo
from percolator.routing.cells import ChangeFeeds, ChangesRequest, ChangesSeen, StoredChange
from percolator.timestamps import Timestamp

IDLE_SECONDS = 0.1
"""How long a follower pauses when nothing has changed. Then it asks each server one question."""
TOLD_SECONDS = 1.0
"""How long a follower yields nothing while nothing changes."""
LOAD_PAUSE_SECONDS = 0.2
"""How long an endless reader pauses before it asks again whether a bulk load is over."""


class ChangeReader:
    """One reader of the changes of one table."""

    def __init__(
        self,
        env: Environment,
        cleanup: Cleanup,
        feeds: ChangeFeeds,
        table: TableInfo,
        after: int,
        *,
        before: bool = False,
    ) -> None:
        """It begins above `after`. `before` says whether what cells were before is wanted, too.

        Raises `SchemaError` if the table is younger: another one may have had its name then.
        """
        if table.created_at > after:
            raise SchemaError(
                f"table {table.name!r} did not exist yet at {Timestamp(after).describe()}: its "
                f"changes begin at {Timestamp(table.created_at).describe()}, when it was created",
                table=table.name,
                table_id=table.table_id,
            )
        self.position = after
        """All changes up to this timestamp were yielded, or there are none."""
        self.statistics = Statistics()
        self._env = env
        self._cleanup = cleanup
        self._feeds = feeds
        self._table = table
        self._before = before
        self._passing: tuple[int, ...] = ()

    async def begin(self, now: int, timeout_seconds: float) -> None:
        """Asks all tablets once, so that an error is raised now, and not only when something
        changes. The oracle has handed out `now`, which is above the position."""
        await self._look(now, self._env.now() + timeout_seconds)

    async def settled(self, until: int, timeout_seconds: float) -> ChangesSeen:
        """How far everything up to `until`, which the oracle has handed out, is settled by now.
        Resolves the locks that were met. Does not wait for what takes longer."""
        deadline = self._env.now() + timeout_seconds
        self._passing = ()
        seen = await self._look(until, deadline)
        if seen.locks:
            # Most are released or resolved by the time they are looked at again.
            await self._resolve(seen, self._resolver(until, deadline))
            seen = await self._look(until, deadline)
        return seen

    async def follow(
        self,
        until: int,
        timeout_seconds: float,
        idle_seconds: Callable[[], float] = lambda: IDLE_SECONDS,
    ) -> AsyncGenerator[list[StoredChange], None]:
        """Yields all changes up to `until`, which may be in the future; with 0, it never ends.

        While nothing changes it looks again after `idle_seconds`, and yields an empty page now and
        then: `position` has moved on.
        """
        env = self._env
        yielded_at = env.now()
        while not until or self.position < until:
            now = await env.timestamps.get(timeout_seconds=timeout_seconds)
            upto = min(now, until) if until else now
            found = False
            async with aclosing(self.pages(upto, timeout_seconds, endless=not until)) as pages:
                async for page in pages:
                    found = True
                    yield page
                    yielded_at = env.now()
            if not found and self.position != until:
                if env.now() - yielded_at >= TOLD_SECONDS:
                    yield []
                    yielded_at = env.now()
                await env.clock.sleep(idle_seconds())

    async def pages(
        self, until: int, timeout_seconds: float, *, endless: bool = False
    ) -> AsyncGenerator[list[StoredChange], None]:
        """Yields all changes up to `until`, which the oracle has handed out. The timeout applies to
        each page; an `endless` reader waits for the end of a bulk load however long it takes.

        A commit may continue in the next page, unless `position` has reached it.
        """
        env = self._env
        self._passing = ()  # what does not matter up to one timestamp may matter up to the next
        while self.position < until:
            deadline = env.now() + timeout_seconds
            resolver = self._resolver(until, deadline)
            backoff = env.backoff()
            while (seen := await self._look(until, deadline)).reached <= self.position:
                if seen.locks:
                    await self._resolve(seen, resolver)
                elif endless:
                    await env.clock.sleep(LOAD_PAUSE_SECONDS)
                    deadline = env.now() + timeout_seconds
                    resolver = self._resolver(until, deadline)
                elif not await backoff.pause(deadline):
                    raise _late(
                        f"changes above {self.position} may still come: a bulk load is under way"
                    )
            async with aclosing(self.between(seen, timeout_seconds)) as pages:
                async for page in pages:
                    yield page

    async def between(
        self, seen: ChangesSeen, timeout_seconds: float
    ) -> AsyncGenerator[list[StoredChange], None]:
        """Yields the changes up to where a look has said that everything is settled."""
        if seen.newest > self.position:
            table_id = self._table.table_id
            request = ChangesRequest(table_id, self.position, seen.reached, self._before)
            pages = self._feeds.scan_changes(request, seen.ranges, timeout_seconds)
            held: list[StoredChange] = []
            with self._told_of_the_table():
                async with aclosing(pages):
                    async for page in pages:
                        self.statistics.round_trips += 1
                        if held:
                            self.position = max(self.position, page[0].commit_timestamp - 1)
                            yield held
                        held = page
            self.position = max(self.position, seen.reached)
            if held:
                yield held
        self.position = max(self.position, seen.reached)

    def _resolver(self, until: int, deadline: float) -> LockResolver:
        return LockResolver(
            self._env, self._cleanup, until, deadline, self.statistics, reads_values=False
        )

    async def _look(self, until: int, deadline: float) -> ChangesSeen:
        self.statistics.round_trips += 1
        request = ChangesRequest(self._table.table_id, self.position, until)
        with self._told_of_the_table():
            return await self._feeds.look_for_changes(request, self._passing, deadline)

    @contextmanager
    def _told_of_the_table(self) -> Iterator[None]:
        """Says in terms of the table what a tablet has refused."""
        try:
            yield
        except InvalidArgument as error:
            if not error.field.endswith("target"):
                raise
            name = self._table.name
            raise InvalidArgument(
                "table",
                f"{name!r} has no change feed: switch it on with set_change_feed, or with "
                f"percolator tables change-feed {name} --on",
            ) from error
        except SnapshotTooOld as error:
            error.message += (
                f"; to follow table {self._table.name!r} again, scan it in a new snapshot, and "
                "then read its changes after the snapshot's timestamp"
            )
            raise

    async def _resolve(self, seen: ChangesSeen, resolver: LockResolver) -> None:
        """Resolves the locks, and remembers those that do not matter to this reader."""
        met = [MetLock.of(self._table.table_id, cell) for cell in seen.locks]
        try:
            await resolver.resolve(met)
        except ConflictError as error:
            # A reader of changes has no transaction that could be in conflict: it is late.
            raise _late(error.message) from error
        passing = dict.fromkeys(self._passing)
        surplus = []
        for one in resolver.passable(met):
            start = one.lock.start_timestamp
            if start in passing or len(passing) < PASSING_MAX:
                passing[start] = None
            else:
                surplus.append(one)
        self._passing = tuple(passing)
        if surplus:
            await resolver.remove(surplus)


def _late(why: str) -> DeadlineExceeded:
    late = DeadlineExceeded(why)
    late.retry = Retry.SAFE
    return late
