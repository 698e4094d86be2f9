"""The two kinds of calls to a tablet server: how rows become a request, and a response answers.

A call answers each row by itself. What could not be answered so comes back: with the error of its
tablet's batch, or of the whole call. What an answer does not say plainly is unknown: rows of a
malformed answer may have been executed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from percolator.errors import ExecutionUnknown, PercolatorError
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire.asked import NOWHERE, Entry
from percolator.wire.cell_read import CellRead
from percolator.wire.methods import MUTATE, READ
from percolator.wire.questions import APPLIED, FoundCell, Refused, RowAnswer
from percolator.wire.status import from_detail
from percolator.world import Network

Row = Entry | CellRead
"""On its way to a tablet server and back."""

Problem = tuple[list[Row], PercolatorError]
"""Rows without an answer of their own, and why."""

_APPLIED = wire.OUTCOME_APPLIED
_REFUSED = wire.OUTCOME_REFUSED


class SchemaVersions:
    """The schema version under which each tablet takes requests, as far as it is known."""

    def __init__(self) -> None:
        self.of_table: dict[int, int] = {}
        self.of_tablet: dict[int, int] = {}

    def get(self, table_id: int, tablet_id: int) -> int:
        version = self.of_tablet.get(tablet_id)
        return self.of_table.get(table_id, 0) if version is None else version


class Lane(Protocol):
    """One kind of calls."""

    queue: deque[Row]
    calls: int
    """In flight."""
    rows_in_flight: int
    """In them."""

    async def call(self, entries: list[Row], timeout_seconds: float) -> Sequence[Problem]:
        """Answers what it can. Raises when the whole call failed."""
        ...


class MutationLane:
    """Conditional mutations."""

    def __init__(self, address: str, network: Network, versions: SchemaVersions) -> None:
        self.queue: deque[Row] = deque()
        self.calls = 0
        self.rows_in_flight = 0
        self._mutate = network.unary(address, MUTATE)
        self._versions = versions

    async def call(self, entries: list[Row], timeout_seconds: float) -> Sequence[Problem]:
        request = wire.MutateRequest()
        groups = _by_target(entries, self._versions)
        for (tablet_id, epoch, version), group in groups:
            batch = request.batches.add()
            target = batch.target
            target.tablet_id, target.epoch, target.schema_version = tablet_id, epoch, version
            batch.mutations.extend([entry.message for entry in group])
        response = await self._mutate(request, timeout_seconds)
        _require(len(response.batches) == len(groups), "batches")
        problems: list[Problem] = []
        for (_, group), result in zip(groups, response.batches, strict=True):
            results = result.results
            if result.HasField("error"):
                problems.append((group, from_detail(result.error)))
            elif len(results) != len(group):
                problems.append((group, _malformed("has another number of results")))
            else:
                problems += _answer_mutations(group, results)
        return problems


class ReadLane:
    """Reads of rows."""

    def __init__(self, address: str, network: Network, versions: SchemaVersions) -> None:
        self.queue: deque[Row] = deque()
        self.calls = 0
        self.rows_in_flight = 0
        self._read = network.unary(address, READ)
        self._versions = versions

    async def call(self, entries: list[Row], timeout_seconds: float) -> Sequence[Problem]:
        request = wire.ReadRequest()
        groups = _by_target(entries, self._versions)
        for (tablet_id, epoch, version), group in groups:
            batch = request.batches.add()
            target = batch.target
            target.tablet_id, target.epoch, target.schema_version = tablet_id, epoch, version
            reads = batch.reads
            for entry in group:
                if isinstance(entry, CellRead):
                    reads.add(row=entry.row, columns=(entry.column,), timestamp=entry.timestamp)
                else:
                    reads.append(entry.message)
        response = await self._read(request, timeout_seconds)
        _require(len(response.batches) == len(groups), "batches")
        problems: list[Problem] = []
        for (_, group), result in zip(groups, response.batches, strict=True):
            if result.HasField("error"):
                problems.append((group, from_detail(result.error)))
                continue
            try:
                problems += _answer_reads(group, result)
            except (IndexError, ValueError) as error:
                problems.append((group, _malformed(str(error))))
        return problems


def _answer_mutations(
    group: Sequence[Row], results: Sequence[wire.MutationResult]
) -> list[Problem]:
    problems: list[Problem] = []
    for entry, one in zip(group, results, strict=True):
        outcome = one.outcome
        if outcome == _APPLIED:
            entry.asked.answer(entry.index, APPLIED)
        elif outcome == _REFUSED:
            cell = one.cell if one.HasField("cell") else None
            entry.asked.answer(entry.index, Refused(one.failed_condition, cell))
        elif one.HasField("error"):
            problems.append(([entry], from_detail(one.error)))
        else:
            problems.append(([entry], _malformed("has a result without an outcome")))
    return problems


def _answer_reads(group: Sequence[Row], result: wire.ReadBatchResult) -> list[Problem]:
    """Answers nothing before everything was understood."""
    answers: list[Any] = [None if row.message is None else RowAnswer() for row in group]
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
            answers[blocking.read] = RowAnswer()
        answers[blocking.read].locks.append(blocking.lock)
    problems: list[Problem] = []
    for refused in result.refused:
        row = group[refused.read]
        problems.append(([row], from_detail(refused.error)))
        refused_reads.add(refused.read)
    for index, (row, answer) in enumerate(zip(group, answers, strict=True)):
        if index not in refused_reads:
            row.asked.answer(row.index, answer)
    return problems


def _by_target(
    entries: Sequence[Row], versions: SchemaVersions
) -> list[tuple[tuple[int, int, int], list[Row]]]:
    """The rows by tablet, epoch and schema version."""
    groups: dict[tuple[int, int, int], list[Row]] = {}
    last_location, last_version = NOWHERE, -1
    group: list[Row] = []
    for entry in entries:
        location, version = entry.location, entry.schema_version
        if location is not last_location or version != last_version:
            last_location, last_version = location, version
            tablet_id = location.tablet_id
            known = version or versions.get(entry.table_id, tablet_id)
            group = groups.setdefault((tablet_id, location.epoch, known), [])
        group.append(entry)
    return list(groups.items())


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise _malformed(f"has another number of {what}")


def _malformed(what: str) -> ExecutionUnknown:
    return ExecutionUnknown(f"a tablet server's answer is malformed: {what}")
