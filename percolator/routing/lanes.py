"""The kinds of calls that carry rows to a tablet server.

A call answers each row individually. Rows that it could not answer are returned, with the error of
their tablet's batch or of the whole call. What a response does not say clearly is unknown: if it is
malformed, its rows may have been executed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from percolator.errors import ExecutionUnknown, PercolatorError
from percolator.routing.cells import Refused
from percolator.routing.pending_cell import PendingCell
from percolator.routing.pending_commit import PendingCommit
from percolator.routing.pending_row import NOWHERE, PendingRow
from percolator.routing.schema_versions import SchemaVersions
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import from_detail

Queued = PendingRow | PendingCell | PendingCommit
"""A row, or a whole transaction, on its way to a tablet server and back."""

Problem = tuple[list[Queued], PercolatorError]
"""Rows that were not answered individually, and why."""

Target = tuple[int, int, int]
"""Tablet, epoch and schema version."""


class Lane(ABC):
    """One kind of calls to one server."""

    def __init__(self, address: str, versions: SchemaVersions) -> None:
        self.queue: deque[Queued] = deque()
        self.calls = 0
        """The number of calls in flight."""
        self.rows_in_flight = 0
        """The number of rows in those calls."""
        self._address = address
        self._versions = versions

    @abstractmethod
    async def call(self, entries: list[Queued], timeout_seconds: float) -> Sequence[Problem]:
        """Sends the rows and answers those that it can; returns the others, with the reason.
        Raises when the whole call failed."""


def by_target(
    entries: Sequence[Queued], versions: SchemaVersions
) -> list[tuple[Target, list[Queued]]]:
    """The rows by their target."""
    groups: dict[Target, list[Queued]] = {}
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


def fill_target(target: pb.TabletTarget, asked: Target) -> None:
    target.tablet_id, target.epoch, target.schema_version = asked


def require_batches(found: Sequence[object], asked: Sequence[object]) -> None:
    """Raises unless the response has a batch for each batch of the request."""
    if len(found) != len(asked):
        raise malformed("it has the wrong number of batches")


def unapplied(result: pb.MutationResult) -> Refused | PercolatorError:
    """What the server says of a mutation, or of a whole transaction, that it has not applied."""
    if result.outcome == pb.OUTCOME_REFUSED:
        return Refused(result.failed_condition, result.cell if result.HasField("cell") else None)
    if result.HasField("error"):
        return from_detail(result.error)
    return malformed("it has a result without an outcome")


def malformed(what: str) -> ExecutionUnknown:
    return ExecutionUnknown(f"a tablet server's response is malformed: {what}")
