"""Watching a value of a leader: neither back end can be told of a change, so both read again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from percolator.world import Clock


async def values_of(
    read: Callable[[], Awaitable[bytes | None]], clock: Clock, poll_seconds: float
) -> AsyncGenerator[bytes | None, None]:
    """Yields the present value, and then every new one that it sees."""
    last = await read()
    yield last
    while True:
        await clock.sleep(poll_seconds)
        value = await read()
        if value != last:
            last = value
            yield value
