"""Checks mutations as they come in, and flattens them for the judge.

Everything is checked before anything is queued: a request with one malformed mutation changes
nothing at all. The result is tuples of plain values, because the judge looks at them several times,
and reading a field of a message costs as much as judging a condition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import NoReturn

from percolator.errors import InvalidArgument
from percolator.formats.records import (
    KINDS,
    LOCK_HEADER,
    LOCK_HEADER_BYTES,
    LOCK_KIND_OFFSET,
    START_TIMESTAMP_BYTES,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
)
from percolator.schema import ROW_BYTES_MAX
from percolator.tablet import keys
from percolator.tablet.keys import DATA, LOCK, NOTIFY, ROLLBACK, WRITE
from percolator.tablet.limits import too_long
from percolator.tablet.memory.state import TabletState
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb

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
"""A mutation, checked: row, column, `keys.cell_prefix` of the two, not_below, conditions, changes.

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

    def __init__(self, state: TabletState, columns: keys.ColumnEncoder) -> None:
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
        columns, component = self._columns, keys.component
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
                if keys.READ_LOCK_MARK in cell:
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
    """What is wrong with a record that is to be put, as field and reason; None if nothing is.

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
