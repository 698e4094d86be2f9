"""The calls that carry rows to a tablet server: rows become a request, its response answers.

A call answers each row individually. Rows that it could not answer are returned, with the error of
their tablet's batch or of the whole call. What a response does not say clearly is unknown: if it is
malformed, its rows may have been executed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from percolator.errors import ExecutionUnknown, PercolatorError, SchemaChanged
from percolator.routing.cells import APPLIED, FoundCell, Refused, RowResult
from percolator.routing.pending_cell import PendingCell
from percolator.routing.pending_commit import PendingCommit
from percolator.routing.pending_row import NOWHERE, PendingRow
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire.methods import MUTATE, READ
from percolator.wire.status import from_detail
from percolator.world import Network

Queued = PendingRow | PendingCell | PendingCommit
"""A row, or a whole transaction, on its way to a tablet server and back."""

Problem = tuple[list[Queued], PercolatorError]
"""Rows that were not answered individually, and why."""

_APPLIED = wire.OUTCOME_APPLIED
_REFUSED = wire.OUTCOME_REFUSED


class SchemaVersions:
    """The schema version under which each tablet accepts requests, as far as it is known."""

    def __init__(self) -> None:
        self.of_table: dict[int, int] = {}
        self.of_tablet: dict[int, int] = {}
        self.on_newer: Callable[[int], None] | None = None
        """Called with the id of a table whose schema is newer than what is known of it."""

    def refused(self, tablet_id: int, error: SchemaChanged) -> None:
        """A tablet has refused another version than its own."""
        self.of_tablet[tablet_id] = error.schema_version
        known = self.of_table.get(error.table_id, 0)
        if error.schema_version > known and self.on_newer is not None:
            self.on_newer(error.table_id)

    def get(self, table_id: int, tablet_id: int) -> int:
        version = self.of_tablet.get(tablet_id)
        return self.of_table.get(table_id, 0) if version is None else version


class Lane(Protocol):
    """One kind of calls."""

    queue: deque[Queued]
    calls: int
    """The number of calls in flight."""
    rows_in_flight: int
    """The number of rows in those calls."""

    async def call(self, entries: list[Queued], timeout_seconds: float) -> Sequence[Problem]:
        """Sends the rows and answers those that it can; returns the others, with the reason.
        Raises when the whole call failed."""
        ...


class MutationLane:
    """The calls that carry conditional mutations."""

    def __init__(self, address: str, network: Network, versions: SchemaVersions) -> None:
        self.queue: deque[Queued] = deque()
        self.calls = 0
        self.rows_in_flight = 0
        self._mutate = network.unary(address, MUTATE)
        self._versions = versions

    async def call(self, entries: list[Queued], timeout_seconds: float) -> Sequence[Problem]:
        request = wire.MutateRequest()
        groups = by_target(entries, self._versions)
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
                problems.append((group, malformed("it has the wrong number of results")))
            else:
                problems += _answer_mutations(group, results)
        return problems


class ReadLane:
    """The calls that read rows."""

    def __init__(self, address: str, network: Network, versions: SchemaVersions) -> None:
        self.queue: deque[Queued] = deque()
        self.calls = 0
        self.rows_in_flight = 0
        self._read = network.unary(address, READ)
        self._versions = versions

    async def call(self, entries: list[Queued], timeout_seconds: float) -> Sequence[Problem]:
        request = wire.ReadRequest()
        groups = by_target(entries, self._versions)
        for (tablet_id, epoch, version), group in groups:
            batch = request.batches.add()
            target = batch.target
            target.tablet_id, target.epoch, target.schema_version = tablet_id, epoch, version
            reads = batch.reads
            for entry in group:
                if isinstance(entry, PendingCell):
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
                problems.append((group, malformed(str(error))))
        return problems


def _answer_mutations(
    group: Sequence[Queued], results: Sequence[wire.MutationResult]
) -> list[Problem]:
    problems: list[Problem] = []
    for entry, one in zip(group, results, strict=True):
        outcome = one.outcome
        if outcome == _APPLIED:
            entry.pending.answer(entry.index, APPLIED)
        elif outcome == _REFUSED:
            cell = one.cell if one.HasField("cell") else None
            entry.pending.answer(entry.index, Refused(one.failed_condition, cell))
        elif one.HasField("error"):
            problems.append(([entry], from_detail(one.error)))
        else:
            problems.append(([entry], malformed("it has a result without an outcome")))
    return problems


def _answer_reads(group: Sequence[Queued], result: wire.ReadBatchResult) -> list[Problem]:
    """Decodes the whole result before it answers any row."""
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


def by_target(
    entries: Sequence[Queued], versions: SchemaVersions
) -> list[tuple[tuple[int, int, int], list[Queued]]]:
    """The rows by tablet, epoch and schema version."""
    groups: dict[tuple[int, int, int], list[Queued]] = {}
    last_location, last_version = NOWHERE, -1
    group: list[Queued] = []
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
        raise malformed(f"it has the wrong number of {what}")


def malformed(what: str) -> ExecutionUnknown:
    return ExecutionUnknown(f"a tablet server's response is malformed: {what}")
