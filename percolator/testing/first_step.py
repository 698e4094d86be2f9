"""The first step of a coroutine, before there is a task: often there is no second one.

Much of what a server is asked it answers without waiting, and a task of asyncio costs more than
the first step of such an answer. Only what waits becomes a task, and goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections.abc import Coroutine, Generator
from typing import Any

Rest = Generator[Any, Any, None]


class _Beginning:
    """What `asyncio.current_task` is in the first step: whoever keeps it means the later task."""

    __slots__ = ("task",)

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    def cancel(self, message: object = None) -> bool:
        return self.task is not None and self.task.cancel(message)

    def cancelling(self) -> int:
        return 0 if self.task is None else self.task.cancelling()

    def uncancel(self) -> int:
        return 0 if self.task is None else self.task.uncancel()


def take_first_step(
    loop: Any,  # noqa: ANN401  # a `Steps`, which asyncio does not know as a loop
    coroutine: Coroutine[Any, Any, None],
    context: contextvars.Context,
) -> asyncio.Task[None] | None:
    """Runs it until it waits. A task goes on with what is left, if anything is.

    Called by a callback of the loop, not by a task.
    """
    beginning: Any = _Beginning()
    asyncio.tasks._enter_task(loop, beginning)
    try:
        waited = context.run(coroutine.send, None)
    except StopIteration:
        return None
    finally:
        asyncio.tasks._leave_task(loop, beginning)
    rest = _rest(coroutine, waited)
    next(rest)
    task: asyncio.Task[None] = loop.create_task(rest, context=context)
    beginning.task = task
    return task


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], waited: object) -> Rest:
    """Of a coroutine that has begun, and waits. It has to be begun, too, before a task gets it."""
    begun = False
    while True:
        try:
            if not begun:
                # Into what has not begun, asyncio does not throw the cancellation of its task.
                begun = True
                yield None
            yield waited
        except BaseException as error:  # noqa: BLE001  # thrown in, as by a cancellation
            try:
                waited = coroutine.throw(error)
            except StopIteration:
                return
        else:
            yield from coroutine  # a generator may, and nothing is faster
            return
