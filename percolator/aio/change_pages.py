"""Pages of changes: one caller at a time waits for the next, and another may close meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from percolator.aio.following import Following
from percolator.changes import ChangePage
from percolator.errors import UsageError

K = TypeVar("K")

WAITS = (
    "another call waits for the next of these changes already: ask for one after another, or call "
    "changes() once for each reader"
)


class ChangePages(Generic[K]):
    """What `Changes.pages` returns: an iterator over pages, which ends when it is closed."""

    # What `following` generates must not refer to this: a circle would keep history until it is
    # collected.

    def __init__(self, following: Following[K]) -> None:
        self._following = following
        self._pages = following.pages()
        self._fetching: asyncio.Task[ChangePage[K] | None] | None = None
        self._closing = asyncio.Lock()
        self._was_cancelled = False
        self.is_read_singly = False
        """Whether the program reads single changes, and so cannot read pages."""

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
