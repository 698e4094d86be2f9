"""Rounds of threads: those that the event loop wakes together are heard together.

A thread that was given its answer often calls again at once: for a commit, for the next
transaction. Threads take turns at the interpreter, so their calls come one after the other. A loop
that looks as soon as there is one finds one, or three, and sends them; their answers wake as few;
and a call to a server costs as much as thirty rows. So the loop does not look before the threads
that it has woken have called, or the time of the round is over.

That is done for threads that come back in time as a rule: those that do something else first would
cost the others that time again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

ROUND_SECONDS = 0.002
ROUND_SECONDS_PER_THREAD = 0.0001
"""What a round may last: some time to be woken, and for each thread its turn at the interpreter."""
TRUSTED_AFTER = 4
"""A thread is waited for when so many of its calls in a row came in time."""


class Caller:
    """A thread that waits for each of its calls."""

    __slots__ = ("due", "in_time")

    def __init__(self) -> None:
        self.due = 0.0
        """Until then its next call is in time. 0: it was not woken since its last."""
        self.in_time = 0
        """The calls in a row that were."""


class Rounds:
    """Belongs to one event loop; other threads read `missing`, and say when they are back."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start_calls: Callable[[], None]) -> None:
        """`start_calls` is called when the time of a round is over."""
        self._loop = loop
        self._start_calls = start_calls
        self.missing: set[Caller] = set()
        """Woken in this round, and waited for. While there are any, the loop need not look."""
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, woken: Sequence[Caller], waiting: int) -> None:
        """Before these are woken, while so many calls wait already."""
        until = self._until if self.missing else self._loop.time() + ROUND_SECONDS
        until += len(woken) * ROUND_SECONDS_PER_THREAD
        for caller in woken:
            caller.due = until
        trusted = [caller for caller in woken if caller.in_time >= TRUSTED_AFTER]
        # A lone one is not waited for: nothing is there that its call could go with.
        if trusted and (self.missing or len(trusted) + waiting > 1):
            self.missing.update(trusted)
            self._until = until
            self._set_timer()

    def back(self, caller: Caller) -> None:
        """In its thread: it has called."""
        if caller.due:
            caller.in_time = caller.in_time + 1 if self._loop.time() <= caller.due else 0
            caller.due = 0.0
        self.missing.discard(caller)

    def _set_timer(self) -> None:
        """The last round's may still be set: most end long before their time."""
        if self._timer is not None:
            if self._timer.when() <= self._until:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._until, self._look_at_the_time)

    def _look_at_the_time(self) -> None:
        self._timer = None
        if not self.missing:
            return
        if self._loop.time() < self._until:
            self._set_timer()
            return
        self.missing.clear()
        self._start_calls()
