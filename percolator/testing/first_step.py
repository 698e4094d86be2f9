"""The first step of a coroutine, before there is a task: often there is no second one.

Much of what a server is asked it answers without waiting, and a task of asyncio costs more than
the first step of such an answer. Only what waits becomes a task, and goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Generator
from typing import Any

from percolator.errors import InvariantViolation


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
    task: asyncio.Task[None] = loop.create_task(_Rest(coroutine, waited), context=context)
    beginning.task = task
    return task


class _Rest(Coroutine[Any, Any, None]):
    """Of a coroutine that has begun, and waits: that is what it says first, to its task.

    No generator: since Python 3.12, asyncio makes no tasks of those.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], waited: object) -> None:
        self._coroutine = coroutine
        self._waited = waited

    def send(self, value: None) -> object:
        self._go_on()
        return self._waited

    def throw(self, *error: Any) -> object:  # noqa: ANN401  # as many forms as `raise` once had
        self._go_on()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise InvariantViolation("only a task goes on with it")

    def _go_on(self) -> None:
        """From now on the coroutine itself is asked: nothing is faster."""
        self.send = self._coroutine.send  # type: ignore[method-assign, assignment]
