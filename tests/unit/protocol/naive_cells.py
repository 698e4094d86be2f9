"""The meaning of conditions, changes and reads, written down as plainly as possible.

It is slow, forgets nothing, and knows no tablets: what the protocol's tests stand on, and what the
real tablet could be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import CellAddress, SchemaChanged, SnapshotTooOld
from percolator.protocol.records import LockRecord, RecordKind, WriteRecord
from percolator.v1 import cells_pb2
from percolator.v1.tabletserver_pb2 import Change, Condition, Mutation, RowRead
from percolator.wire.questions import (
    APPLIED,
    Answer,
    FoundCell,
    RangePage,
    RangeQuestion,
    Refused,
    RowAnswer,
    RowQuestion,
    Step,
)

LOCK, WRITE, DATA = cells_pb2.SPACE_LOCK, cells_pb2.SPACE_WRITE, cells_pb2.SPACE_DATA
ROLLBACK, NOTIFY = cells_pb2.SPACE_ROLLBACK, cells_pb2.SPACE_NOTIFY

Versions = dict[tuple[int, bytes, int], bytes]
"""(space, qualifier, timestamp) to value."""


class NaiveCells:
    """All cells of all tables, in memory. Every call is atomic."""

    def __init__(self) -> None:
        self.cells: dict[CellAddress, Versions] = {}
        self.schema_versions: dict[int, int] = {}
        self.safe_point = 0
        self.collected = 0
        """Below it, no transaction is rolled back any more."""
        self.new_tables: set[int] = set()
        """Made since then: they know of no safe point yet."""
        self.page_rows = 3

    # ------------------------------------------------------------------ mutations

    def apply(self, step: Step) -> Answer:
        mutation = step.mutation
        if step.schema_version:
            current = self.schema_versions.get(step.table_id, step.schema_version)
            if current != step.schema_version:
                return SchemaChanged("newer", table_id=step.table_id, schema_version=current)
        if step.table_id not in self.new_tables:
            if mutation.not_below and mutation.not_below < self.safe_point:
                return self._too_old(mutation.not_below)
            for change in mutation.changes:
                if (change.kind, change.space) == (Change.KIND_PUT, ROLLBACK) and (
                    change.timestamp < self.collected
                ):
                    return self._too_old(change.timestamp)
        address = CellAddress(step.table_id, mutation.row, mutation.column)
        versions = self.cells.setdefault(address, {})
        for index, condition in enumerate(mutation.conditions):
            holds, culprit = _judge(condition, versions)
            if not holds:
                return Refused(index, culprit and _cell(mutation, culprit, versions))
        for change in mutation.changes:
            key = (change.space, change.qualifier, change.timestamp)
            if change.kind == Change.KIND_PUT:
                versions[key] = change.value
            elif change.kind == Change.KIND_DELETE or versions.get(key, b"").startswith(
                change.value
            ):
                versions.pop(key, None)
        return APPLIED

    def _too_old(self, timestamp: int) -> SnapshotTooOld:
        return SnapshotTooOld("too old", timestamp=timestamp, safe_point=self.safe_point)

    # ------------------------------------------------------------------ reads

    def look(self, question: RowQuestion) -> RowAnswer:
        read = question.read
        if read.timestamp < self.safe_point:
            raise self._too_old(read.timestamp)
        answer = RowAnswer()
        for address, versions in self.cells.items():
            if (address.table_id, address.row) != (question.table_id, read.row):
                continue
            if not read.all_columns and address.column not in read.columns:
                continue
            lock = self.lock_of(address)
            if lock and _blocks(lock, read.timestamp, read.passing):
                answer.locks.append(
                    cells_pb2.Cell(
                        space=LOCK,
                        row=read.row,
                        column=address.column,
                        value=versions[(LOCK, b"", 0)],
                    )
                )
                continue
            found = self.at(address, read.timestamp)
            if found and (found.value is not None or read.report_deletes):
                answer.found[address.column] = found
        return answer

    def lock_of(self, address: CellAddress) -> LockRecord | None:
        value = self.cells.get(address, {}).get((LOCK, b"", 0))
        return None if value is None else LockRecord.decode(value)

    def commits(self, address: CellAddress) -> list[tuple[int, WriteRecord]]:
        """(commit timestamp, record), oldest first."""
        return sorted(
            (
                (timestamp, WriteRecord.decode(value))
                for (space, _, timestamp), value in self.cells.get(address, {}).items()
                if space == WRITE
            ),
            key=lambda commit: commit[0],
        )

    def at(self, address: CellAddress, timestamp: int) -> FoundCell | None:
        """What a snapshot shows; a value of None for a deletion."""
        found = None
        for commit, record in self.commits(address):
            if commit > timestamp or record.kind == RecordKind.LOCK_ONLY:
                continue
            if record.kind == RecordKind.DELETE:
                found = FoundCell(commit, None)
            elif record.kind == RecordKind.PUT:
                found = FoundCell(commit, record.value)
            else:
                key = (DATA, b"", record.start_timestamp)
                data = self.cells[address].get(key, b"(the data is gone)")
                found = FoundCell(commit, data)
        return found

    def page(self, question: RangeQuestion) -> RangePage:
        """The first page of the range."""
        rows = sorted(
            {
                address.row
                for address in self.cells
                if address.table_id == question.table_id
                and question.start <= address.row
                and (not question.end or address.row < question.end)
            },
            reverse=question.reverse,
        )
        start, end = question.start, question.end
        if len(rows) > self.page_rows:
            rows = rows[: self.page_rows]
            start, end = (rows[-1], end) if question.reverse else (start, rows[-1] + b"\x00")
        page = RangePage({}, [], start, end)
        for row in rows:
            read = RowQuestion(question.table_id, _row_read(question, row))
            answer = self.look(read)
            page.locks.extend(answer.locks)
            if answer.found:
                page.rows[row] = answer.found
        return page


def pages(naive: NaiveCells, question: RangeQuestion) -> list[RangePage]:
    """All pages of a range, one after the other."""
    found = []
    while True:
        page = naive.page(question)
        found.append(page)
        if question.reverse:
            if page.start == question.start:
                return found
            question = question._replace(end=page.start)
        else:
            if page.end == question.end:
                return found
            question = question._replace(start=page.end)


def _row_read(question: RangeQuestion, row: bytes) -> RowRead:
    return RowRead(
        row=row,
        columns=question.columns or (),
        all_columns=question.columns is None,
        timestamp=question.timestamp,
        report_deletes=question.report_deletes,
    )


def _judge(condition: Condition, versions: Versions) -> tuple[bool, tuple[int, bytes, int] | None]:
    """Whether it holds, and the cell that says no."""
    in_range = sorted(
        (
            key
            for key in versions
            if key[0] == condition.space
            and key[1] == condition.qualifier
            and condition.from_timestamp <= key[2]
            and (not condition.until_timestamp or key[2] < condition.until_timestamp)
        ),
        key=lambda key: key[2],
    )
    selected = [key for key in in_range if versions[key].startswith(condition.prefix)]
    others = [key for key in in_range if key not in selected]
    match condition.expectation:
        case Condition.EXPECTATION_ABSENT:
            return not selected, selected[0] if selected else None
        case Condition.EXPECTATION_PRESENT:
            return bool(selected), others[-1] if others else None
        case Condition.EXPECTATION_BEGINS_IF_PRESENT:
            wrong = [key for key in selected if not versions[key].startswith(condition.required)]
            return not wrong, wrong[-1] if wrong else None
        case _:
            raise ValueError(f"no such expectation: {condition}")


def _cell(mutation: Mutation, key: tuple[int, bytes, int], versions: Versions) -> cells_pb2.Cell:
    space, qualifier, timestamp = key
    return cells_pb2.Cell(
        space=space,  # type: ignore[arg-type]
        row=mutation.row,
        column=mutation.column,
        qualifier=qualifier,
        timestamp=timestamp,
        value=versions[key],
    )


def _blocks(lock: LockRecord, timestamp: int, passing: Sequence[int]) -> bool:
    return (
        lock.kind != RecordKind.LOCK_ONLY
        and lock.start_timestamp <= timestamp
        and not lock.min_commit_timestamp > timestamp
        and lock.start_timestamp not in passing
    )
