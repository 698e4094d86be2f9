"""The changes of a table, for programs without asyncio: one by one, or in pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from percolator.aio import changes as shared
from percolator.aio.changes import Following
from percolator.blocking.loop_thread import LoopCalls
from percolator.changes import Change, ChangePage
from percolator.errors import UsageError
from percolator.timestamps import Timestamp

K = TypeVar("K")
R = TypeVar("R")


class ChangePages(Generic[K]):
    """The iterator over pages that `Changes.pages` returns. It ends when it is closed."""

    def __init__(self, loop_thread: LoopCalls, following: Following[K]) -> None:
        self._loop_thread = loop_thread
        self._pages = shared.ChangePages(following)
        self._turn = threading.Lock()

    def require_whole(self) -> None:
        """Refuses to yield pages of which single changes may have been read."""
        self._pages.require_whole()

    def are_read_singly(self) -> None:
        """Notes that the program reads single changes, and so cannot read pages."""
        self._pages.is_read_singly = True

    def in_turn(self, work: Callable[[], R]) -> R:
        """Refuses other threads meanwhile."""
        if not self._turn.acquire(blocking=False):
            raise UsageError(shared.WAITS)
        try:
            return work()
        finally:
            self._turn.release()

    def next(self) -> ChangePage[K] | None:
        """The next page; None at the end, and if it is closed before there is one."""
        # Nothing is read ahead: what the program has not asked for must stay in the history.
        return self._loop_thread.call(self._pages.next)

    def close(self) -> None:
        """As `Changes.close`."""
        self._loop_thread.start_and_forget(self._pages.aclose)

    def __iter__(self) -> ChangePages[K]:
        return self

    def __next__(self) -> ChangePage[K]:
        self.require_whole()
        page = self.in_turn(self.next)
        if page is None:
            raise StopIteration
        return page


class Changes(Generic[K]):
    """The changes of a table, in the order of their commits: what `Database.changes` returns.

    History from its position on is kept until the block ends, it is closed, or it reaches `until`.
    After an error it cannot continue: call `changes` again, with the last handled position as
    `after`. One thread at a time may wait for the next change. Another one may close it meanwhile:
    then the iteration ends.

    >>> with db.changes(accounts, after=position) as changes:
    ...     for change in changes:
    ...         print(change.key, change.column, change.kind)
    """

    def __init__(self, loop_thread: LoopCalls, following: Following[K]) -> None:
        self._following = following
        self._pages = ChangePages(loop_thread, following)
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

        >>> for page in changes.pages():
        ...     for change in page.changes: ...
        ...     position = page.reached
        """
        self._pages.require_whole()
        return self._pages

    def __iter__(self) -> Changes[K]:
        return self

    def __next__(self) -> Change[K]:
        self._pages.are_read_singly()
        change = self._pages.in_turn(self._next)
        if change is None:
            raise StopIteration
        return change

    def _next(self) -> Change[K] | None:
        while not self._following.has_ended():
            given, self._given = self._given, None
            if given is not None:
                self._following.has_handled(given)
            change = next(self._unread, None)
            if change is not None:
                self._given = change
                return change
            page = self._pages.next()
            self._unread = iter(page.changes if page is not None else ())
        return None

    def close(self) -> None:
        """Ends it: from now on, the history that it needed may be collected.

        A thread that waits for the next change is told that there are no more, and so is every
        later call. Closing it again does nothing.
        """
        self._following.close()
        self._pages.close()

    def __enter__(self) -> Changes[K]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
