"""Steps that many need at the same moment, and that are sent once.

A popular cell whose writer has died is met by everybody at once. Each would ask the same primary
about the same transaction, and roll the same cell forward: a crowd of mutations of one cell, which
a tablet has to judge one batch after the other.

Only steps may be shared whose answer does not depend on who asks, and where an answer that was
under way already is as good as a later one: what is decided stays decided, and what is not is acted
upon only by steps that compare it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from percolator.errors import CellAddress, DeadlineExceeded, Unavailable
from percolator.protocol.surroundings import Surroundings
from percolator.wire.questions import Answer, Mutations, Step


class About(NamedTuple):
    """What tells one shared step from another."""

    what: str
    cell: CellAddress
    start_timestamp: int


class AskedOnce:
    """The shared steps that are under way."""

    def __init__(self, around: Surroundings, cells: Mutations) -> None:
        self._around = around
        self._cells = cells
        self._under_way: dict[About, asyncio.Future[Answer]] = {}

    async def mutate(self, steps: Mapping[About, Step], deadline: float) -> list[Answer]:
        """The answers in the order of the steps. An error stands for what was not answered."""
        joined = {about: self._under_way[about] for about in steps if about in self._under_way}
        own = {about: step for about, step in steps.items() if about not in joined}
        answers = await self._send(own, deadline) if own else {}
        if joined:
            left = deadline - self._around.clock.monotonic_seconds()
            await asyncio.wait(joined.values(), timeout=max(left, 0.0))
            for about, future in joined.items():
                late = DeadlineExceeded("no answer in time to what another one asked")
                answers[about] = future.result() if future.done() else late
        return [answers[about] for about in steps]

    async def _send(self, own: Mapping[About, Step], deadline: float) -> dict[About, Answer]:
        loop = asyncio.get_running_loop()
        self._under_way.update({about: loop.create_future() for about in own})
        # What those are told who have joined when whoever asked is cancelled: they ask again.
        answers: dict[About, Answer] = dict.fromkeys(own, Unavailable("whoever asked has left"))
        try:
            told = await self._cells.mutate(list(own.values()), deadline)
            answers = dict(zip(own, told, strict=True))
        finally:
            for about, answer in answers.items():
                self._under_way.pop(about).set_result(answer)
        return answers
