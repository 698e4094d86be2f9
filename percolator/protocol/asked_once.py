"""Steps that many transactions need at the same moment, and that are sent once.

When the writer of a popular cell dies, many transactions meet its lock at once. Each would ask the
same primary about the same transaction, and roll the same cell forward: a crowd of mutations of one
cell, which a tablet has to judge one batch after another.

A step may be shared only if its answer does not depend on the caller, and if an answer already in
flight is as good as a later one. It is: a decision never changes, and where nothing is decided yet,
the steps that act on the answer compare the lock again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from percolator.errors import CellAddress, DeadlineExceeded, Unavailable
from percolator.protocol.environment import Environment
from percolator.routing.cells import Answer, CellMutation, Mutations


class About(NamedTuple):
    """What distinguishes one shared step from another."""

    what: str
    cell: CellAddress
    start_timestamp: int


class AskedOnce:
    """The shared steps that are in flight."""

    def __init__(self, env: Environment, cells: Mutations) -> None:
        self._env = env
        self._cells = cells
        self._under_way: dict[About, asyncio.Future[Answer]] = {}

    async def mutate(self, steps: Mapping[About, CellMutation], deadline: float) -> list[Answer]:
        """Returns the answers in the order of the steps; an error where there was no answer."""
        joined = {about: self._under_way[about] for about in steps if about in self._under_way}
        own = {about: step for about, step in steps.items() if about not in joined}
        answers = await self._send(own, deadline) if own else {}
        if joined:
            left = deadline - self._env.clock.monotonic_seconds()
            await asyncio.wait(joined.values(), timeout=max(left, 0.0))
            for about, future in joined.items():
                late = DeadlineExceeded("no answer in time to a request that another caller sent")
                answers[about] = future.result() if future.done() else late
        return [answers[about] for about in steps]

    async def _send(
        self, own: Mapping[About, CellMutation], deadline: float
    ) -> dict[About, Answer]:
        loop = asyncio.get_running_loop()
        self._under_way.update({about: loop.create_future() for about in own})
        # If this caller is cancelled, those who have joined it get this error, and ask again.
        cancelled = Unavailable("the caller that sent this request was cancelled")
        answers: dict[About, Answer] = dict.fromkeys(own, cancelled)
        try:
            told = await self._cells.mutate(list(own.values()), deadline)
            answers = dict(zip(own, told, strict=True))
        finally:
            for about, answer in answers.items():
                self._under_way.pop(about).set_result(answer)
        return answers
