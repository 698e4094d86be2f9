"""The kinds of calls that carry rows to a tablet server.

PendingRequest, PendingRow  a caller's request, and each of its rows
PendingCell, PendingCommit  a request for one cell, and a commit in one round: also their own rows
Lane                        one kind of calls to one server: of commits, mutations or reads
SchemaVersions              the schema version that each tablet asks for

A call answers each row individually. Rows that it could not answer are returned, with the error of
their tablet's batch or of the whole call. What a response does not say clearly is unknown: if it is
malformed, its rows may have been executed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Self, TypeVar

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    PercolatorError,
    Retry,
    SchemaChanged,
    TabletLocation,
)
from percolator.routing.cells import (
    APPLIED,
    CommitAnswer,
    FollowedCommit,
    FoundCell,
    ListedStep,
    NotSent,
    OneRoundCommit,
    ReadSize,
    Refused,
    RowResult,
    waiting_seconds,
)
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.tabletserver_pb2 import Mutation, RowRead
from percolator.wire.methods import COMMIT_TRANSACTIONS, MUTATE, READ
from percolator.wire.status import from_detail
from percolator.world import Clock, Network

# Which version of a table's schema each of its tablets asks for: what every request names.
#
# The catalog knows the newest version of a table. But tablets change one after another, so what a
# tablet has said itself counts more.


class SchemaVersions:
    """The schema version under which each tablet accepts requests, as far as it is known."""

    def __init__(self) -> None:
        self.of_table: dict[int, int] = {}
        self.of_tablet: dict[int, int] = {}
        self._named: dict[int, int] = {}
        """By table: the newest that a tablet has named."""
        self.on_newer: Callable[[int, int], None] | None = None
        """Called with the id and the version of a schema that is newer than what is known."""

    def refused(self, tablet_id: int, error: SchemaChanged) -> None:
        """A tablet has refused another version than its own."""
        self.of_tablet[tablet_id] = error.schema_version
        self._named[error.table_id] = max(self.named(error.table_id), error.schema_version)
        known = self.of_table.get(error.table_id, 0)
        if error.schema_version > known and self.on_newer is not None:
            self.on_newer(error.table_id, error.schema_version)

    def named(self, table_id: int) -> int:
        """The newest version that a tablet of the table has named; 0 if none has."""
        return self._named.get(table_id, 0)

    def get(self, table_id: int, tablet_id: int) -> int:
        version = self.of_tablet.get(tablet_id)
        return self.of_table.get(table_id, 0) if version is None else version


# What a caller waits for: one future for all the rows of its request.

NOWHERE = TabletLocation(table_id=0, tablet_id=0, epoch=0, start=b"", end=b"", address="")
"""The location of a row before it was looked up."""

_STEP_BYTES = 32
"""The size of a step in a request besides row, column and value."""


class PendingRow:
    """One mutation or one row to read, on its way to a tablet server and back."""

    __slots__ = (
        "alone",
        "attempts",
        "index",
        "location",
        "message",
        "pending",
        "row",
        "schema_version",
        "sent",
        "size_bytes",
        "table_id",
    )

    rows = 1
    """As how many rows it counts in a call."""

    def __init__(
        self,
        pending: PendingRequest,
        index: int,
        table_id: int,
        schema_version: int,
        message: Mutation | ListedStep | RowRead,
    ) -> None:
        self.pending = pending
        self.index = index
        self.table_id = table_id
        self.schema_version = schema_version
        """The schema version that the row requires; 0 for any."""
        self.message: Any = message
        self.row: bytes = message.row
        self.size_bytes: int = (
            len(message.row) + len(message.column) + len(message.value) + _STEP_BYTES
            if isinstance(message, ListedStep)
            else message.ByteSize()
        )
        self.location = NOWHERE
        self.attempts = 0
        """How many attempts ended without execution, or for a read without an answer."""
        self.sent = False
        """True while the row may have been executed without our knowing."""
        self.alone = False
        """Send the row by itself: it, or another row of its batch, made the whole batch fail."""


class PendingRequest:
    """A caller's request, about one or many rows."""

    __slots__ = (
        "answers",
        "deadline",
        "entries",
        "future",
        "is_read",
        "last_problem",
        "left",
        "size",
    )

    def __init__(
        self, future: asyncio.Future[Any], rows: int, deadline: float, *, is_read: bool
    ) -> None:
        self.future = future
        self.answers: list[Any] = [None] * rows
        self.left = rows
        self.deadline = deadline
        self.is_read = is_read
        self.entries: list[PendingRow] = []
        self.last_problem: PercolatorError | None = None
        self.size: ReadSize | None = None
        """Size of the cells read, if that has a limit."""

    def answer(self, index: int, answer: Any) -> None:  # noqa: ANN401 - for any kind of row
        if self.future.done():
            return  # too late: the caller has continued without it
        if self.size is not None:
            try:
                self.size.add(answer)
            except PercolatorError as error:
                # Now, or the answers of a short request would fill the memory.
                self.answers.clear()
                self.fail(index, error)
                return
        self.answers[index] = answer
        self.left -= 1
        if not self.left:
            self.future.set_result(self.answers)
            # The entries refer to this object, too. Left as a reference cycle, they would be work
            # for the garbage collector: a third of the cost of a small transaction.
            self.entries.clear()

    def fail(self, index: int, error: PercolatorError) -> None:
        """A mutation's error is its answer; a read that fails makes the whole request fail."""
        if not self.is_read:
            self.answer(index, error)
        elif not self.future.done():
            self.future.set_exception(copy(error))
            self.entries.clear()

    def expire(self) -> None:
        """Fails what is unanswered, because the deadline has passed. What was not sent is
        definitely not executed."""
        for entry in tuple(self.entries):
            if self.answers[entry.index] is None:
                is_safe = self.is_read or not entry.sent
                self.fail(entry.index, late(self.last_problem, is_safe=is_safe))

    def is_answered(self, index: int) -> bool:
        return self.future.done() or self.answers[index] is not None


def late(problem: PercolatorError | None, *, is_safe: bool) -> DeadlineExceeded:
    """The error for an answer that did not come in time; `problem` is the last attempt's error."""
    error = DeadlineExceeded(
        f"no answer in time; last error: {problem.message}" if problem else "no answer in time",
        where=problem.where if problem else "",
    )
    if is_safe:
        error.retry = Retry.SAFE
    return error


# The read of a single cell, the most frequent kind of read.
#
# A request about one row with one answer needs no lists of rows and answers, and no message object
# before it is written into its call. Those would be a third of what a read costs the client.

CellAnswer = FoundCell | RowResult | None
"""The cell, or None if there is none; a `RowResult` if a lock is in the way."""

_OTHER_BYTES = 24
"""The size of a request besides row and column."""


class _OnlyRow:
    """A request (`PendingRequest`) that is also its only row (`PendingRow`)."""

    __slots__ = ("future",)

    index = 0
    message: Any = None

    future: asyncio.Future[Any]

    @property
    def pending(self) -> Self:
        """This object; as an attribute, it would be a reference cycle."""
        return self

    def is_answered(self, index: int) -> bool:
        return self.future.done()

    def answer(self, index: int, answer: Any) -> None:  # noqa: ANN401 - for any kind of row
        if not self.future.done():
            self.future.set_result(answer)


class PendingCell(_OnlyRow):
    """One cell to read."""

    __slots__ = (
        "alone",
        "attempts",
        "column",
        "deadline",
        "last_problem",
        "location",
        "row",
        "sent",
        "size_bytes",
        "table_id",
        "timestamp",
    )

    rows = 1
    is_read = True
    schema_version = 0

    def __init__(
        self,
        future: asyncio.Future[CellAnswer],
        table_id: int,
        row: bytes,
        column: bytes,
        timestamp: int,
        deadline: float,
    ) -> None:
        self.future = future
        self.table_id = table_id
        self.row = row
        self.column = column
        self.timestamp = timestamp
        self.deadline = deadline
        self.size_bytes = len(row) + len(column) + _OTHER_BYTES
        self.location = NOWHERE
        self.attempts = 0
        self.sent = False
        self.alone = False
        self.last_problem: PercolatorError | None = None

    def fail(self, index: int, error: PercolatorError) -> None:
        if not self.future.done():
            self.future.set_exception(copy(error))

    def expire(self) -> None:
        """Fails the read, because its deadline has passed."""
        self.fail(0, late(self.last_problem, is_safe=True))


# A transaction that one message commits, on its way to its tablet and back.
#
# Unlike a row, it is never sent again here once it was answered: whether a copy may still arrive is
# part of the protocol (percolator/protocol/commit.py). What cannot be committed in this way still
# can be in two phases. If a message is refused because of one transaction, the others in it are not
# answered.


class PendingCommit(_OnlyRow):
    """One transaction in the queue of a server."""

    __slots__ = (
        "alone",
        "attempts",
        "commit",
        "deadline",
        "last_problem",
        "location",
        "row",
        "rows",
        "schema_version",
        "sent",
        "size_bytes",
        "table_id",
    )

    is_read = False

    def __init__(
        self, future: asyncio.Future[CommitAnswer], commit: OneRoundCommit, deadline: float
    ) -> None:
        self.future = future
        self.commit = commit
        self.table_id = commit.table_id
        rows, weak = commit.rows, commit.notifications
        self.row = rows[0]
        self.rows = len(rows) + len(weak)
        """As how many rows it counts in a call: one for each cell."""
        self.schema_version = commit.schema_version
        self.deadline = deadline
        if self.rows == 1:  # most transactions: without loops
            self.size_bytes = (
                _OTHER_BYTES + len(self.row) + len(commit.columns[0]) + len(commit.values[0])
            )
        else:
            self.size_bytes = _size_bytes(commit) + _OTHER_BYTES * self.rows
        self.location = NOWHERE
        self.attempts = 0
        self.sent = False
        self.alone = False
        self.last_problem: PercolatorError | None = None

    def fail(self, index: int, error: PercolatorError) -> None:
        self.answer(index, error)

    def expire(self) -> None:
        """Answers, because its deadline has passed."""
        problem = late(self.last_problem, is_safe=False)
        self.answer(0, problem if self.sent else NotSent(problem.message))


def _size_bytes(commit: OneRoundCommit) -> int:
    size_bytes = 0
    for texts in (commit.rows, commit.columns, commit.values):
        for text in texts:
            size_bytes += len(text)
    for row, column, observers in commit.notifications:
        size_bytes += len(row) + len(column) + sum(map(len, observers))
    return size_bytes


Queued = PendingRow | PendingCell | PendingCommit
"""A row, or a one-round commit, on its way to a tablet server and back."""

Problem = tuple[list[Queued], PercolatorError]
"""Rows that were not answered individually, and why."""

Target = tuple[int, int, int]
"""Tablet, epoch and schema version."""

ResultT = TypeVar("ResultT", pb.TransactionBatchResult, pb.MutationBatchResult, pb.ReadBatchResult)


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


def answer_batches(
    asked: Sequence[tuple[Target, list[Queued]]],
    found: Sequence[ResultT],
    answer: Callable[[Sequence[Queued], ResultT], list[Problem]],
) -> list[Problem]:
    """Answers the rows of each batch from its result. `answer` may raise `ValueError` or
    `IndexError` for a malformed one."""
    if len(found) != len(asked):
        raise malformed("it has the wrong number of batches")
    problems: list[Problem] = []
    for (_, group), result in zip(asked, found, strict=True):
        if result.HasField("error"):
            problems.append((group, from_detail(result.error)))
            continue
        try:
            problems += answer(group, result)
        except (IndexError, ValueError) as error:
            problems.append((group, malformed(str(error))))
    return problems


def unapplied(result: pb.MutationResult) -> Refused | PercolatorError:
    """Refusal of a mutation, or of a transaction, that the server has not applied."""
    if result.outcome == pb.OUTCOME_REFUSED:
        return Refused(result.failed_condition, result.cell if result.HasField("cell") else None)
    if result.HasField("error"):
        return from_detail(result.error)
    return malformed("it has a result without an outcome")


def malformed(what: str) -> ExecutionUnknown:
    return ExecutionUnknown(f"a tablet server's response is malformed: {what}")


# The calls that commit in one round: transactions become a request, and back.


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
            _fill_commits(batch, group)
        left = min(entry.pending.deadline for entry in entries) - self._now()
        if left < timeout_seconds:
            request.wait_milliseconds = max(round(waiting_seconds(left) * 1000), 1)
        response = await self._commit(request, timeout_seconds)
        return answer_batches(groups, response.batches, _answer_commits)


def _fill_commits(batch: pb.TransactionBatch, group: Sequence[Queued]) -> None:
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


def _answer_commits(group: Sequence[Queued], result: pb.TransactionBatchResult) -> list[Problem]:
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


# The calls that carry conditional mutations: mutations become a request, its response answers.
#
# Those that most transactions send travel as parallel lists.


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
        return answer_batches(groups, response.batches, _answer_mutations)


def _is_step(entry: Queued) -> bool:
    return isinstance(entry.message, ListedStep)


def fill_list(batch: pb.StepList, steps: Sequence[ListedStep]) -> None:
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


def _answer_mutations(group: Sequence[Queued], result: pb.MutationBatchResult) -> list[Problem]:
    refused = {one.mutation: one.result for one in result.unapplied}
    if result.mutations != len(group) or any(at >= len(group) for at in refused):
        raise ValueError("it has the wrong number of mutations")
    problems: list[Problem] = []
    for at, entry in enumerate(group):
        found = unapplied(refused[at]) if at in refused else APPLIED
        if isinstance(found, PercolatorError):
            problems.append(([entry], found))
        else:
            entry.pending.answer(entry.index, found)
    return problems


# The calls that read rows: reads become a request, its response answers.
#
# Reads of single cells travel as parallel lists.


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
            if others:  # the server numbers single cells after other reads
                group.sort(key=lambda entry: isinstance(entry, PendingCell))
                batch.reads.extend([entry.message for entry in group[:others]])
            if cells:
                batch.cells.rows.extend([entry.row for entry in cells])
                batch.cells.columns.extend([entry.column for entry in cells])
                batch.cells.timestamps.extend([entry.timestamp for entry in cells])
        response = await self._read(request, timeout_seconds)
        return answer_batches(groups, response.batches, _answer_reads)


def _answer_reads(group: Sequence[Queued], result: pb.ReadBatchResult) -> list[Problem]:
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
