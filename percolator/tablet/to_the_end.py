"""Work that goes on to its end although whoever asked for it has left.

A caller that gives up has its handler cancelled. Where that would tear something in two, the work
is not the caller's own: it only waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ToTheEnd:
    """What is under way."""

    def __init__(self) -> None:
        # Nobody else may be left who refers to a task: it would end wherever it happens to wait.
        self._tasks: dict[asyncio.Task[Any], None] = {}

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work returns or raises, if the caller is still there by then."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return await asyncio.shield(task)

    async def give_up(self) -> None:
        """Cancels everything, and waits for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
