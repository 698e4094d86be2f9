"""Steps that come as parallel lists: each becomes the mutation that its kind describes.

Nearly all mutations are such steps. A generic one has 38 fields to read, a step has seven, in lists
that are read at once. What comes out is the same, so everything behind this judges and writes steps
like any other mutation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from percolator.errors import InvalidArgument
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    LOCK_HEADER,
    LOCK_HEADER_BYTES,
    WRITE_KIND_OFFSET,
    timestamp_bytes,
)
from percolator.tablet.keys import LOCK, NOTIFY, READ_LOCK_MARK, WRITE, ColumnEncoder
from percolator.tablet.limits import too_long
from percolator.tablet.memory.state import TabletState
from percolator.tablet.writing.listed_cells import ListedCells, refuse_listed
from percolator.tablet.writing.mutations import (
    ABSENT,
    DELETE,
    MUTATION_BYTES,
    PRESENT,
    PUT,
    CheckedChange,
    CheckedCondition,
    CheckedMutation,
    PrewriteConditions,
    record_fault,
)
from percolator.tablet.writing.results import APPLIED
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_ROLLBACK, SPACE_WRITE

PREWRITE: int = pb.StepList.KIND_PREWRITE
COMMIT_PRIMARY: int = pb.StepList.KIND_COMMIT_PRIMARY
COMMIT_SECONDARY: int = pb.StepList.KIND_COMMIT_SECONDARY
WRITE_STEP: int = pb.StepList.KIND_WRITE

_NEW = (PREWRITE, WRITE_STEP)
"""What is stored where no lock was."""
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
        locked, head = PrewriteConditions(-1, ()), b""
        for at, step in enumerate(zip(*lists, strict=True)):
            kind, row, column, value, start, commit, min_commit = step
            cell = self._cells.cell("steps.", at, row, column, is_new=kind in _NEW)
            # Most locks of a transaction begin as the one before, which was checked.
            if kind != PREWRITE or commit or not value.startswith(head) or start != locked.start:
                self._check(at, kind, value, start, commit)
            elif len(value) > self._limits.value_bytes_max:
                self._refuse_length(at, value)
            changes: list[CheckedChange]
            conditions: list[CheckedCondition]
            if kind == PREWRITE:
                if start != locked.start:
                    locked = prewrite_conditions(start)
                head = value[:LOCK_HEADER_BYTES]
                conditions = locked
                changes = [(PUT, LOCK, 0, value, b"")]
                if READ_LOCK_MARK in cell:
                    self._read_locks.note(cell)
            elif kind == WRITE_STEP:
                conditions = [(SPACE_WRITE, ABSENT, commit, 0, b"", b"", b"")]
                changes = [(PUT, WRITE, commit, value, b"")]
            else:
                conditions = commit_conditions(kind, start, min_commit)
                changes = [(DELETE, LOCK, 0, b"", b""), (PUT, WRITE, commit, value, b"")]
                if column in observed and value[WRITE_KIND_OFFSET] != KIND_LOCK_ONLY:
                    changes += [(PUT, NOTIFY, commit, b"", name) for name in observed[column]]
            found.append((row, column, cell, start, conditions, changes))
            weight += len(row) + len(value) + MUTATION_BYTES
        return found, weight

    def _refuse_length(self, at: int, value: bytes) -> NoReturn:
        refuse_listed("steps.values", at, too_long(value, self._limits.value_bytes_max))

    def _check(self, at: int, kind: int, value: bytes, start: int, commit: int) -> None:
        admitted_to, limits = self._guard.admitted_to, self._limits
        if not PREWRITE <= kind <= WRITE_STEP:
            refuse_listed("steps.kinds", at, f"{kind} is not a kind of step")
        if len(value) > limits.value_bytes_max:
            self._refuse_length(at, value)
        if (start == 0) is not (kind == WRITE_STEP):
            refuse_listed("steps.start_timestamps", at, "unexpected" if start else "missing")
        if (commit == 0) is not (kind == PREWRITE):
            refuse_listed("steps.commit_timestamps", at, "unexpected" if commit else "missing")
        fault = record_fault(LOCK if kind == PREWRITE else WRITE, commit, value)
        if fault is not None:
            refuse_listed(_LIST_OF[fault[0]], at, fault[1])
        if start and not value.startswith(timestamp_bytes(start)):
            refuse_listed("steps.values", at, "of another transaction than start_timestamps")
        # Beyond what was handed out, a lock could never be committed.
        min_commit = LOCK_HEADER.unpack_from(value)[1] if kind == PREWRITE else 0
        if start > admitted_to or commit > admitted_to or min_commit > admitted_to:
            self._guard.admit(start, "steps.start_timestamps[%d]", at)
            self._guard.admit(commit, "steps.commit_timestamps[%d]", at)
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
    """Those of the commit point, or of a commit of another cell."""
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
