"""How a gateway that shuts down ends streams that only their callers end.

It waits for all calls in progress. Such a stream would use up the whole time for that, and then be
cut off without a reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

from percolator.errors import NotReady
from percolator.tasks import stop_waiting_for
from percolator.wire.through import GATEWAY, shutting_down

_RETRY_SECONDS = 0.5

T = TypeVar("T")


def gateway_leaves() -> NotReady:
    return shutting_down(GATEWAY, _RETRY_SECONDS)


class EndlessStreams:
    """The streams of one gateway's own service. Belongs to the running event loop."""

    def __init__(self) -> None:
        self._ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """From now on, each fails with `NotReady` instead of waiting."""
        if not self._ending.done():
            self._ending.set_result(None)

    async def until_the_end(self, pages: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yields the pages."""
        async with aclosing(pages):
            while (page := await self._next(pages)) is not None:
                yield page

    async def _next(self, pages: AsyncGenerator[T, None]) -> T | None:
        coming: asyncio.Future[T | None] = asyncio.ensure_future(anext(pages, None))
        try:
            await asyncio.wait((coming, self._ending), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await _leave(coming)
            raise
        if self._ending.done():
            await _leave(coming)
            raise gateway_leaves()
        return coming.result()


async def _leave(coming: asyncio.Future[Any]) -> None:
    """Before the generator that it runs is closed, it has to end."""
    stop_waiting_for(coming)
    if not coming.done():
        coming.cancel()
        await asyncio.wait((coming,))
