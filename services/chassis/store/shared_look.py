"""One look at something slow, shared by all callers that came before it began.

A response may leave only after a look that began when its work was done. Joining a look in progress
would show an earlier moment, so callers that come meanwhile share the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedLook(Generic[T]):
    """Belongs to one event loop. At most one look is under way."""

    def __init__(self, look: Callable[[], Awaitable[T]]) -> None:
        self._look = look
        self._waiting: list[asyncio.Future[T]] = []
        self._looking: asyncio.Task[None] | None = None

    def __call__(self) -> asyncio.Future[T]:
        """Resolves to the result of a look that begins after this call."""
        # A future for each caller: cancelling one does not affect the others.
        found: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(found)
        if self._looking is None:
            # It begins in the loop's next round, so that all callers in this one share it.
            self._looking = asyncio.create_task(self._run())
        return found

    async def _run(self) -> None:
        asked: list[asyncio.Future[T]] = []
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, []
                found = await self._look()
                for future in asked:
                    if not future.done():
                        future.set_result(found)
        except BaseException as error:
            # No caller may be left waiting, whatever ended it.
            for future in (*asked, *self._waiting):
                if not future.done():
                    _end(future, error)
            self._waiting.clear()
            if not isinstance(error, Exception):
                raise
        finally:
            self._looking = None


def _end(future: asyncio.Future[T], error: BaseException) -> None:
    if isinstance(error, Exception):
        future.set_exception(error)
    else:
        future.cancel()
