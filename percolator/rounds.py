"""Rounds of threads: those that the event loop wakes together are heard together.

A thread that was given its answer mostly calls again at once: for a commit, for the next
transaction. Threads take turns at the interpreter, so their calls come one after the other. A loop
that looks as soon as there is one finds one, or three, and sends them; their answers wake as few;
and a call to a server costs as much as thirty rows. So the loop does not look before as many calls
have come as it has woken threads, or the time of the round is over.

Threads that do something else first would cost the others that time again and again. So after a
round in vain the next wake begins none, after another one two wakes, then four, and so on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

ROUND_SECONDS = 0.002
ROUND_SECONDS_PER_THREAD = 0.0001
"""What a round may last: some time to be woken, and for each thread its turn at the interpreter."""
WAKES_LEFT_OUT_MAX = 64


class Rounds:
    """Belongs to one event loop; other threads only read `awaited`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start_calls: Callable[[], None]) -> None:
        """`start_calls` is called when the time of a round is over."""
        self._loop = loop
        self._start_calls = start_calls
        self.awaited = 0
        """The loop need not look before so many calls have come. 0: there is no round."""
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._in_vain = 0
        """Rounds, since the last one that was not."""
        self._left_out = 0
        """Wakes that will begin none."""

    def begin(self, woken: int, waiting: int) -> None:
        """Before so many threads are woken, while so many calls wait already."""
        if self.awaited:
            self.awaited += woken
            self._until += woken * ROUND_SECONDS_PER_THREAD
        elif woken + waiting > 1:  # else whoever calls next completes it
            if self._left_out:
                self._left_out -= 1
                return
            self.awaited = woken + waiting
            seconds = ROUND_SECONDS + self.awaited * ROUND_SECONDS_PER_THREAD
            self._until = self._loop.time() + seconds
            self._set_timer()

    def complete(self) -> None:
        """All that was waited for has come, if anything was."""
        if self.awaited:
            self.awaited = self._in_vain = 0

    def _set_timer(self) -> None:
        """The last round's may still be set: most end long before their time."""
        if self._timer is not None:
            if self._timer.when() <= self._until:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._until, self._look_at_the_time)

    def _look_at_the_time(self) -> None:
        self._timer = None
        if not self.awaited:
            return
        if self._loop.time() < self._until:
            self._set_timer()
            return
        self.awaited = 0
        self._left_out = min(2**self._in_vain, WAKES_LEFT_OUT_MAX)
        self._in_vain += 1
        self._start_calls()
