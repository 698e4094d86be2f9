"""The meaning of conditions, changes and reads, written down as plainly as possible.

This store is slow, forgets nothing, and knows no tablets. The tests of the protocol use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from percolator.errors import CellAddress, SchemaChanged, SnapshotTooOld
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    KIND_PUT,
    KIND_PUT_IN_DATA,
    WRITE_HEADER,
    LockRecord,
    RecordKind,
    WriteRecord,
)
from percolator.protocol import steps
from percolator.routing.cells import (
    APPLIED,
    Answer,
    CellMutation,
    CommitAnswer,
    FoundCell,
    OneRoundCommit,
    RangePage,
    RangeRequest,
    Refused,
    RowRequest,
    RowResult,
)
from percolator.v1 import cells_pb2
from percolator.v1.tabletserver_pb2 import Change, Condition, Mutation, RowRead

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
        """Below this timestamp, rollbacks are refused."""
        self.new_tables: set[int] = set()
        """Tables created since then, which have no safe point yet."""
        self.page_rows = 3

    # ------------------------------------------------------------------ mutations

    def apply(self, step: CellMutation) -> Answer:
        mutation = step.message()
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

    def commit(self, commit: OneRoundCommit, next_timestamp: Callable[[], int]) -> CommitAnswer:
        """Commits in one round. Every table is one tablet."""
        current = self.schema_versions.get(commit.table_id, commit.schema_version)
        if current != commit.schema_version:
            return SchemaChanged("newer", table_id=commit.table_id, schema_version=current)
        is_old = commit.table_id not in self.new_tables and commit.start < self.safe_point
        found = []
        for row, column in zip(commit.rows, commit.columns, strict=True):
            versions = self.cells.setdefault(CellAddress(commit.table_id, row, column), {})
            mutation = steps.prewrite(row, column, commit.start, b"", None)
            for index, condition in enumerate(mutation.conditions):
                holds, culprit = _judge(condition, versions)
                if not holds and is_old and index != steps.OWN_COMMIT:
                    return self._too_old(commit.start)
                if not holds:
                    return Refused(index, culprit and _cell(mutation, culprit, versions))
            found.append(versions)
        if is_old:
            return self._too_old(commit.start)
        timestamp = next_timestamp()
        observers = dict(commit.observed)
        for versions, column, kind, value in zip(
            found, commit.columns, commit.kinds, commit.values, strict=True
        ):
            inline = value if kind == KIND_PUT else b""
            versions[(WRITE, b"", timestamp)] = WRITE_HEADER.pack(commit.start, kind) + inline
            if kind == KIND_PUT_IN_DATA:
                versions[(DATA, b"", commit.start)] = value
            for observer in observers.get(column, ()) if kind != KIND_LOCK_ONLY else ():
                versions[(NOTIFY, observer, timestamp)] = b""
        for row, column, names in commit.notifications:
            versions = self.cells.setdefault(CellAddress(commit.table_id, row, column), {})
            versions.update({(NOTIFY, name, timestamp): b"" for name in names})
        return timestamp

    def _too_old(self, timestamp: int) -> SnapshotTooOld:
        return SnapshotTooOld("too old", timestamp=timestamp, safe_point=self.safe_point)

    # ------------------------------------------------------------------ reads

    def look(self, request: RowRequest) -> RowResult:
        read = request.read
        if read.timestamp < self.safe_point:
            raise self._too_old(read.timestamp)
        answer = RowResult()
        for address, versions in self.cells.items():
            if (address.table_id, address.row) != (request.table_id, read.row):
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
        """Cell in a snapshot; a value of None for a deletion."""
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

    def page(self, request: RangeRequest) -> RangePage:
        """The first page of the range."""
        rows = sorted(
            {
                address.row
                for address in self.cells
                if address.table_id == request.table_id
                and request.start <= address.row
                and (not request.end or address.row < request.end)
            },
            reverse=request.reverse,
        )
        start, end = request.start, request.end
        if len(rows) > self.page_rows:
            rows = rows[: self.page_rows]
            start, end = (rows[-1], end) if request.reverse else (start, rows[-1] + b"\x00")
        page = RangePage({}, [], start, end)
        for row in rows:
            read = RowRequest(request.table_id, _row_read(request, row))
            answer = self.look(read)
            page.locks.extend(answer.locks)
            if answer.found:
                page.rows[row] = answer.found
        return page


def pages(naive: NaiveCells, request: RangeRequest) -> list[RangePage]:
    """All pages of a range, one after another."""
    found = []
    while True:
        page = naive.page(request)
        found.append(page)
        if request.reverse:
            if page.start == request.start:
                return found
            request = request._replace(end=page.start)
        else:
            if page.end == request.end:
                return found
            request = request._replace(start=page.end)


def _row_read(request: RangeRequest, row: bytes) -> RowRead:
    return RowRead(
        row=row,
        columns=request.columns or (),
        all_columns=request.columns is None,
        timestamp=request.timestamp,
        report_deletes=request.report_deletes,
    )


def _judge(condition: Condition, versions: Versions) -> tuple[bool, tuple[int, bytes, int] | None]:
    """Judges whether the condition holds, and names the cell that fails it."""
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
        case Condition.EXPECTATION_AT_MOST:
            if not selected:
                return False, others[-1] if others else None
            start, size = len(condition.prefix), len(condition.required)
            rest = versions[selected[-1]][start : start + size]
            return rest <= condition.required, selected[-1]
        case _:
            raise ValueError(f"no such expectation: {condition}")


def _cell(mutation: Mutation, key: tuple[int, bytes, int], versions: Versions) -> cells_pb2.Cell:
    space, qualifier, timestamp = key
    return cells_pb2.Cell(
        space=space,  # type: ignore[arg-type]  # the number of an enum
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
