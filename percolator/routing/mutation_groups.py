"""Sends groups of mutations, which take effect all at once or not at all, to the tablet of a row.

What was definitely not executed is sent again, to wherever the tablet is by then. A group without
an answer is not: whether it may be repeated is part of the protocol
(percolator/protocol/shared/driver.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import (
    ExecutionUnknown,
    NotReady,
    PercolatorError,
    Retry,
    SchemaChanged,
    TabletLocation,
    TabletMoved,
)
from percolator.limits import Limits
from percolator.routing.catalog import TabletMap
from percolator.routing.cells import APPLIED, Answer, Refused
from percolator.routing.lanes import SchemaVersions, malformed, unapplied
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.backoff import Backoff
from percolator.wire.methods import MUTATE_TOGETHER
from percolator.world import World

_RETRY_SECONDS_MIN = 0.02
_RETRY_SECONDS_MAX = 0.5


class MutationGroups:
    """The groups of one client."""

    def __init__(
        self, world: World, tablets: TabletMap, versions: SchemaVersions, limits: Limits
    ) -> None:
        self._world = world
        self._tablets = tablets
        self._versions = versions
        self._limits = limits

    async def mutate(
        self, table_id: int, mutations: Sequence[pb.Mutation], deadline: float
    ) -> list[Answer]:
        """Applies mutations of one row, and returns their answers in the same order. Either all are
        applied, or none is, and then at least one of them is refused.

        Raises the error that prevented execution until the deadline, or an error with
        `Retry.UNKNOWN` if the group may have been executed.
        """
        clock = self._world.clock
        backoff = Backoff(clock, self._world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
        row = mutations[0].row
        while True:
            try:
                location = await self._located(table_id, row)
                answers = await self._send(table_id, location, mutations, deadline)
                _require_known(answers)
            except PercolatorError as error:
                if error.retry is Retry.UNKNOWN:
                    await self._tablets.try_refresh(table_id, row)  # a repeated call may need it
                if error.retry is not Retry.SAFE:
                    raise
                problem = error
            else:
                if _are_decided(answers):
                    return answers
                problem = next(one for one in answers if isinstance(one, PercolatorError))
            if isinstance(problem, TabletMoved):
                self._tablets.learn(problem.locations)
            if not await backoff.pause(deadline):
                raise problem
            if not isinstance(problem, SchemaChanged):
                await self._tablets.try_refresh(table_id, row)

    async def _located(self, table_id: int, row: bytes) -> TabletLocation:
        try:
            return await self._tablets.located(table_id, row)
        except ExecutionUnknown as error:
            # The search got no answer, and nothing of the group was sent.
            raise NotReady(error.message, where=error.where) from error

    async def _send(
        self,
        table_id: int,
        location: TabletLocation,
        mutations: Sequence[pb.Mutation],
        deadline: float,
    ) -> list[Answer]:
        target = pb.TabletTarget(
            tablet_id=location.tablet_id,
            epoch=location.epoch,
            schema_version=self._versions.get(table_id, location.tablet_id),
        )
        batch = pb.MutationBatch(target=target, mutations=mutations)
        left = deadline - self._world.clock.monotonic_seconds()
        if left <= 0:
            raise NotReady("no time was left to send the group")
        call = self._world.network.unary(location.address, MUTATE_TOGETHER)
        try:
            response = await call(
                pb.MutateTogetherRequest(batch=batch),
                min(left, self._limits.attempt_seconds_max),
            )
        except SchemaChanged as changed:
            self._versions.refused(location.tablet_id, changed)
            raise
        if len(response.results) != len(mutations):
            raise malformed("it has the wrong number of results")
        return [_answer(result) for result in response.results]


def _answer(result: pb.MutationResult) -> Answer:
    return APPLIED if result.outcome == pb.OUTCOME_APPLIED else unapplied(result)


def _require_known(answers: Sequence[Answer]) -> None:
    """A group takes effect as a whole: if one answer leaves open what became of its mutation, that
    is open for all of them, whatever the others say."""
    for answer in answers:
        if isinstance(answer, PercolatorError) and answer.retry is Retry.UNKNOWN:
            raise answer


def _are_decided(answers: Sequence[Answer]) -> bool:
    """True if they tell the protocol something: sending the same again would change nothing."""
    return any(one is APPLIED or isinstance(one, Refused) for one in answers) or any(
        isinstance(one, PercolatorError) and one.retry is Retry.USELESS for one in answers
    )
