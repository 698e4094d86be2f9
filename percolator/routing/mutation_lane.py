"""The calls that carry conditional mutations: mutations become a request, its response answers.

Those that most transactions send travel as parallel lists, to servers that say that they know them.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import InvalidArgument, PercolatorError
from percolator.routing.cells import APPLIED
from percolator.routing.common_step import CommonStep
from percolator.routing.lanes import (
    Lane,
    Problem,
    Queued,
    by_target,
    fill_target,
    malformed,
    overlooked,
    parted,
    require_batches,
    unapplied,
)
from percolator.routing.schema_versions import SchemaVersions
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.methods import MUTATE
from percolator.wire.status import from_detail
from percolator.world import Network

_APPLIED = pb.OUTCOME_APPLIED


class MutationLane(Lane):
    """The mutations for one server."""

    def __init__(self, address: str, network: Network, versions: SchemaVersions) -> None:
        super().__init__(address, versions)
        self._mutate = network.unary(address, MUTATE)
        self._takes_steps = False
        """Whether the server has said that it knows lists of steps."""

    async def call(self, entries: list[Queued], timeout_seconds: float) -> Sequence[Problem]:
        request = pb.MutateRequest()
        groups = parted(by_target(entries, self._versions), self._is_listed)
        for target, group, listed in groups:
            batch = request.batches.add()
            fill_target(batch.target, target)
            if listed:
                fill_list(batch.steps, [entry.message for entry in group])
            else:
                batch.mutations.extend([_mutation(entry) for entry in group])
        response = await self._mutate(request, timeout_seconds)
        self._takes_steps = response.takes_steps
        require_batches(response.batches, groups)
        problems: list[Problem] = []
        for (_, group, listed), result in zip(groups, response.batches, strict=True):
            if result.HasField("error"):
                problems.append((group, self._error(from_detail(result.error), listed=listed)))
            elif listed:
                problems += _answer_steps(group, result)
            elif len(result.results) != len(group):
                problems.append((group, malformed("it has the wrong number of results")))
            else:
                problems += _answer(group, result.results)
        return problems

    def _is_listed(self, entry: Queued) -> bool:
        return self._takes_steps and isinstance(entry.message, CommonStep)

    def _error(self, error: PercolatorError, *, listed: bool) -> PercolatorError:
        """The error of a batch. A server that overlooks the steps of one finds no mutations in it.
        It has executed nothing, and gets them one by one."""
        if listed and isinstance(error, InvalidArgument) and error.field.endswith(".mutations"):
            return overlooked(self._address)
        return error


def _mutation(entry: Queued) -> pb.Mutation:
    message: CommonStep | pb.Mutation = entry.message
    return message.mutation() if isinstance(message, CommonStep) else message


def fill_list(batch: pb.StepList, steps: Sequence[CommonStep]) -> None:
    batch.kinds.extend([step.kind for step in steps])
    batch.rows.extend([step.row for step in steps])
    batch.columns.extend([step.column for step in steps])
    batch.values.extend([step.value for step in steps])
    batch.start_timestamps.extend([step.start for step in steps])
    batch.commit_timestamps.extend([step.commit for step in steps])
    batch.min_commit_timestamps.extend([step.min_commit for step in steps])
    observed = {step.column: step.observers for step in steps if step.observers}
    for column, observers in observed.items():
        batch.observed.add(column=column, observers=observers)


def _answer(group: Sequence[Queued], results: Sequence[pb.MutationResult]) -> list[Problem]:
    problems: list[Problem] = []
    for entry, one in zip(group, results, strict=True):
        if one.outcome == _APPLIED:
            entry.pending.answer(entry.index, APPLIED)
        else:
            problems += _answer_unapplied(entry, one)
    return problems


def _answer_steps(group: Sequence[Queued], result: pb.MutationBatchResult) -> list[Problem]:
    unapplied = {one.step: one.result for one in result.unapplied}
    if result.steps != len(group) or any(at >= len(group) for at in unapplied):
        return [(list(group), malformed("it has the wrong number of steps"))]
    problems: list[Problem] = []
    for at, entry in enumerate(group):
        if at in unapplied:
            problems += _answer_unapplied(entry, unapplied[at])
        else:
            entry.pending.answer(entry.index, APPLIED)
    return problems


def _answer_unapplied(entry: Queued, result: pb.MutationResult) -> list[Problem]:
    found = unapplied(result)
    if isinstance(found, PercolatorError):
        return [([entry], found)]
    entry.pending.answer(entry.index, found)
    return []
