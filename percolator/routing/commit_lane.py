"""The calls that commit whole transactions: transactions become a request, and back."""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import PercolatorError
from percolator.routing.cells import FollowedCommit, waiting_seconds
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
from percolator.routing.pending_commit import PendingCommit
from percolator.routing.schema_versions import SchemaVersions
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.methods import COMMIT_TRANSACTIONS
from percolator.wire.status import from_detail
from percolator.world import Clock, Network


class CommitLane(Lane):
    """The transactions for one server."""

    def __init__(
        self, address: str, network: Network, versions: SchemaVersions, clock: Clock
    ) -> None:
        super().__init__(address, versions)
        self._commit = network.unary(address, COMMIT_TRANSACTIONS)
        self._now = clock.monotonic_seconds

    async def call(self, entries: list[Queued], timeout_seconds: float) -> Sequence[Problem]:
        groups = by_target(entries, self._versions)
        request = pb.CommitTransactionsRequest()
        for target, group in groups:
            batch = request.batches.add()
            fill_target(batch.target, target)
            _fill(batch, group)
        left = min(entry.pending.deadline for entry in entries) - self._now()
        if left < timeout_seconds:
            request.wait_milliseconds = max(round(waiting_seconds(left) * 1000), 1)
        response = await self._commit(request, timeout_seconds)
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


def _fill(batch: pb.TransactionBatch, group: Sequence[Queued]) -> None:
    starts: list[int] = []
    cells: list[int] = []
    rows: list[bytes] = []
    columns: list[bytes] = []
    kinds: list[int] = []
    values: list[bytes] = []
    observed: dict[bytes, tuple[bytes, ...]] = {}
    for index, entry in enumerate(group):
        if not isinstance(entry, PendingCommit):
            continue
        commit = entry.commit
        starts.append(commit.start)
        cells.append(len(commit.rows))
        rows += commit.rows
        columns += commit.columns
        kinds += commit.kinds
        values += commit.values
        if commit.observed:
            observed.update(commit.observed)
        if commit.is_followed:
            batch.followed.append(index)
        for row, column, observers in commit.notifications:
            batch.notifications.add(transaction=index, row=row, column=column, observers=observers)
    batch.start_timestamps.extend(starts)
    batch.cells.extend(cells)
    batch.rows.extend(rows)
    batch.columns.extend(columns)
    batch.kinds.extend(kinds)
    batch.values.extend(values)
    for column, observers in observed.items():
        batch.observed.add(column=column, observers=observers)


def _answer(group: Sequence[Queued], result: pb.TransactionBatchResult) -> list[Problem]:
    """Decodes the whole result before it answers any transaction."""
    commits = list(result.commit_timestamps)
    if len(commits) != len(group):
        raise ValueError("it has the wrong number of results")
    answers: list[object] = list(commits)
    for index in result.followed:
        answers[index] = FollowedCommit(commits[index])
    problems: list[Problem] = []
    for one in result.uncommitted:
        entry, found = group[one.transaction], unapplied(one.result)
        if isinstance(found, PercolatorError):
            answers[one.transaction] = None
            problems.append(([entry], found))
        else:
            answers[one.transaction] = found
    if 0 in answers:
        raise ValueError("it has a transaction without an outcome")
    for entry, answer in zip(group, answers, strict=True):
        if answer is not None:
            entry.pending.answer(0, answer)
    return problems
