"""What a planted bug remembers during one seed."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class PerSeed(Generic[T]):
    """Each seed has an event loop of its own, and so something new. Otherwise it would depend on
    the seeds before it whether a bug is caught, since rows and timestamps are the same in all."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._of_loops: WeakKeyDictionary[AbstractEventLoop, T] = WeakKeyDictionary()

    def now(self) -> T:
        """What belongs to the seed that is running."""
        loop = get_running_loop()
        if loop not in self._of_loops:
            self._of_loops[loop] = self._make()
        return self._of_loops[loop]
