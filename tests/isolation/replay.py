"""Replays a history in timestamp order, which decides snapshot isolation exactly.

Timestamps say what every transaction must have seen: all commits with commit_ts <= its start_ts,
and nothing else. So no search is needed. The commits and starts are sorted; a commit moves the
frontier; at a start, the reads and scans of that transaction are compared with the frontier. The
cost is near-linear: the sorting, plus each operation once.

Transactions that aborted or never ended must have read the same snapshot: their programs acted on
what they read.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice, pairwise
from typing import NamedTuple

from sortedcontainers import SortedDict

from tests.isolation.findings import Report, ViolationKind, shown_key, shown_value
from tests.isolation.history import (
    CellKey,
    Delete,
    Found,
    History,
    Put,
    Read,
    Scan,
    TransactionRecord,
)

# Finds who wrote a wrong value, and so classifies a mismatch and names both writers.
#
# The replay decides whether a read is right without any of this, so the index of values is built
# only when the first mismatch is found.


class Version(NamedTuple):
    """The value of a cell at some timestamp, and its writer (None: it was there before the run)."""

    value: bytes | None
    writer: TransactionRecord | None
    expired: bool = False
    """It had a value, whose time to live is over."""


NEVER_WRITTEN = Version(None, None)


class _Write(NamedTuple):
    writer: TransactionRecord
    final: bool


class Blame:
    """Explains wrong reads of one history, whose outcomes are settled."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._writes: dict[tuple[CellKey, bytes | None], list[_Write]] | None = None

    def wrong_read(
        self, reader: TransactionRecord, key: CellKey, found: bytes | None, expected: Version
    ) -> tuple[ViolationKind, str, TransactionRecord | None]:
        """The kind of the anomaly, its explanation, and who wrote what was found."""
        kind, source = self._source(reader, key, found)
        origin, writer = _described(kind, source)
        text = (
            f"{reader} read {shown_value(found)} in {shown_key(key)} ({origin}); "
            f"its snapshot holds {shown_value(expected.value)} ({_provenance(expected)})"
        )
        return kind, text, writer

    def wrong_own_read(
        self, reader: TransactionRecord, key: CellKey, found: bytes | None, written: bytes | None
    ) -> tuple[ViolationKind, str, TransactionRecord | None]:
        """As `wrong_read`, for a cell that the reader had written itself and then read
        otherwise."""
        origin, writer = _described(*self._source(reader, key, found))
        left = "deleted it" if written is None else f"written {shown_value(written)} there"
        text = (
            f"{reader} read {shown_value(found)} in {shown_key(key)} ({origin}) "
            f"after it had itself {left}"
        )
        return ViolationKind.OWN_WRITE_NOT_READ, text, writer

    def _source(
        self, reader: TransactionRecord, key: CellKey, found: bytes | None
    ) -> tuple[ViolationKind, _Write | None]:
        """The most likely source of a value that should not have been read."""
        writes = self._index().get((key, found), [])
        committed = [w for w in writes if w.writer.committed and w.writer is not reader]
        final = [w for w in committed if w.final]
        older = [w for w in final if w.writer.commit_ts <= reader.start_ts]
        if older:
            return ViolationKind.STALE_READ, max(older, key=lambda w: w.writer.commit_ts)
        if self._history.initial.get(key) == found:
            return ViolationKind.STALE_READ, None
        if final:
            return ViolationKind.FUTURE_READ, min(final, key=lambda w: w.writer.commit_ts)
        if committed:
            return ViolationKind.INTERMEDIATE_READ, committed[0]
        aborted = [w for w in writes if w.writer is not reader]
        if aborted:
            return ViolationKind.ABORTED_READ, aborted[0]
        if writes:
            # Its own write: not yet made at that point, or since replaced by a later one.
            return ViolationKind.OWN_WRITE_NOT_READ, writes[0]
        return ViolationKind.UNWRITTEN_READ, None

    def _index(self) -> dict[tuple[CellKey, bytes | None], list[_Write]]:
        if self._writes is None:
            self._writes = {}
            for record in self._history:
                last = record.writes()
                for operation in record.operations:
                    if not isinstance(operation, Put | Delete):
                        continue
                    key = operation.key
                    value = operation.value if isinstance(operation, Put) else None
                    final = last[key] == value
                    self._writes.setdefault((key, value), []).append(_Write(record, final))
        return self._writes


def _described(kind: ViolationKind, source: _Write | None) -> tuple[str, TransactionRecord | None]:
    if source is None:
        if kind is ViolationKind.STALE_READ:
            return "there before the first transaction", None
        return "which no transaction ever wrote", None
    writer = source.writer
    if not writer.committed:
        return f"written by {writer}, which aborted", writer
    verb = "written" if source.final else "written, and replaced before its commit,"
    return f"{verb} by {writer}, committed at {writer.commit_ts}", writer


def _provenance(version: Version) -> str:
    if version.writer is None:
        return "there before the first transaction"
    verb = "deleted" if version.value is None else "written"
    if version.expired:
        verb = "written, with a time to live that is over,"
    return f"{verb} by {version.writer}, committed at {version.writer.commit_ts}"


# The newest committed version of every cell, as the replay moves from commit to commit.
#
# When all commits up to a timestamp have been applied, the frontier *is* the snapshot at that
# timestamp. Tables that are scanned are also kept in row order.

Cells = dict[bytes, bytes]
"""The live cells of a row, by column."""


class ScannedRow(NamedTuple):
    """A row as a scan must return it: at least one cell, columns in order."""

    row: bytes
    cells: list[tuple[bytes, bytes]]


class Frontier:
    """The state of the store at one point of the replay."""

    def __init__(self, initial: Mapping[CellKey, bytes], scanned_tables: Iterable[str]) -> None:
        self._versions: dict[CellKey, Version] = {}
        self._tables: dict[str, SortedDict] = {table: SortedDict() for table in scanned_tables}
        for key, value in initial.items():
            self.put(key, Version(value, None))

    def get(self, key: CellKey) -> Version:
        return self._versions.get(key, NEVER_WRITTEN)

    def put(self, key: CellKey, version: Version) -> None:
        """Makes `version` the newest; its value is None after a deletion."""
        self._versions[key] = version
        rows = self._tables.get(key[0])
        if rows is None:
            return
        _, row, column = key
        cells: Cells | None = rows.get(row)
        if version.value is not None:
            if cells is None:
                rows[row] = {column: version.value}
            else:
                cells[column] = version.value
        elif cells is not None and cells.pop(column, None) is not None and not cells:
            del rows[row]

    def scan(self, scan: Scan, own: Mapping[CellKey, bytes | None]) -> Iterator[ScannedRow]:
        """The rows that `scan` must return, in its order, before its limit is applied.

        `own` is what the scanning transaction had written by then; it hides what the snapshot has.
        """
        rows = self._tables[scan.table]
        wanted = None if scan.columns is None else frozenset(scan.columns)
        overlay = _overlay(scan, own)
        for row in self._rows_in_order(rows, scan, overlay):
            cells: Cells = rows.get(row) or {}
            over = overlay.get(row)
            if over is not None:
                mixed: dict[bytes, bytes | None] = {**cells, **over}
                cells = {column: value for column, value in mixed.items() if value is not None}
            if wanted is not None:
                cells = {column: value for column, value in cells.items() if column in wanted}
            if cells:
                yield ScannedRow(row, sorted(cells.items()))

    @staticmethod
    def _rows_in_order(
        rows: SortedDict, scan: Scan, overlay: Mapping[bytes, object]
    ) -> Iterator[bytes]:
        committed: Iterator[bytes] = rows.irange(
            scan.start, scan.stop or None, inclusive=(True, False), reverse=scan.reverse
        )
        if not overlay:
            return committed
        own = sorted(overlay, reverse=scan.reverse)
        merged = heapq.merge(committed, own, reverse=scan.reverse)
        return (row for row, _ in groupby(merged))


def in_range(row: bytes, scan: Scan) -> bool:
    return scan.start <= row and (not scan.stop or row < scan.stop)


def _overlay(
    scan: Scan, own: Mapping[CellKey, bytes | None]
) -> dict[bytes, dict[bytes, bytes | None]]:
    overlay: dict[bytes, dict[bytes, bytes | None]] = {}
    for (table, row, column), value in own.items():
        if table == scan.table and in_range(row, scan):
            overlay.setdefault(row, {})[column] = value
    return overlay


# Compares a scan with the snapshot: the rows it must return, in order, up to its limit.
#
# The lists are normally equal, which costs one comparison. Only if they differ is the difference
# taken apart into rows that are missing, doubled, out of order, too many or wrong.


def check_scan(
    reader: TransactionRecord,
    scan: Scan,
    frontier: Frontier,
    own: Mapping[CellKey, bytes | None],
    blame: Blame,
    report: Report,
) -> None:
    """Adds to `report` every difference between what `scan` returned and the snapshot."""
    expected = [
        (row, column, value)
        for row, cells in islice(frontier.scan(scan, own), _rows_due(scan))
        for column, value in cells
    ]
    if expected == list(scan.found):
        return
    comparison = _Comparison(reader, scan, frontier, own, blame, report)
    comparison.bounds()
    comparison.order()
    comparison.cells([Found(*cell) for cell in expected])


def _rows_due(scan: Scan) -> int | None:
    """How many rows must have been returned; None for all of them."""
    limit = scan.row_limit or None
    if scan.complete:
        return limit
    seen = len({found.row for found in scan.found})
    return seen if limit is None else min(limit, seen)


class _Comparison:
    """One scan that differs from its snapshot."""

    def __init__(
        self,
        reader: TransactionRecord,
        scan: Scan,
        frontier: Frontier,
        own: Mapping[CellKey, bytes | None],
        blame: Blame,
        report: Report,
    ) -> None:
        self._reader = reader
        self._scan = scan
        self._frontier = frontier
        self._own = own
        self._blame = blame
        self._report = report

    def bounds(self) -> None:
        """Reports what is outside the requested range, columns or limit."""
        scan = self._scan
        for found in scan.found:
            if not in_range(found.row, scan):
                self._add(ViolationKind.SCAN_OUT_OF_BOUNDS, found, "is outside its range")
            elif scan.columns is not None and found.column not in scan.columns:
                self._add(ViolationKind.SCAN_OUT_OF_BOUNDS, found, "was not requested")
        rows = list(self._found_rows())
        if scan.row_limit and len(rows) > scan.row_limit:
            text = f"{self._name()} returned {len(rows)} rows"
            self._report.add(ViolationKind.SCAN_OUT_OF_BOUNDS, text, self._reader)

    def order(self) -> None:
        """Reports rows out of order, and rows or columns that appear twice."""
        seen: set[bytes] = set()
        for row, cells in self._found_rows():
            columns = [cell.column for cell in cells]
            if row in seen or len(set(columns)) != len(columns):
                self._add(ViolationKind.DOUBLED_ROW, cells[0], "appears twice")
            seen.add(row)
        distinct = list(dict.fromkeys(row for row, _ in self._found_rows()))
        for before, after in pairwise(distinct):
            if (before > after) is not self._scan.reverse:
                text = (
                    f"{self._name()} returned row {shown_value(after)} after {shown_value(before)}"
                )
                self._report.add(ViolationKind.UNORDERED_SCAN, text, self._reader)

    def cells(self, expected: list[Found]) -> None:
        """Reports cells that are missing, that do not belong there, or that have a wrong value."""
        due = {(cell.row, cell.column): cell.value for cell in expected}
        got = {(cell.row, cell.column): cell.value for cell in self._scan.found}
        for name in dict.fromkeys([*due, *got]):
            if got.get(name) != due.get(name):
                self._wrong_cell(name, got.get(name), due.get(name))

    def _wrong_cell(
        self, name: tuple[bytes, bytes], found: bytes | None, due: bytes | None
    ) -> None:
        key: CellKey = (self._scan.table, *name)
        if key in self._own:
            kind, text, writer = self._blame.wrong_own_read(
                self._reader, key, found, self._own[key]
            )
        else:
            version = self._frontier.get(key)
            if due is None and version.value is not None:
                return  # it exists, but is not due: bounds() has reported it, or a row is missing
            kind, text, writer = self._blame.wrong_read(self._reader, key, found, version)
            if found is None:
                kind = ViolationKind.LOST_ROW
            elif due is None:
                kind = ViolationKind.PHANTOM
        self._report.add(kind, f"{self._name()}: {text}", self._reader, writer, key=key)

    def _found_rows(self) -> Iterator[tuple[bytes, list[Found]]]:
        for row, cells in groupby(self._scan.found, key=lambda found: found.row):
            yield row, list(cells)

    def _add(self, kind: ViolationKind, found: Found, what: str) -> None:
        key: CellKey = (self._scan.table, found.row, found.column)
        self._report.add(kind, f"{self._name()}: {shown_key(key)} {what}", self._reader, key=key)

    def _name(self) -> str:
        scan = self._scan
        stop = shown_value(scan.stop) if scan.stop else "the end"
        parts = [f"scan of {scan.table} from {shown_value(scan.start)} to {stop}"]
        if scan.columns is not None:
            parts.append("columns " + ", ".join(map(shown_value, scan.columns)))
        if scan.reverse:
            parts.append("reverse")
        if scan.row_limit:
            parts.append(f"at most {scan.row_limit} rows")
        return f"{self._reader}, {', '.join(parts)}"


_COMMIT, _END, _START = range(3)
"""At equal timestamps commits come first: a commit is visible iff commit_ts <= start_ts. At the end
of its time to live, a value is no longer visible."""


def replay(history: History, report: Report) -> None:
    """Adds to `report` every wrong read and scan, and every pair of concurrent writes."""
    scanned = {o.table for t in history for o in t.operations if isinstance(o, Scan)}
    _Replay(history, Frontier(history.initial, scanned), Blame(history), report).run()


class _Replay:
    def __init__(self, history: History, frontier: Frontier, blame: Blame, report: Report) -> None:
        self._history = history
        self._frontier = frontier
        self._blame = blame
        self._report = report
        self._last_commit: dict[CellKey, TransactionRecord] = {}
        """The last transaction to commit a lock on each cell, lock-only writes included."""
        self._last_read_lock: dict[CellKey, TransactionRecord] = {}
        """The last transaction to commit a read lock of each cell."""

    def run(self) -> None:
        transactions = self._history.transactions
        events: list[tuple[int, int, int]] = []
        for index, record in enumerate(transactions):
            if record.start_ts:
                events.append((record.start_ts, _START, index))
            if record.committed and record.commit_ts:
                events.append((record.commit_ts, _COMMIT, index))
                if self._history.ttls:
                    events.extend((end, _END, index) for end in self._ends(record).values())
        events.sort()
        for timestamp, kind, index in events:
            if kind == _COMMIT:
                self._commit(transactions[index])
            elif kind == _END:
                self._end(transactions[index], timestamp)
            else:
                self._start(transactions[index])

    def _start(self, record: TransactionRecord) -> None:
        """Checks all reads: the frontier of this instant is the transaction's snapshot."""
        own: dict[CellKey, bytes | None] = {}
        self._report.looked_at["operations"] += len(record.operations)
        for operation in record.operations:
            if isinstance(operation, Read):
                self._read(record, operation, own)
            elif isinstance(operation, Put):
                own[operation.key] = operation.value
            elif isinstance(operation, Delete):
                own[operation.key] = None
            elif isinstance(operation, Scan):
                check_scan(record, operation, self._frontier, own, self._blame, self._report)

    def _read(
        self, record: TransactionRecord, read: Read, own: dict[CellKey, bytes | None]
    ) -> None:
        key, found = read
        if key in own:
            if own[key] == found:
                return
            kind, text, writer = self._blame.wrong_own_read(record, key, found, own[key])
        else:
            expected = self._frontier.get(key)
            if expected.value == found:
                return
            kind, text, writer = self._blame.wrong_read(record, key, found, expected)
        self._report.add(kind, text, record, writer, key=key)

    def _commit(self, record: TransactionRecord) -> None:
        if record.serializable:
            self._require_current_reads(record)
        for key in record.read_locked():
            self._exclude(record, self._last_commit.get(key), key)
            self._last_read_lock[key] = record
        for key in record.locked():
            self._exclude(record, self._last_commit.get(key), key)
            self._exclude(record, self._last_read_lock.get(key), key)
            self._last_commit[key] = record
        for key, value in record.writes().items():
            self._frontier.put(key, Version(value, record))

    def _require_current_reads(self, record: TransactionRecord) -> None:
        """Checks that all reads of a serializable transaction would find the same at its commit.

        If they do, the order of commits is a serial order of all such transactions. One that writes
        nothing is in it at its snapshot.
        """
        own: set[CellKey] = set()
        for operation in record.operations:
            if isinstance(operation, Put | Delete):
                own.add(operation.key)
            elif isinstance(operation, Read) and operation.key not in own:
                key, found = operation
                now = self._frontier.get(key)
                if now.value != found and not now.expired:
                    text = (
                        f"{record} has read {shown_key(key)}, which {now.writer} had changed "
                        f"before its commit at {record.commit_ts}"
                    )
                    kind = ViolationKind.NOT_SERIALIZABLE
                    self._report.add(kind, text, record, now.writer, key=key)

    def _ends(self, record: TransactionRecord) -> dict[CellKey, int]:
        """When the values expire that a transaction has put."""
        ends = {
            key: self._history.end_of(key, record.commit_ts)
            for key, value in record.writes().items()
            if value is not None
        }
        return {key: end for key, end in ends.items() if end is not None}

    def _end(self, record: TransactionRecord, timestamp: int) -> None:
        """Values of this transaction expire, unless others have replaced them."""
        for key, end in self._ends(record).items():
            if end == timestamp and self._frontier.get(key).writer is record:
                self._frontier.put(key, Version(None, record, expired=True))

    def _exclude(
        self, record: TransactionRecord, other: TransactionRecord | None, key: CellKey
    ) -> None:
        """Checks that the record began after the other one had ended: they must not overlap."""
        if other is None or other.commit_ts <= record.start_ts:
            return
        text = (
            f"{record} committed {shown_key(key)} at {record.commit_ts}, although {other} had "
            f"committed it at {other.commit_ts}, above the snapshot {record.start_ts}"
        )
        self._report.add(ViolationKind.CONFLICT, text, record, other, key=key)
