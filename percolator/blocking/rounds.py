"""Rounds of threads: the event loop handles the calls of threads that it woke together in one go.

A thread that gets its result often calls again at once: for a commit, or for the next transaction.
Threads take turns at the interpreter, so their calls arrive one after another. If the loop looked
at once, it would find one call, or three, and send them; their answers would wake just as few
threads; and a call to a server costs as much as thirty rows. So the loop does not look before the
threads that it has woken have called, or the time of the round is over.

It only waits for threads that usually call in time: waiting for a thread that does something else
first would cost the others that time again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

ROUND_SECONDS = 0.002
ROUND_SECONDS_PER_THREAD = 0.0001
"""How long a round may last: time for waking, and for each thread's turn at the interpreter."""
TRUSTED_AFTER = 4
"""The loop waits for a thread once this many of its calls in a row were in time."""


class Caller:
    """A thread that waits for each of its calls."""

    __slots__ = ("due", "in_time")

    def __init__(self) -> None:
        self.due = 0.0
        """Until when its next call is in time; 0 if it was not woken since its last call."""
        self.in_time = 0
        """How many of its calls in a row were in time."""


class Rounds:
    """The rounds of one event loop. Other threads read `missing`, and call `back`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        start_calls: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        """`start_calls` is called when the time of a round is over. `now` is the time in seconds,
        for all threads: the loop's own may stand still while the loop waits."""
        self._loop = loop
        self._now = now
        self._start_calls = start_calls
        self.missing: set[Caller] = set()
        """Woken threads that the loop waits for. While there are any, it does not look."""
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_until = 0.0

    def begin(self, woken: Sequence[Caller], waiting: int) -> None:
        """Begins a round. Called before these are woken; `waiting` calls are already waiting."""
        until = self._until if self.missing else self._now() + ROUND_SECONDS
        until += len(woken) * ROUND_SECONDS_PER_THREAD
        for caller in woken:
            caller.due = until
        trusted = [caller for caller in woken if caller.in_time >= TRUSTED_AFTER]
        # The loop does not wait for a lone thread: its call could not be sent along with others.
        if trusted and (self.missing or len(trusted) + waiting > 1):
            self.missing.update(trusted)
            self._until = until
            self._set_timer()

    def back(self, caller: Caller) -> None:
        """Notes that a thread has called. Runs in that thread."""
        if caller.due:
            caller.in_time = caller.in_time + 1 if self._now() <= caller.due else 0
            caller.due = 0.0
        self.missing.discard(caller)

    def _set_timer(self) -> None:
        """Sets the timer. The last round's may still be set: most rounds end long before it."""
        if self._timer is not None:
            if self._timer_until <= self._until:
                return
            self._timer.cancel()
        self._timer_until = self._until
        self._timer = self._loop.call_later(self._until - self._now(), self._look_at_the_time)

    def _look_at_the_time(self) -> None:
        self._timer = None
        if not self.missing:
            return
        if self._now() < self._until:
            self._set_timer()
            return
        self.missing.clear()
        self._start_calls()
