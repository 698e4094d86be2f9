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

JOINED_SECONDS = 0.5
"""How long a caller waits for a step that another one has sent. Then it sends it as well: the other
may be waiting for steps of its own that no server answers."""


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
        answers: dict[About, Answer] = {}
        waited_for: dict[About, asyncio.Future[Answer]] = {}
        while left := {about: step for about, step in steps.items() if about not in answers}:
            under_way = {about: self._under_way.get(about) for about in left}
            joined = {
                about: future
                for about, future in under_way.items()
                if future is not None and future is not waited_for.get(about)
            }
            own = {about: step for about, step in left.items() if about not in joined}
            if own:
                answers |= await self._send(own, deadline)
            if joined:
                seconds = deadline - self._env.now()
                await asyncio.wait(joined.values(), timeout=min(max(seconds, 0.0), JOINED_SECONDS))
                answers |= {about: one.result() for about, one in joined.items() if one.done()}
                if seconds <= JOINED_SECONDS:
                    late = DeadlineExceeded("no answer in time to a request that another sent")
                    answers = dict.fromkeys(joined, late) | answers
            waited_for = joined
        return [answers[about] for about in steps]

    async def _send(
        self, own: Mapping[About, CellMutation], deadline: float
    ) -> dict[About, Answer]:
        loop = asyncio.get_running_loop()
        sent = {about: loop.create_future() for about in own}
        self._under_way.update(sent)
        # If this caller is cancelled, those who have joined it get this error, and ask again.
        cancelled = Unavailable("the caller that sent this request was cancelled")
        answers: dict[About, Answer] = dict.fromkeys(own, cancelled)
        try:
            told = await self._cells.mutate(list(own.values()), deadline)
            answers = dict(zip(own, told, strict=True))
        finally:
            for about, answer in answers.items():
                sent[about].set_result(answer)
                if self._under_way.get(about) is sent[about]:  # not sent again since
                    del self._under_way[about]
        return answers
