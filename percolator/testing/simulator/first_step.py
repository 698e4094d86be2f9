"""Runs the first step of a coroutine before there is a task: often there is no second step.

A server answers many calls without waiting, and creating an asyncio task costs more than such an
answer. Only a coroutine that waits becomes a task, which continues where the first step stopped.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Generator
from typing import Any

from percolator.errors import InvariantViolation


class _Beginning:
    """What `asyncio.current_task` returns in the first step: it stands for the later task."""

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
    """Runs the coroutine until it waits. If anything is left then, a task continues with it.

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
    """The rest of a coroutine that has begun and waits: it first tells its task what it waits for.

    It is not a generator: since Python 3.12, asyncio does not accept generators as tasks.
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
        raise InvariantViolation("only a task may continue it")

    def _go_on(self) -> None:
        """From now on the task drives the coroutine itself, which is the fastest way."""
        self.send = self._coroutine.send  # type: ignore[method-assign, assignment]
