"""Steps that many transactions need at one moment are sent once, and hold up nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from percolator.errors import CellAddress, DeadlineExceeded
from percolator.protocol import steps
from percolator.protocol.roll_forward import JOINED_SECONDS, About, AskedOnce
from percolator.routing.cells import APPLIED, Answer, CellMutation
from tests.simulation.virtual_time import VirtualClock

LOST, SERVED = (CellAddress(1, row, b"c") for row in (b"lost", b"served"))


class _Cells:
    """No server has the lost cell: what is asked with it is answered at the deadline."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.seconds = 0.01
        self.sent: list[bytes] = []

    async def mutate(self, mutations: Sequence[CellMutation], deadline: float) -> list[Answer]:
        rows = [one.mutation.row for one in mutations]
        self.sent += rows
        if LOST.row not in rows:
            await asyncio.sleep(self.seconds)
            return [APPLIED] * len(rows)
        await asyncio.sleep(deadline - self._clock.monotonic_seconds())
        return [DeadlineExceeded("late") if row == LOST.row else APPLIED for row in rows]


def _asked(*cells: CellAddress) -> dict[About, CellMutation]:
    return {
        About("status", cell, 7): CellMutation(1, steps.status(cell.row, cell.column, 7))
        for cell in cells
    }


def _once() -> tuple[AskedOnce, _Cells, VirtualClock]:
    clock = VirtualClock(asyncio.get_running_loop())
    cells = _Cells(clock)
    env = SimpleNamespace(now=clock.monotonic_seconds)
    return AskedOnce(cast(Any, env), cells), cells, clock


async def test_steps_that_are_asked_together_are_sent_once() -> None:
    once, cells, clock = _once()
    asking = [once.mutate(_asked(SERVED), clock.monotonic_seconds() + 5) for _ in range(100)]
    assert await asyncio.gather(*asking) == [[APPLIED]] * 100
    assert cells.sent == [b"served"]


async def test_who_joins_a_step_does_not_wait_for_others_that_were_sent_with_it() -> None:
    once, cells, clock = _once()
    first = asyncio.create_task(once.mutate(_asked(LOST, SERVED), 10.0))
    await asyncio.sleep(0.1)
    joining = [once.mutate(_asked(SERVED), 5.0) for _ in range(100)]
    assert await asyncio.gather(*joining) == [[APPLIED]] * 100
    assert clock.monotonic_seconds() < 0.1 + 2 * JOINED_SECONDS
    assert cells.sent == [b"lost", b"served", b"served"]
    (late, applied) = await first
    assert isinstance(late, DeadlineExceeded)
    assert applied is APPLIED


async def test_nobody_waits_beyond_a_deadline_of_its_own() -> None:
    once, cells, clock = _once()
    cells.seconds = 100.0
    first = asyncio.create_task(once.mutate(_asked(SERVED), 200.0))
    await asyncio.sleep(0.1)
    (late,) = await once.mutate(_asked(SERVED), 0.1 + JOINED_SECONDS / 2)
    assert isinstance(late, DeadlineExceeded)
    assert clock.monotonic_seconds() < 0.1 + JOINED_SECONDS
    assert await first == [APPLIED]
