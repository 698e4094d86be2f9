"""Ending a command that runs until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` in the event loop on the first SIGINT or SIGTERM. The next has its usual effect,
    even if the loop waits for the reader of the output."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        restore()
        loop.call_soon_threadsafe(stop)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()
