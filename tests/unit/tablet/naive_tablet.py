"""What tabletserver.proto promises, written down as plainly as possible: the model of a tablet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb

Address = tuple[bytes, bytes, int, bytes, int]
"""Row, column, space, qualifier, timestamp."""

Found = tuple[bytes, bytes, int, bytes | None]
"""Row, column, commit timestamp, value (None: deleted)."""


class NaiveTablet:
    """All cells in one dictionary, which every request searches completely."""

    def __init__(self) -> None:
        self.cells: dict[Address, bytes] = {}

    def mutate(self, mutation: pb.Mutation) -> pb.MutationResult:
        for index, condition in enumerate(mutation.conditions):
            holds, offender = self._judge(mutation, condition)
            if not holds:
                result = pb.MutationResult(outcome=pb.OUTCOME_REFUSED, failed_condition=index)
                if offender is not None:
                    result.cell.CopyFrom(
                        cells_pb2.Cell(
                            space=condition.space,
                            row=mutation.row,
                            column=mutation.column,
                            timestamp=offender[0],
                            value=offender[1],
                            qualifier=condition.qualifier,
                        )
                    )
                return result
        if any(self._is_out_of_order(mutation, change) for change in mutation.changes):
            return pb.MutationResult(outcome=pb.OUTCOME_NOT_EXECUTED)
        for change in mutation.changes:
            address = (
                mutation.row,
                mutation.column,
                change.space,
                change.qualifier,
                change.timestamp,
            )
            if change.kind == pb.Change.KIND_PUT:
                self.cells[address] = self._stored(mutation, change)
            elif change.kind == pb.Change.KIND_DELETE or self.cells.get(address, b"").startswith(
                change.value
            ):
                self.cells.pop(address, None)
        return pb.MutationResult(outcome=pb.OUTCOME_APPLIED)

    def _is_out_of_order(self, mutation: pb.Mutation, change: pb.Change) -> bool:
        """Whether a put or deletion is just below a lock-only commit that names an older one."""
        if change.kind != pb.Change.KIND_PUT or change.space != cells_pb2.SPACE_WRITE:
            return False
        above = [
            (commit, record)
            for commit, record in self.commits(mutation.row, mutation.column)
            if commit > change.timestamp
        ]
        if not above or WriteRecord.decode(change.value).kind is RecordKind.LOCK_ONLY:
            return False
        named = above[0][1].last_change
        return named is not None and named < change.timestamp

    def _stored(self, mutation: pb.Mutation, change: pb.Change) -> bytes:
        """A lock-only record names the change below it, if the mutation commits nothing else."""
        if change.space != cells_pb2.SPACE_WRITE:
            return change.value
        record = WriteRecord.decode(change.value)
        commits = sum(other.space == cells_pb2.SPACE_WRITE for other in mutation.changes)
        if record.kind is not RecordKind.LOCK_ONLY or commits > 1:
            return record.encode()
        changes = [
            commit
            for commit, other in self.commits(mutation.row, mutation.column)
            if commit < change.timestamp and other.kind is not RecordKind.LOCK_ONLY
        ]
        return replace(record, last_change=max(changes, default=0)).encode()

    def commits(self, row: bytes, column: bytes) -> list[tuple[int, WriteRecord]]:
        """The versions of a cell, oldest first."""
        return sorted(
            (
                (address[4], WriteRecord.decode(value))
                for address, value in self.cells.items()
                if address[:3] == (row, column, cells_pb2.SPACE_WRITE)
            ),
            key=lambda commit: commit[0],
        )

    def _judge(
        self, mutation: pb.Mutation, condition: pb.Condition
    ) -> tuple[bool, tuple[int, bytes] | None]:
        in_range = sorted(
            (timestamp, value)
            for (row, column, space, qualifier, timestamp), value in self.cells.items()
            if (row, column, space) == (mutation.row, mutation.column, condition.space)
            and qualifier == condition.qualifier
            and condition.from_timestamp <= timestamp
            and (not condition.until_timestamp or timestamp < condition.until_timestamp)
        )
        own = condition.from_timestamp.to_bytes(8, "big")
        selected = [found for found in in_range if found[1].startswith(condition.prefix)]
        match condition.expectation:
            case pb.Condition.EXPECTATION_ABSENT:
                if condition.space == cells_pb2.SPACE_WRITE and condition.prefix[:8] == own:
                    selected = [found for found in in_range[:1] if found in selected]
                return not selected, selected[0] if selected else None
            case pb.Condition.EXPECTATION_PRESENT:
                others = [found for found in in_range if found not in selected]
                return bool(selected), others[-1] if others and not selected else None
            case pb.Condition.EXPECTATION_EQUALS:
                if selected and selected[-1][1] == condition.prefix:
                    return True, None
                others = [found for found in in_range if found[1] != condition.prefix]
                return False, others[-1] if others else None
            case _:
                wrong = [found for found in selected if not found[1].startswith(condition.required)]
                return not wrong, wrong[-1] if wrong else None

    def rows(self, start: bytes, end: bytes) -> list[bytes]:
        """Rows of the range that have any cell."""
        return sorted(
            {
                address[0]
                for address in self.cells
                if start <= address[0] and (not end or address[0] < end)
            }
        )

    def read_row(
        self,
        row: bytes,
        timestamp: int,
        *,
        wanted: Callable[[bytes], bool],
        passing: Iterable[int] = (),
        report_deletes: bool = False,
    ) -> tuple[list[Found], list[tuple[bytes, bytes, bytes]]]:
        """The cells found, and the locks in the way (row, column, record), in column order."""
        found: list[Found] = []
        locks: list[tuple[bytes, bytes, bytes]] = []
        columns = sorted({address[1] for address in self.cells if address[0] == row})
        for column in filter(wanted, columns):
            record = self.cells.get((row, column, cells_pb2.SPACE_LOCK, b"", 0))
            if record is not None and _blocks(LockRecord.decode(record), timestamp, passing):
                locks.append((row, column, record))
                continue
            seen = self._newest(row, column, timestamp)
            if seen is not None and (seen[1] is not None or report_deletes):
                found.append((row, column, *seen))
        return found, locks

    def _newest(self, row: bytes, column: bytes, timestamp: int) -> tuple[int, bytes | None] | None:
        for commit, record in reversed(self.commits(row, column)):
            if commit > timestamp:
                continue
            match record.kind:
                case RecordKind.PUT:
                    return commit, record.value
                case RecordKind.PUT_IN_DATA:
                    start = record.start_timestamp
                    return commit, self.cells[(row, column, cells_pb2.SPACE_DATA, b"", start)]
                case RecordKind.DELETE:
                    return commit, None
        return None


def _blocks(lock: LockRecord, timestamp: int, passing: Iterable[int]) -> bool:
    return (
        lock.kind != RecordKind.LOCK_ONLY
        and lock.start_timestamp <= timestamp
        and lock.min_commit_timestamp <= timestamp
        and lock.start_timestamp not in passing
    )
