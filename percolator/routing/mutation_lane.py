"""The calls that carry conditional mutations: mutations become a request, its response answers.

Those that most transactions send travel as parallel lists.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import PercolatorError
from percolator.routing.cells import APPLIED
from percolator.routing.common_step import CommonStep
from percolator.routing.lanes import (
    Lane,
    Problem,
    Queued,
    by_target,
    fill_target,
    malformed,
    require_batches,
    unapplied,
)
from percolator.routing.schema_versions import SchemaVersions
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.methods import MUTATE
from percolator.wire.status import from_detail
from percolator.world import Network


class MutationLane(Lane):
    """The mutations for one server."""

    def __init__(self, address: str, network: Network, versions: SchemaVersions) -> None:
        super().__init__(address, versions)
        self._mutate = network.unary(address, MUTATE)

    async def call(self, entries: list[Queued], timeout_seconds: float) -> Sequence[Problem]:
        request = pb.MutateRequest()
        groups = by_target(entries, self._versions)
        for target, group in groups:
            batch = request.batches.add()
            fill_target(batch.target, target)
            steps = [entry.message for entry in group if _is_step(entry)]
            others = len(group) - len(steps)
            if others:
                group.sort(key=_is_step)  # the server numbers steps after other mutations
                batch.mutations.extend([entry.message for entry in group[:others]])
            if steps:
                fill_list(batch.steps, steps)
        response = await self._mutate(request, timeout_seconds)
        require_batches(response.batches, groups)
        problems: list[Problem] = []
        for (_, group), result in zip(groups, response.batches, strict=True):
            if result.HasField("error"):
                problems.append((group, from_detail(result.error)))
            else:
                problems += _answer(group, result)
        return problems


def _is_step(entry: Queued) -> bool:
    return isinstance(entry.message, CommonStep)


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


def _answer(group: Sequence[Queued], result: pb.MutationBatchResult) -> list[Problem]:
    refused = {one.mutation: one.result for one in result.unapplied}
    if result.mutations != len(group) or any(at >= len(group) for at in refused):
        return [(list(group), malformed("it has the wrong number of mutations"))]
    problems: list[Problem] = []
    for at, entry in enumerate(group):
        found = unapplied(refused[at]) if at in refused else APPLIED
        if isinstance(found, PercolatorError):
            problems.append(([entry], found))
        else:
            entry.pending.answer(entry.index, found)
    return problems
