"""The changes of a table, for asyncio programs: one by one, or in pages."""

from __future__ import annotations

import asyncio
from asyncio import Future, shield
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from datetime import datetime
from types import TracebackType
from typing import Generic, TypeVar

from percolator.aio.engine import Engine
from percolator.arguments import as_timestamp, require_bool, require_seconds, require_table
from percolator.changes import Change, ChangeKind, ChangePage
from percolator.errors import InvalidArgument, PercolatorError, UsageError
from percolator.protocol.change_reader import ChangeReader
from percolator.routing.cells import ChangeFeeds, StoredChange
from percolator.schema import Table, decoded_key
from percolator.timestamps import Timestamp

# Pages of changes: one caller at a time waits for the next, and another may close meanwhile.

K = TypeVar("K")

WAITS = (
    "another call waits for the next of these changes already: ask for one after another, or call "
    "changes() once for each reader"
)


class ChangePages(Generic[K]):
    """The iterator over pages that `Changes.pages` returns. It ends when it is closed."""

    # What `following` generates must not refer to this: a circle would keep history until it is
    # collected.

    def __init__(self, following: Following[K]) -> None:
        self._following = following
        self._pages = following.pages()
        self._fetching: asyncio.Task[ChangePage[K] | None] | None = None
        self._closing = asyncio.Lock()
        self._was_cancelled = False
        self.is_read_singly = False
        """True if the program reads single changes, and so cannot read pages."""

    def require_whole(self) -> None:
        """Refuses to yield pages of which single changes may have been read."""
        if self.is_read_singly:
            raise UsageError(
                "single changes have already been read: call pages() before you read any"
            )

    async def next(self) -> ChangePage[K] | None:
        """The next page; None at the end, and if it is closed before there is one."""
        if self._was_cancelled:
            self._following.require_end()
        elif self._fetching is not None:
            raise UsageError(WAITS)
        if self._following.has_ended():
            return None
        # A task of its own, which `close` can end without cancelling the caller.
        self._fetching = fetching = asyncio.create_task(_fetch(self._pages))
        fetching.add_done_callback(_retrieve)
        try:
            await asyncio.wait([fetching])
        except asyncio.CancelledError:
            # A page that has come by now reaches nobody, and the next call must not skip it.
            self._was_cancelled = True
            fetching.cancel()
            await asyncio.wait([fetching])
            self._following.release()
            raise
        finally:
            if fetching.done():  # not if this was cancelled twice: then `aclose` has to wait for it
                self._fetching = None
        if self._following.has_ended():
            return None
        page = fetching.result()
        if page is None:
            self._following.require_end()
        return page

    async def aclose(self) -> None:
        """As `Changes.close`."""
        self._following.close()
        async with self._closing:
            if self._fetching is not None:
                self._fetching.cancel()
                await asyncio.wait([self._fetching])
            await self._pages.aclose()

    def __aiter__(self) -> ChangePages[K]:
        return self

    async def __anext__(self) -> ChangePage[K]:
        self.require_whole()
        page = await self.next()
        if page is None:
            raise StopAsyncIteration
        return page


async def _fetch(pages: AsyncGenerator[ChangePage[K], None]) -> ChangePage[K] | None:
    return await anext(pages, None)


def _retrieve(done: asyncio.Task[ChangePage[K] | None]) -> None:
    """Retrieves an error whose caller no longer waits, since it was cancelled or closed."""
    if not done.cancelled():
        done.exception()


# Following the changes of a table: from a timestamp on, in pages, as long as a program likes.
#
# While a program follows, the history above its position is kept from collection, as for an open
# snapshot: the position is reported with the session of its client, and moves with it. A program
# that was away for longer than the table keeps history gets `SnapshotTooOld` when it comes back.


class Following(Generic[K]):
    """One reading of the changes of a table. The iterators of both APIs go through its pages."""

    def __init__(
        self,
        engine: Engine,
        table: Table[K],
        after: Timestamp | datetime | None,
        until: Timestamp | datetime | None,
        *,
        before: bool,
        timeout: float | None,
    ) -> None:
        """Without `after`, it begins at the time of this call. Call it in the event loop."""
        engine.require_usable()
        require_table(table)
        require_bool(before, "before")
        if timeout is not None:
            require_seconds(timeout)
        self._engine = engine
        self._feeds: ChangeFeeds = engine.router
        self._table = table
        self._after = None if after is None else as_timestamp(after, "after")
        self._until = None if until is None else as_timestamp(until, "until")
        if self._after is not None:
            self._require_until_from(self._after)
        self._before = before
        self._timeout_seconds = timeout or engine.limits.call_seconds
        # Two, since the tablets are asked about what is above the position.
        self._now: Future[int] = engine.timestamps.get(2, timeout_seconds=self._timeout_seconds)
        # Its error is raised when it is needed: this is not the place that reports it.
        self._now.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._reader: ChangeReader | None = None
        self._reached = self._after
        self._ended = False
        """It has come to `until`, or the program has closed it: not by an error."""

    # ------------------------------------------------------------------ how far

    @property
    def reached(self) -> Timestamp:
        """All changes up to here were handled: the program has asked for more since."""
        if self._reached is None:
            raise UsageError(
                "it is not known yet where the changes begin: enter the block, or read a change"
            )
        return self._reached

    def has_ended(self) -> bool:
        """True once it has come to `until`, or was closed."""
        return self._ended

    def has_handled(self, change: Change[K]) -> None:
        """Notes that the program has asked for more after this change."""
        if change.ends_commit:
            self._reached = change.commit_timestamp

    def require_end(self) -> None:
        """Raises `UsageError` if there are no more pages because of an error, so that no loop takes
        this for the end."""
        if not self._ended:
            position = "" if self._reached is None else f": after={self._reached.describe()}"
            raise UsageError(
                f"the changes of table {self._table.name!r} are no longer followed, because of an "
                f"earlier error or cancellation; call changes() again{position}"
            )

    # ------------------------------------------------------------------ reading

    async def open(self) -> ChangeReader:
        """Checks all that only the cluster knows. From now on, history is kept from here."""
        if self._reader is None:
            reader, now = await self._new_reader()
            if self._ended:
                raise UsageError(f"the changes of table {self._table.name!r} were closed")
            self._engine.open_starts.add(self, reader.position)
            try:
                await reader.begin(now, self._timeout_seconds)
            except BaseException:
                self.release()
                raise
            self._reader = reader
            self._reached = Timestamp(reader.position)
        return self._reader

    async def pages(self) -> AsyncGenerator[ChangePage[K], None]:
        """Yields the changes in pages. A commit may continue in the next page."""
        engine = self._engine
        try:
            reader = await self.open()
            pages = reader.follow(self._until or 0, self._timeout_seconds)
            async with aclosing(pages):
                async for page in pages:
                    reached = Timestamp(reader.position)
                    yield ChangePage(self._changes(page, reached), reached)
                    self._reached = reached
                    engine.open_starts.add(self, reached)
                    engine.require_usable()
            self._reached = Timestamp(reader.position)
            self._ended = True
        except PercolatorError as error:
            if not engine.closed:
                raise
            raise UsageError(
                f"the database was closed while the changes of table {self._table.name!r} were "
                "followed"
            ) from error
        finally:
            self.release()

    async def newest(self) -> Timestamp | None:
        """The newest change above `after`, up to where everything is settled; None if there is
        none."""
        if self._after is None:
            raise InvalidArgument("after", "is missing")
        reader, now = await self._new_reader()
        seen = await reader.settled(now, self._timeout_seconds)
        newest = min(seen.newest, seen.reached)
        return Timestamp(newest) if newest > self._after else None

    def close(self) -> None:
        """Ends it, because the program asked."""
        self._ended = True
        self.release()

    def release(self) -> None:
        """History is no longer kept for it. Works in any thread."""
        self._engine.open_starts.discard(self)

    def __del__(self) -> None:
        if hasattr(self, "_reader"):
            self.release()

    async def _new_reader(self) -> tuple[ChangeReader, int]:
        """A reader at the position, and a timestamp above it which was handed out."""
        engine = self._engine
        info = await engine.table(self._table, engine.now() + self._timeout_seconds)
        now = Timestamp(await shield(self._now))
        after = now if self._after is None else self._after
        if after > now:
            raise InvalidArgument(
                "after",
                f"{after.describe()} is in the future: the oracle is at {now.describe()}",
            )
        self._require_until_from(after)
        reader = ChangeReader(
            engine.env, engine.cleanup, self._feeds, info, after, before=self._before
        )
        return reader, now + 1

    def _require_until_from(self, after: Timestamp) -> None:
        if self._until is not None and self._until < after:
            raise InvalidArgument(
                "until", f"{self._until.describe()} is before after, {after.describe()}"
            )

    def _changes(self, page: list[StoredChange], whole_to: int) -> list[Change[K]]:
        """The changes of a page; all commits up to `whole_to` end in it or before."""
        if not page:
            return []
        table, before = self._table, self._before
        info = self._engine.catalog.known(table.name)
        codecs = None if info is None else info.codecs
        following = [change.commit_timestamp for change in page[1:]]
        following.append(page[-1].commit_timestamp + (page[-1].commit_timestamp <= whole_to))
        return [
            Change(
                table,
                decoded_key(table, change.row),
                change.column,
                Timestamp(change.commit_timestamp),
                _kind(change, before_is_known=before),
                change.value,
                change.before,
                before_is_known=before,
                ends_commit=change.commit_timestamp != then,
                codecs=codecs,
            )
            for change, then in zip(page, following, strict=True)
        ]


def _kind(change: StoredChange, *, before_is_known: bool) -> ChangeKind:
    if change.value is None:
        return ChangeKind.DELETE
    if not before_is_known:
        return ChangeKind.PUT
    return ChangeKind.INSERT if change.before is None else ChangeKind.UPDATE


class Changes(Generic[K]):
    """The changes of a table, in the order of their commits: what `Database.changes` returns.

    History from its position on is kept until the block ends, it is closed, or it reaches `until`.
    After an error it cannot continue: call `changes` again, with the last handled position as
    `after`. One task at a time may wait for the next change. Another one may close it meanwhile:
    then the iteration ends.

    >>> async with db.changes(accounts, after=position) as changes:
    ...     async for change in changes:
    ...         print(change.key, change.column, change.kind)
    """

    def __init__(self, following: Following[K]) -> None:
        self._following = following
        self._pages = ChangePages(following)
        self._unread: Iterator[Change[K]] = iter(())
        self._given: Change[K] | None = None
        """The program has not asked for more yet."""

    @property
    def reached(self) -> Timestamp:
        """How far the program has come: it has asked for more after all changes up to here.

        To continue later, even if nothing has changed, pass it as `after`. It moves about once a
        second while nothing changes. Another task or thread may read it, too.
        """
        return self._following.reached

    def pages(self) -> ChangePages[K]:
        """Yields pages instead of single changes; while nothing changes, an empty one about once a
        second. Each says in `reached` from where to continue after it.

        >>> async for page in changes.pages():
        ...     for change in page.changes: ...
        ...     position = page.reached
        """
        self._pages.require_whole()
        return self._pages

    def __aiter__(self) -> Changes[K]:
        return self

    async def __anext__(self) -> Change[K]:
        self._pages.is_read_singly = True
        change = await self._next()
        if change is None:
            raise StopAsyncIteration
        return change

    async def _next(self) -> Change[K] | None:
        """The next change; None at the end."""
        while not self._following.has_ended():
            change = self._next_of_page()
            if change is not None:
                return change
            page = await self._pages.next()
            self._unread = iter(page.changes if page is not None else ())
        return None

    def _next_of_page(self) -> Change[K] | None:
        """The next change of the page that was read last. In any one thread at a time."""
        given, self._given = self._given, None
        if given is not None:
            self._following.has_handled(given)
        self._given = next(self._unread, None)
        return self._given

    async def close(self) -> None:
        """Ends it: from now on, the history that it needed may be collected.

        A task that waits for the next change is told that there are no more, and so is every later
        call. Closing it again does nothing.
        """
        await self._pages.aclose()

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        await self.close()

    async def __aenter__(self) -> Changes[K]:
        await self._following.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
