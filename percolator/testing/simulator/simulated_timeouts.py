"""The time-outs of simulated calls, nearly all of which end long before.

If each had a timer, these would fill most of a simulation's heap, where each step moves timers. So
time-outs wait in slots of time. Only the calls that are still waiting when a slot begins get their
own timers, for their exact instants.
"""

from __future__ import annotations

import contextvars
from typing import Protocol

from percolator.testing.simulator.simulated_loop import SimulationLoop

_SLOTS_PER_SECOND = 4


class TimedCall(Protocol):
    """A call, as its time-out sees it."""

    is_over: bool
    context: contextvars.Context
    """The context of the time-out: while the caller is paused, no time passes for it."""

    def time_out(self) -> None: ...


class TimeOuts:
    """The time-outs of all calls of a simulation."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop
        self._slots: dict[int, list[tuple[float, TimedCall]]] = {}
        """The slots that have not begun, by number, counted from the beginning of time."""

    def set(self, when: float, call: TimedCall) -> None:
        """Calls `call.time_out()` at that instant, unless the call has ended before."""
        number = int(when * _SLOTS_PER_SECOND)
        slot = self._slots.get(number)
        if slot is not None:
            slot.append((when, call))
            return
        begin = number / _SLOTS_PER_SECOND
        if begin > self._loop.now:
            self._slots[number] = [(when, call)]
            self._loop.deliver_at(begin, self._begin, (number,))
        else:
            self._loop.deliver_at(when, call.time_out, (), call.context)

    def _begin(self, number: int) -> None:
        for when, call in self._slots.pop(number):
            if not call.is_over:
                self._loop.deliver_at(when, call.time_out, (), call.context)
