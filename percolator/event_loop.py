"""The event loops that the library and its services make for themselves: uvloop's, if installed.

docs/performance.md says what it gains. Programs with asyncio choose their own loop.

uvloop's time has whole milliseconds, and stands still while the loop waits. What other threads
measure, or what is shorter, needs the machine's clock.
"""

from __future__ import annotations

import asyncio
from importlib import import_module


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The fastest event loop that is installed."""
    try:
        uvloop = import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
