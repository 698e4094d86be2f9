"""The calls that read rows: reads become a request, its response answers.

Reads of single cells travel as parallel lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from percolator.routing.cells import FoundCell, RowResult
from percolator.routing.lanes import (
    Lane,
    Problem,
    Queued,
    by_target,
    fill_target,
    malformed,
    require_batches,
)
from percolator.routing.pending_cell import PendingCell
from percolator.routing.schema_versions import SchemaVersions
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.methods import READ
from percolator.wire.status import from_detail
from percolator.world import Network


class ReadLane(Lane):
    """The reads for one server."""

    def __init__(self, address: str, network: Network, versions: SchemaVersions) -> None:
        super().__init__(address, versions)
        self._read = network.unary(address, READ)

    async def call(self, entries: list[Queued], timeout_seconds: float) -> Sequence[Problem]:
        request = pb.ReadRequest()
        groups = by_target(entries, self._versions)
        for target, group in groups:
            batch = request.batches.add()
            fill_target(batch.target, target)
            cells = [entry for entry in group if isinstance(entry, PendingCell)]
            others = len(group) - len(cells)
            if others:
                group.sort(key=_is_cell)  # the server numbers single cells after other reads
                batch.reads.extend([entry.message for entry in group[:others]])
            if cells:
                batch.cells.rows.extend([entry.row for entry in cells])
                batch.cells.columns.extend([entry.column for entry in cells])
                batch.cells.timestamps.extend([entry.timestamp for entry in cells])
        response = await self._read(request, timeout_seconds)
        require_batches(response.batches, groups)
        problems: list[Problem] = []
        for (_, group), result in zip(groups, response.batches, strict=True):
            if result.HasField("error"):
                problems.append((group, from_detail(result.error)))
                continue
            try:
                problems += _answer(group, result)
            except (IndexError, ValueError) as error:
                problems.append((group, malformed(str(error))))
        return problems


def _is_cell(entry: Queued) -> bool:
    return isinstance(entry, PendingCell)


def _answer(group: Sequence[Queued], result: pb.ReadBatchResult) -> list[Problem]:
    """Decodes the whole result before it answers any row."""
    if result.reads != len(group):
        raise ValueError("it has the wrong number of reads")
    answers: list[Any] = [None if row.message is None else RowResult() for row in group]
    refused_reads = set()
    found = result.found
    deletes = set(found.deletes)
    cells = zip(found.reads, found.columns, found.commit_timestamps, found.values, strict=True)
    for place, (read, column, commit, value) in enumerate(cells):
        cell = FoundCell(commit, None if place in deletes else value)
        answer = answers[read]
        if answer is None:
            answers[read] = cell
        else:
            answer.found[column] = cell
    for blocking in result.locks:
        if answers[blocking.read] is None:
            answers[blocking.read] = RowResult()
        answers[blocking.read].locks.append(blocking.lock)
    problems: list[Problem] = []
    for refused in result.refused:
        row = group[refused.read]
        problems.append(([row], from_detail(refused.error)))
        refused_reads.add(refused.read)
    for index, (row, answer) in enumerate(zip(group, answers, strict=True)):
        if index not in refused_reads:
            row.pending.answer(row.index, answer)
    return problems
