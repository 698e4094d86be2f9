"""The clock of the event loop that a test runs in."""

from __future__ import annotations

import asyncio

from tests.simulation.virtual_time import VirtualClock


def virtual_clock() -> VirtualClock:
    """A clock of the running loop, whose time is virtual."""
    return VirtualClock(asyncio.get_running_loop())
