"""Checks mutations as they come in, and flattens them for the judge.

Everything is checked before anything is queued: a request with one malformed mutation changes
nothing at all. The result is tuples of plain values, because the judge looks at them several times,
and reading a field of a message costs as much as judging a condition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import accumulate
from typing import NoReturn

from percolator.errors import InvalidArgument, NotExecuted, PercolatorError
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    KIND_PUT,
    KIND_PUT_IN_DATA,
    KINDS,
    LOCK_HEADER,
    LOCK_HEADER_BYTES,
    LOCK_KIND_OFFSET,
    START_TIMESTAMP_BYTES,
    WRITE_HEADER,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
    timestamp_bytes,
)
from percolator.schema import ROW_BYTES_MAX
from percolator.tablet.cells import (
    DATA,
    LOCK,
    NOTIFY,
    READ_LOCK_MARK,
    ROLLBACK,
    WRITE,
    ColumnEncoder,
    cells_locked_by,
    component,
)
from percolator.tablet.state import TabletState, too_long
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_ROLLBACK, SPACE_WRITE
from percolator.wire.status import to_detail

# The results of mutations, and of transactions that commit in one round, as answers carry them.
#
# A refusal by a condition is not here: it is made where the condition is judged (judge.py).

APPLIED = pb.MutationResult(outcome=pb.OUTCOME_APPLIED)


def not_executed(error: PercolatorError) -> pb.MutationResult:
    return pb.MutationResult(outcome=pb.OUTCOME_NOT_EXECUTED, error=to_detail(error))


def unknown(error: PercolatorError) -> pb.MutationResult:
    return pb.MutationResult(outcome=pb.OUTCOME_UNKNOWN, error=to_detail(error))


ANSWER_FULL = not_executed(NotExecuted("the response is full; request the rest again"))


ABSENT: int = pb.Condition.EXPECTATION_ABSENT
PRESENT: int = pb.Condition.EXPECTATION_PRESENT
EQUALS: int = pb.Condition.EXPECTATION_EQUALS
BEGINS_IF_PRESENT: int = pb.Condition.EXPECTATION_BEGINS_IF_PRESENT
AT_MOST: int = pb.Condition.EXPECTATION_AT_MOST

PUT: int = pb.Change.KIND_PUT
DELETE: int = pb.Change.KIND_DELETE
DELETE_IF_PREFIX: int = pb.Change.KIND_DELETE_IF_PREFIX

MUTATION_BYTES = 512
"""The approximate size of a queued mutation besides its row, its column and its values."""

CheckedCondition = tuple[cells_pb2.Space, int, int, int, bytes, bytes, bytes]
"""Space, expectation, from, until (0: no bound), prefix, required, qualifier."""

CheckedChange = tuple[int, int, int, bytes, bytes]
"""Kind, space, timestamp, value, qualifier."""


CheckedMutation = tuple[bytes, bytes, bytes, int, list[CheckedCondition], list[CheckedChange]]
"""A mutation, checked: row, column, `cell_prefix` of the two, not_below, conditions, changes.

A plain tuple: creating a named one costs as much as judging two conditions.
"""


class PrewriteConditions(list[CheckedCondition]):
    """The conditions of a prewrite. The judge knows at one look whether they all hold, as they
    nearly always do."""

    __slots__ = ("start",)

    def __init__(self, start: int, conditions: Iterable[CheckedCondition]) -> None:
        super().__init__(conditions)
        self.start = start


class MutationChecker:
    """Checks the mutations of one tablet."""

    def __init__(self, state: TabletState, columns: ColumnEncoder) -> None:
        self._start = state.identity.start
        self._end = state.identity.end
        self._limits = state.limits
        self._guard = state.guard
        self._read_locks = state.read_locks
        self._columns = columns

    def check(self, batch: pb.MutationBatch) -> tuple[list[CheckedMutation], int]:
        """Returns the checked mutations, and about how many bytes they hold. Raises
        `InvalidArgument` and `UnheardTimestamp`."""
        start, end, limits = self._start, self._end, self._limits
        columns = self._columns
        admitted_to = self._guard.admitted_to
        checked: list[CheckedMutation] = []
        weight = 0
        for index, mutation in enumerate(batch.mutations):
            row = mutation.row
            column = mutation.column
            if row < start or (end and row >= end):
                _refuse(index, "row", "not in this tablet")
            if len(row) > limits.row_bytes_max:
                self._check_long_row(index, mutation)
            if len(column) > limits.column_bytes_max:
                _refuse(index, "column", too_long(column, limits.column_bytes_max))
            not_below = mutation.not_below
            if not_below > admitted_to:
                self._guard.admit(not_below, "mutations[%d].not_below", index)
            conditions = self._conditions(index, mutation.conditions)
            changes: list[CheckedChange] = [
                (change.kind, change.space, change.timestamp, change.value, change.qualifier)
                for change in mutation.changes
            ]
            weight += len(row) + MUTATION_BYTES
            cell = component(row) + columns[column]
            if changes:
                weight += self._check_changes(index, changes)
                if READ_LOCK_MARK in cell:
                    self._read_locks.note(cell)
            checked.append((row, column, cell, not_below, conditions, changes))
        return checked, weight

    def _check_long_row(self, index: int, mutation: pb.Mutation) -> None:
        """Refuses what would store something new there. What became of a transaction can always be
        asked and settled: if such a row was to be its primary, other cells may be locked. And while
        there is a lock, from a time when longer rows were allowed, it can be kept alive, pushed and
        committed."""
        is_new = any(
            change.kind == PUT and change.space in (LOCK, DATA, WRITE)
            for change in mutation.changes
        )
        needs_lock = any(
            one.space == LOCK and one.expectation in (PRESENT, EQUALS, AT_MOST)
            for one in mutation.conditions
        )
        if (is_new and not needs_lock) or len(mutation.row) > ROW_BYTES_MAX:
            _refuse(index, "row", too_long(mutation.row, self._limits.row_bytes_max))

    def _conditions(self, index: int, asked: Sequence[pb.Condition]) -> list[CheckedCondition]:
        """Checks and flattens conditions in one pass, since they are most of what comes in."""
        if len(asked) > self._limits.conditions_max:
            _refuse(index, "conditions", _too_many(asked, self._limits.conditions_max))
        conditions: list[CheckedCondition] = []
        for condition in asked:
            space = condition.space
            expectation = condition.expectation
            from_ = condition.from_timestamp
            until = condition.until_timestamp
            qualifier = condition.qualifier
            if not 1 <= space <= NOTIFY:
                _refuse(index, _field(conditions, "space"), f"{space} is not a space")
            if not 1 <= expectation <= AT_MOST:
                reason = f"{expectation} is not an expectation"
                _refuse(index, _field(conditions, "expectation"), reason)
            if until and until <= from_:
                reason = "not above from_timestamp: inverted"
                _refuse(index, _field(conditions, "until_timestamp"), reason)
            if space == LOCK and (from_ or until):
                _refuse(index, _field(conditions, "from_timestamp"), "a lock has no timestamp")
            if qualifier and space != NOTIFY:
                _refuse(index, _field(conditions, "qualifier"), "only notifications have one")
            conditions.append(
                (
                    space,
                    expectation,
                    from_,
                    until,
                    condition.prefix,
                    condition.required,
                    qualifier,
                )
            )
        return conditions

    def _check_changes(self, index: int, changes: list[CheckedChange]) -> int:
        """Checks changes, and returns their weight."""
        limits, admitted_to = self._limits, self._guard.admitted_to
        weight = 0
        for at, (kind, space, timestamp, value, qualifier) in enumerate(changes):
            if len(value) > limits.value_bytes_max:
                _refuse(index, f"changes[{at}].value", too_long(value, limits.value_bytes_max))
            if not 1 <= kind <= DELETE_IF_PREFIX:
                _refuse(index, f"changes[{at}].kind", f"{kind} is not a kind of change")
            if space == LOCK:
                if timestamp:
                    _refuse(index, f"changes[{at}].timestamp", "a lock has no timestamp")
            elif not timestamp:
                _refuse(index, f"changes[{at}].timestamp", "missing")
            elif timestamp > admitted_to:
                self._guard.admit(timestamp, "mutations[%d].changes[%d].timestamp", index, at)
            if space == NOTIFY:
                if not 0 < len(qualifier) <= limits.qualifier_bytes_max:
                    _refuse(
                        index,
                        f"changes[{at}].qualifier",
                        f"expected 1 to {limits.qualifier_bytes_max} bytes, the observer's name",
                    )
            elif qualifier:
                _refuse(index, f"changes[{at}].qualifier", "only notifications have one")
            elif not 1 <= space <= NOTIFY:
                _refuse(index, f"changes[{at}].space", f"{space} is not a space")
            if kind == PUT:
                fault = record_fault(space, timestamp, value)
                if fault is not None:
                    _refuse(index, f"changes[{at}].{fault[0]}", fault[1])
                if space == LOCK:
                    start, min_commit, _, _ = LOCK_HEADER.unpack_from(value)
                    if start > admitted_to or min_commit > admitted_to:
                        # Such a lock would never expire, or could never be committed.
                        field = "mutations[%d].changes[%d].value"
                        self._guard.admit(max(start, min_commit), field, index, at)
            weight += len(value)
        if len(changes) > 1:
            if len(changes) > limits.changes_max:
                _refuse(index, "changes", _too_many(changes, limits.changes_max))
            if len({(space, time, name) for _, space, time, _, name in changes}) != len(changes):
                _refuse(index, "changes", "two changes of one cell")
        return weight


def marked_below(bound: int, changes: Sequence[CheckedChange]) -> int:
    """The start timestamp below `bound` that these changes mark as rolled back; 0 if none."""
    for kind, space, timestamp, _, _ in changes:
        if space == ROLLBACK and kind == PUT and timestamp < bound:
            return timestamp
    return 0


def record_fault(space: int, timestamp: int, value: bytes) -> tuple[str, str] | None:
    """The fault of a record that is to be put, as field and reason; None if it has none.

    Everything that is later read at fixed offsets has to exist: a tablet never stores a record that
    it cannot read, because one such lock would break every scan over it."""
    if space == LOCK:
        if len(value) < LOCK_HEADER_BYTES or value[LOCK_KIND_OFFSET] not in KINDS:
            return "value", "not a lock record"
    elif space == WRITE:
        if len(value) < WRITE_HEADER_BYTES or value[WRITE_KIND_OFFSET] not in KINDS:
            return "value", "not a write record"
        if int.from_bytes(value[:START_TIMESTAMP_BYTES], "big") >= timestamp:
            return "timestamp", "the commit is not above its transaction's start"
    return None


def _refuse(index: int, field: str, reason: str) -> NoReturn:
    raise InvalidArgument(f"mutations[{index}].{field}", reason)


def _field(before: list[CheckedCondition], name: str) -> str:
    """The name of a field of the condition that follows these."""
    return f"conditions[{len(before)}].{name}"


def _too_many(found: Sized, most: int) -> str:
    return f"{len(found)} entries, at most {most} allowed"


# Checks cells that come as parallel lists: those of one-round transactions, and of steps.


class ListedCells:
    """The checks of one tablet. Each of them raises `InvalidArgument`."""

    def __init__(self, state: TabletState, columns: ColumnEncoder) -> None:
        self._start = state.identity.start
        self._end = state.identity.end
        self._limits = state.limits
        self._columns = columns

    def cell(
        self, prefix: str, at: int, row: bytes, column: bytes, *, is_new: bool = True
    ) -> bytes:
        """Returns `cell_prefix` of a row and a column. A long row is only refused where it
        `is_new`: a transaction that has such a primary can still be settled."""
        limits = self._limits
        if row < self._start or (self._end and row >= self._end):
            refuse_listed(f"{prefix}rows", at, "not in this tablet")
        if len(row) > limits.row_bytes_max and (is_new or len(row) > ROW_BYTES_MAX):
            refuse_listed(f"{prefix}rows", at, too_long(row, limits.row_bytes_max))
        if len(column) > limits.column_bytes_max:
            refuse_listed(f"{prefix}columns", at, too_long(column, limits.column_bytes_max))
        return component(row) + self._columns[column]

    def observed(
        self, field: str, columns: Iterable[pb.ObservedColumn]
    ) -> dict[bytes, tuple[bytes, ...]]:
        """The observers by column."""
        found = {one.column: tuple(one.observers) for one in columns}
        for names in found.values():
            self.check_observers(field, names)
        return found

    def check_observers(self, field: str, names: Sequence[bytes]) -> None:
        limits = self._limits
        if len(names) >= limits.changes_max:
            raise InvalidArgument(field, f"{len(names)}, fewer than {limits.changes_max} allowed")
        if len(set(names)) != len(names):
            raise InvalidArgument(field, "an observer is named twice")
        for name in names:
            if not 0 < len(name) <= limits.qualifier_bytes_max:
                raise InvalidArgument(
                    field, f"expected 1 to {limits.qualifier_bytes_max} bytes, the observer's name"
                )


def refuse_listed(field: str, at: int, reason: str) -> NoReturn:
    raise InvalidArgument(f"{field}[{at}]", reason)


# Steps that come as parallel lists: each becomes the mutation that its kind describes.
#
# Nearly all mutations are such steps. A generic one has 38 fields to read, a step has seven, in
# lists that are read at once. What comes out is the same, so everything behind this judges and
# writes steps like any other mutation.

PREWRITE: int = pb.StepList.KIND_PREWRITE
COMMIT_PRIMARY: int = pb.StepList.KIND_COMMIT_PRIMARY
COMMIT_SECONDARY: int = pb.StepList.KIND_COMMIT_SECONDARY
WRITE_STEP: int = pb.StepList.KIND_WRITE

_NEW = (PREWRITE, WRITE_STEP)
"""Kinds of steps that store something where no lock was."""
_LIST_OF = {"value": "steps.values", "timestamp": "steps.commit_timestamps"}
"""The list that has the field of a change."""


class StepChecker:
    """Checks the steps of one tablet."""

    def __init__(self, state: TabletState, columns: ColumnEncoder) -> None:
        self._limits = state.limits
        self._guard = state.guard
        self._read_locks = state.read_locks
        self._cells = ListedCells(state, columns)

    def check(self, steps: pb.StepList) -> tuple[list[CheckedMutation], int]:
        """Returns the mutations, and about how many bytes they hold. Raises `InvalidArgument` and
        `UnheardTimestamp`."""
        lists = (
            steps.kinds,
            steps.rows,
            steps.columns,
            steps.values,
            steps.start_timestamps,
            steps.commit_timestamps,
            steps.min_commit_timestamps,
        )
        if len({len(one) for one in lists}) != 1:
            raise InvalidArgument("steps", "its lists differ in number")
        observed = self._cells.observed("steps.observed", steps.observed)
        found: list[CheckedMutation] = []
        weight = 0
        # The conditions of the prewrite before, and the header of its lock: within a transaction,
        # both are the same for each of its cells.
        last, last_header = PrewriteConditions(-1, ()), b""
        for at, step in enumerate(zip(*lists, strict=True)):
            kind, row, column, value, start, commit_ts, min_commit = step
            cell = self._cells.cell("steps.", at, row, column, is_new=kind in _NEW)
            # Most locks of a transaction begin as the one before, which was checked.
            if (
                kind != PREWRITE
                or commit_ts
                or not value.startswith(last_header)
                or start != last.start
            ):
                self._check(at, kind, value, start, commit_ts)
            elif len(value) > self._limits.value_bytes_max:
                self._refuse_length(at, value)
            changes: list[CheckedChange]
            conditions: list[CheckedCondition]
            if kind == PREWRITE:
                if start != last.start:
                    last = prewrite_conditions(start)
                last_header = value[:LOCK_HEADER_BYTES]
                conditions = last
                changes = [(PUT, LOCK, 0, value, b"")]
                if READ_LOCK_MARK in cell:
                    self._read_locks.note(cell)
            elif kind == WRITE_STEP:
                conditions = [(SPACE_WRITE, ABSENT, commit_ts, 0, b"", b"", b"")]
                changes = [(PUT, WRITE, commit_ts, value, b"")]
            else:
                conditions = commit_conditions(kind, start, min_commit)
                changes = [(DELETE, LOCK, 0, b"", b""), (PUT, WRITE, commit_ts, value, b"")]
                if column in observed and value[WRITE_KIND_OFFSET] != KIND_LOCK_ONLY:
                    changes += [(PUT, NOTIFY, commit_ts, b"", name) for name in observed[column]]
            found.append((row, column, cell, start, conditions, changes))
            weight += len(row) + len(value) + MUTATION_BYTES
        return found, weight

    def _refuse_length(self, at: int, value: bytes) -> NoReturn:
        refuse_listed("steps.values", at, too_long(value, self._limits.value_bytes_max))

    def _check(self, at: int, kind: int, value: bytes, start: int, commit_ts: int) -> None:
        admitted_to, limits = self._guard.admitted_to, self._limits
        if not PREWRITE <= kind <= WRITE_STEP:
            refuse_listed("steps.kinds", at, f"{kind} is not a kind of step")
        if len(value) > limits.value_bytes_max:
            self._refuse_length(at, value)
        if (start == 0) is not (kind == WRITE_STEP):
            refuse_listed("steps.start_timestamps", at, "unexpected" if start else "missing")
        if (commit_ts == 0) is not (kind == PREWRITE):
            refuse_listed("steps.commit_timestamps", at, "unexpected" if commit_ts else "missing")
        fault = record_fault(LOCK if kind == PREWRITE else WRITE, commit_ts, value)
        if fault is not None:
            refuse_listed(_LIST_OF[fault[0]], at, fault[1])
        if start and not value.startswith(timestamp_bytes(start)):
            refuse_listed("steps.values", at, "of another transaction than start_timestamps")
        # Beyond what was handed out, a lock could never be committed.
        min_commit = LOCK_HEADER.unpack_from(value)[1] if kind == PREWRITE else 0
        if start > admitted_to or commit_ts > admitted_to or min_commit > admitted_to:
            self._guard.admit(start, "steps.start_timestamps[%d]", at)
            self._guard.admit(commit_ts, "steps.commit_timestamps[%d]", at)
            self._guard.admit(min_commit, "steps.values[%d]", at)


def prewrite_conditions(start: int) -> PrewriteConditions:
    """The conditions of a prewrite, in its order (`percolator/protocol/steps.py`, which tablets do
    not import). The client reads by that list which condition failed, so a test compares them."""
    return PrewriteConditions(
        start,
        (
            (SPACE_WRITE, ABSENT, start, 0, timestamp_bytes(start), b"", b""),
            (SPACE_ROLLBACK, ABSENT, start, start + 1, b"", b"", b""),
            (SPACE_LOCK, ABSENT, 0, 0, b"", b"", b""),
            (SPACE_WRITE, ABSENT, start, 0, b"", b"", b""),
        ),
    )


def commit_conditions(kind: int, start: int, min_commit: int) -> list[CheckedCondition]:
    """Conditions of the commit point, or of a commit of another cell."""
    own = timestamp_bytes(start)
    own_commit: CheckedCondition = (SPACE_WRITE, ABSENT, start, 0, own, b"", b"")
    if kind == COMMIT_SECONDARY:
        return [own_commit, (SPACE_LOCK, PRESENT, 0, 0, own, b"", b"")]
    seen = own + timestamp_bytes(min_commit)
    return [
        own_commit,
        (SPACE_ROLLBACK, ABSENT, start, start + 1, b"", b"", b""),
        (SPACE_LOCK, PRESENT, 0, 0, seen, b"", b""),
    ]


def answer_of(results: Sequence[pb.MutationResult]) -> pb.MutationBatchResult:
    """The answer to a batch, which names only what was not applied."""
    answer = pb.MutationBatchResult(mutations=len(results))
    for at, result in enumerate(results):
        if result is not APPLIED:
            answer.unapplied.add(mutation=at, result=result)
    return answer


# Transactions to be committed in one round, as they come in: checked, and on their way.
#
# As with mutations, everything is checked before anything is queued. What a transaction will write
# is complete but for its commit timestamp, which is known only once its cells are held.

CellWrite = tuple[bytes, bytes, bytes, int, bytes, tuple[bytes, ...]]
"""Row, column, `cell_prefix` of the two, kind, value, and the observers to be notified."""


class TransactionWork:
    """The transactions of one request, and its answer: it leaves when all of them have ended."""

    def __init__(
        self, transactions: int, weight: int, schema_version: int, deadline_seconds: float
    ) -> None:
        self.weight = weight
        self.schema_version = schema_version
        self.deadline_seconds = deadline_seconds
        self.commit_timestamps = [0] * transactions
        self.uncommitted: list[tuple[int, pb.MutationResult]] = []
        self.followed: list[int] = []
        self.left = transactions
        self.timer: asyncio.TimerHandle | None = None
        """At the deadline, ends those of its transactions that wait for cells."""
        self.refusal_bytes = 0
        """The size of the cells that made conditions fail."""
        self.done: asyncio.Future[pb.TransactionBatchResult] = (
            asyncio.get_running_loop().create_future()
        )

    def ended(
        self, index: int, commit_ts: int, result: pb.MutationResult | None, *, is_followed: bool
    ) -> bool:
        """Notes how a transaction ended. Returns True, and answers, when it was the last one."""
        if result is None:
            self.commit_timestamps[index] = commit_ts
            if is_followed:
                self.followed.append(index)
        else:
            self.uncommitted.append((index, result))
        self.left -= 1
        if self.left:
            return False
        if self.timer is not None:
            self.timer.cancel()
        if not self.done.done():
            answer = pb.TransactionBatchResult(
                commit_timestamps=self.commit_timestamps, followed=sorted(self.followed)
            )
            for at, why in self.uncommitted:
                answer.uncommitted.add(transaction=at, result=why)
            self.done.set_result(answer)
        return True


class OneRoundTransaction:
    """A transaction that commits in one round, from its arrival to its end."""

    __slots__ = (
        "cells",
        "commit_ts",
        "index",
        "is_followed",
        "read_locked",
        "refusal",
        "start",
        "too_late_to_follow",
        "weak",
        "work",
        "writes",
    )

    def __init__(
        self,
        work: TransactionWork,
        index: int,
        start: int,
        writes: Sequence[CellWrite],
        weak: Sequence[CellWrite],
    ) -> None:
        """`weak` are cells of which observers are notified although nothing is written to them."""
        self.work = work
        self.index = index
        self.start = start
        self.writes = writes
        self.weak = weak
        self.cells = [write[2] for write in writes]
        self.read_locked: Sequence[bytes] = ()
        """The cells of which it sets read locks."""
        self.commit_ts = 0
        self.is_followed = False
        """The timestamp after its commit is set aside for another transaction of its client."""
        self.too_late_to_follow = 0
        """If not 0, another timestamp is set aside for one that waits for its turn (turns.py)."""
        self.refusal: pb.MutationResult | None = None
        """Why it is not committed, if it was judged and a condition failed."""

    @property
    def set_aside(self) -> int:
        """How many timestamps after its commit are set aside."""
        return self.is_followed + bool(self.too_late_to_follow)

    def mutations(self) -> list[CheckedMutation]:
        """Its mutations, once the commit timestamp is known."""
        start, commit_ts = self.start, self.commit_ts
        found: list[CheckedMutation] = []
        for row, column, cell, kind, value, observers in self.writes:
            header = WRITE_HEADER.pack(start, kind)
            changes: list[CheckedChange]
            if kind == KIND_PUT:
                changes = [(PUT, WRITE, commit_ts, header + value, b"")]
            else:
                changes = [(PUT, WRITE, commit_ts, header, b"")]
                if kind == KIND_PUT_IN_DATA:
                    changes.append((PUT, DATA, start, value, b""))
            if observers:
                changes += [(PUT, NOTIFY, commit_ts, b"", observer) for observer in observers]
            found.append((row, column, cell, start, [], changes))
        for row, column, cell, _, _, observers in self.weak:
            notified: list[CheckedChange] = [
                (PUT, NOTIFY, commit_ts, b"", observer) for observer in observers
            ]
            found.append((row, column, cell, start, [], notified))
        return found

    def end(self, result: pb.MutationResult | None) -> bool:
        """Ends the transaction: committed, or with this result. True if its request is answered."""
        return self.work.ended(self.index, self.commit_ts, result, is_followed=self.is_followed)


class TransactionChecker:
    """Checks the transactions of one tablet."""

    def __init__(self, state: TabletState, columns: ColumnEncoder) -> None:
        self._limits = state.limits
        self._guard = state.guard
        self._read_locks = state.read_locks
        self._cells = ListedCells(state, columns)

    def check(
        self, batch: pb.TransactionBatch, deadline_seconds: float
    ) -> list[OneRoundTransaction]:
        """Raises `InvalidArgument` and `UnheardTimestamp`."""
        starts, counts = list(batch.start_timestamps), list(batch.cells)
        if not starts:
            raise InvalidArgument("start_timestamps", "none")
        if len(starts) != len(counts):
            raise InvalidArgument("cells", f"{len(counts)} entries for {len(starts)} transactions")
        for index, start in enumerate(starts):
            if not start:
                refuse_listed("start_timestamps", index, "missing")
            self._guard.admit(start, "start_timestamps[%d]", index)
        observed = self._cells.observed("observed", batch.observed)
        writes, weight = self._writes(batch, observed)
        followed = _followed(batch, len(starts))
        weak, weak_weight = self._weak(batch, len(starts))
        weight += weak_weight
        work = TransactionWork(len(starts), weight, batch.target.schema_version, deadline_seconds)
        found: list[OneRoundTransaction] = []
        first = 0
        for index, (start, stop) in enumerate(zip(starts, accumulate(counts), strict=True)):
            part = writes[first:stop]
            if not counts[index] or stop > len(writes):
                refuse_listed("cells", index, f"{counts[index]}, {len(part)} of them in the lists")
            transaction = OneRoundTransaction(work, index, start, part, weak.get(index, ()))
            if len(part) > 1 and len(set(transaction.cells)) != len(part):
                refuse_listed("cells", index, "two writes of one cell")
            if self._read_locks.used:
                transaction.read_locked = cells_locked_by(transaction.cells)
                if not set(transaction.cells).isdisjoint(transaction.read_locked):
                    refuse_listed("cells", index, "a write of a cell, and a read lock of it")
            transaction.is_followed = index in followed
            found.append(transaction)
            first = stop
        if first != len(writes):
            raise InvalidArgument("cells", f"{first} in total, {len(writes)} in the lists")
        return found

    def _writes(
        self, batch: pb.TransactionBatch, observed: Mapping[bytes, tuple[bytes, ...]]
    ) -> tuple[list[CellWrite], int]:
        rows, columns, kinds, values = batch.rows, batch.columns, batch.kinds, batch.values
        if not len(rows) == len(columns) == len(kinds) == len(values):
            raise InvalidArgument("rows", "rows, columns, kinds and values differ in number")
        value_bytes_max = self._limits.value_bytes_max
        found: list[CellWrite] = []
        weight = 0
        cells = zip(rows, columns, kinds, values, strict=True)
        for at, (row, column, kind, value) in enumerate(cells):
            cell = self._cells.cell("", at, row, column)
            if READ_LOCK_MARK in cell:
                self._read_locks.note(cell)
            if kind not in KINDS:
                refuse_listed("kinds", at, f"{kind} is not a kind of record")
            if len(value) > value_bytes_max:
                refuse_listed("values", at, too_long(value, value_bytes_max))
            if value and kind not in (KIND_PUT, KIND_PUT_IN_DATA):
                refuse_listed("values", at, "only a put has a value")
            observers = observed.get(column, ()) if kind != KIND_LOCK_ONLY else ()
            found.append((row, column, cell, kind, value, observers))
            weight += len(row) + len(value) + MUTATION_BYTES
        return found, weight

    def _weak(
        self, batch: pb.TransactionBatch, count: int
    ) -> tuple[dict[int, list[CellWrite]], int]:
        found: dict[int, list[CellWrite]] = {}
        weight = 0
        for at, one in enumerate(batch.notifications):
            if one.transaction >= count:
                refuse_listed("notifications", at, f"there is no transaction {one.transaction}")
            cell = self._cells.cell(f"notifications[{at}].", 0, one.row, one.column)
            names = tuple(one.observers)
            self._cells.check_observers(f"notifications[{at}].observers", names)
            write = (one.row, one.column, cell, KIND_LOCK_ONLY, b"", names)
            found.setdefault(one.transaction, []).append(write)
            weight += len(one.row) + sum(map(len, names)) + MUTATION_BYTES
        return found, weight


def _followed(batch: pb.TransactionBatch, count: int) -> frozenset[int]:
    """The transactions after which another one of their client begins."""
    followed = batch.followed
    if not followed:
        return frozenset()
    for at, index in enumerate(followed):
        if index >= count:
            refuse_listed("followed", at, f"there is no transaction {index}")
    return frozenset(followed)
