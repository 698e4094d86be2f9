"""The changes of a table, for asyncio programs: one by one, or in pages."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

from percolator.aio.change_pages import ChangePages
from percolator.aio.following import Following
from percolator.changes import Change
from percolator.timestamps import Timestamp

K = TypeVar("K")


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
        while not self._following.has_ended():
            given, self._given = self._given, None
            if given is not None:
                self._following.has_handled(given)
            change = next(self._unread, None)
            if change is not None:
                self._given = change
                return change
            page = await self._pages.next()
            self._unread = iter(page.changes if page is not None else ())
        raise StopAsyncIteration

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
