"""History of a run: the operations and results of its transactions, as input of the checker.

A `Recorder` runs beside the client and writes down, for every transaction, its timestamps, what
every operation returned, how it ended, and the instants between which each timestamp was fetched.
Recording appends named tuples to a list (about a microsecond each) and never makes a run fail.

Invariant: at every instant, a record is correct if its client dies right then. It starts as
aborted (nothing was sent), is unknown from when commit is called, and ends as what the
client was told. So a crash of the client needs no further bookkeeping.

For good explanations, each value in a workload should be unique: the checker's verdict is exact
with any values, but it identifies the writer of a wrong value by the value itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from percolator.errors import InvalidArgument, UsageError
from percolator.formats.records import read_lock_column
from percolator.timestamps import SEQUENCE_BITS

CellKey = tuple[str, bytes, bytes]
"""Table, row, column."""


class Outcome(Enum):
    """How a transaction ended, as far as its client was told."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    FOUND_COMMITTED = "found committed"
    """The outcome was unknown, and the store says that it committed. The client was never told."""


class Read(NamedTuple):
    """A cell was read; None means that there was none. A deleted cell is not an empty value."""

    key: CellKey
    value: bytes | None


class Put(NamedTuple):
    """A cell was written in the transaction's buffer."""

    key: CellKey
    value: bytes


class Delete(NamedTuple):
    """A cell was deleted in the transaction's buffer."""

    key: CellKey


class Lock(NamedTuple):
    """A lock-only write: excludes concurrent writers of the cell, changes nothing."""

    key: CellKey


class ReadLock(NamedTuple):
    """Excludes concurrent writers of the cell, but not those who lock it in the same way."""

    key: CellKey


class Notify(NamedTuple):
    """A weak notification of the observers of a cell."""

    key: CellKey


class Found(NamedTuple):
    """One cell of the result of a scan."""

    row: bytes
    column: bytes
    value: bytes


class Scan(NamedTuple):
    """A range of rows was read, in order, until nothing more came.

    The transaction must not have written into the range while it was scanning it.
    """

    table: str
    start: bytes
    stop: bytes
    """Exclusive; empty means "to the last row"."""
    found: tuple[Found, ...]
    columns: tuple[bytes, ...] | None = None
    """None means all."""
    reverse: bool = False
    row_limit: int = 0
    """0 means no limit."""
    complete: bool = True
    """False if the reader stopped early, at the end of a row: only what it saw is checked."""


Operation = Read | Put | Delete | Lock | ReadLock | Notify | Scan


@dataclass(slots=True)
class TransactionRecord:
    """One transaction. Its operations are in the order in which the program made them."""

    session: str
    """Who ran it. The transactions of one session follow one another and never overlap."""
    number: int
    """Its place among the transactions of the session."""
    start_ts: int = 0
    commit_ts: int = 0
    """0 if it did not commit, is not known to have committed, or wrote nothing."""
    outcome: Outcome = Outcome.ABORTED
    operations: list[Operation] = field(default_factory=list)
    serializable: bool = False
    """True if what it has read has to hold at its commit, too, if it writes anything."""
    historic: bool = False
    """True if it read a past snapshot chosen by timestamp, or one shared with other readers."""
    observer: str = ""
    """The observer whose run this is, if it is one."""
    triggers: tuple[CellKey, ...] = ()
    """The cells whose changes the observer runs for: several in a batch."""
    clock: str = ""
    """The clock that measured the instants: only instants of the same clock are compared."""
    begin_called: float | None = None
    begin_returned: float | None = None
    commit_called: float | None = None
    commit_returned: float | None = None

    @property
    def committed(self) -> bool:
        return self.outcome in (Outcome.COMMITTED, Outcome.FOUND_COMMITTED)

    def __str__(self) -> str:
        return f"transaction {self.start_ts} ({self.session} #{self.number})"

    def has_read_others(self) -> bool:
        """True if it has read more than its own writes: only that needs a snapshot."""
        written: set[CellKey] = set()
        for operation in self.operations:
            match operation:
                case Put(key=key) | Delete(key=key):
                    written.add(key)
                case Read(key=key) if key in written:
                    pass
                case Read() | Scan():
                    return True
                case _:
                    pass
        return False

    def writes(self) -> dict[CellKey, bytes | None]:
        """The final value of each cell that it put; None for each that it deleted."""
        last: dict[CellKey, bytes | None] = {}
        for operation in self.operations:
            match operation:
                case Put(key, value):
                    last[key] = value
                case Delete(key):
                    last[key] = None
                case _:
                    pass
        return last

    def locked(self) -> set[CellKey]:
        """Every stored cell that carries a lock while it commits: puts, deletes and lock-only
        writes, and the hidden cells of read locks."""
        found = {o.key for o in self.operations if isinstance(o, Put | Delete | Lock)}
        for table, row, column in self.read_locked():
            found.add((table, row, read_lock_column(column, self.start_ts)))
        return found

    def read_locked(self) -> set[CellKey]:
        """Every cell of which it sets a read lock. Those that it locks otherwise need none."""
        found = {o.key for o in self.operations if isinstance(o, ReadLock)}
        if found:
            found -= {o.key for o in self.operations if isinstance(o, Put | Delete | Lock)}
        return found


@dataclass
class History:
    """All transactions of a run, from every session, and what was stored before it."""

    transactions: list[TransactionRecord] = field(default_factory=list)
    initial: dict[CellKey, bytes] = field(default_factory=dict)
    ttls: dict[tuple[str, bytes], int] = field(default_factory=dict)
    """Milliseconds after which values expire, by table and column: the same during all of it."""

    def __len__(self) -> int:
        return len(self.transactions)

    def __iter__(self) -> Iterator[TransactionRecord]:
        return iter(self.transactions)

    def end_of(self, key: CellKey, commit_ts: int) -> int | None:
        """The first timestamp that no longer sees a value that this commit put there; None if it
        does not expire. By the definition of a time to live: whole milliseconds are compared."""
        ttl = self.ttls.get((key[0], key[2]))
        return None if ttl is None else ((commit_ts >> SEQUENCE_BITS) + ttl) << SEQUENCE_BITS

    def merged_with(self, others: Iterable[History]) -> History:
        """One history of everything that several client processes recorded."""
        merged = History(list(self.transactions), dict(self.initial), dict(self.ttls))
        for other in others:
            merged.transactions.extend(other.transactions)
            merged.initial.update(other.initial)
            merged.ttls.update(other.ttls)
        return merged


Listener = Callable[[TransactionRecord], None]
"""Called with a record whenever losing it would lose an outcome: before and after a commit."""


class RecordedTransaction:
    """Writes down one transaction, call by call, beside the client that runs it."""

    __slots__ = ("_append", "_listener", "_now", "record")

    def __init__(
        self, record: TransactionRecord, now: Callable[[], float], listener: Listener | None
    ) -> None:
        self.record = record
        self._append = record.operations.append
        self._now = now
        self._listener = listener

    def began(self, start_ts: int) -> None:
        """The start timestamp has become known."""
        self.record.start_ts = start_ts
        self.record.begin_returned = self._now()

    def read(self, key: CellKey, value: bytes | None) -> None:
        self._append(Read(key, value))

    def put(self, key: CellKey, value: bytes) -> None:
        self._append(Put(key, value))

    def delete(self, key: CellKey) -> None:
        self._append(Delete(key))

    def lock(self, key: CellKey) -> None:
        self._append(Lock(key))

    def read_lock(self, key: CellKey) -> None:
        self._append(ReadLock(key))

    def notify(self, key: CellKey) -> None:
        self._append(Notify(key))

    def scan(self, scan: Scan) -> None:
        self._append(scan)

    def commit_called(self) -> None:
        """Call it before commit: from here on, only a response tells how the transaction ended."""
        record = self.record
        if not record.start_ts and record.locked():
            # The store identifies a transaction by this number alone; without it, an unknown
            # outcome could never be resolved.
            raise UsageError("a transaction that writes must have begun() before it commits")
        record.outcome = Outcome.UNKNOWN
        record.commit_called = self._now()
        self._tell()

    def committed(self, commit_ts: int = 0) -> None:
        """Commit has returned. A transaction that wrote nothing has no commit timestamp."""
        self.record.commit_ts = commit_ts
        self._end(Outcome.COMMITTED)

    def aborted(self) -> None:
        """It is certain that nothing was committed."""
        self._end(Outcome.ABORTED)

    def unknown(self) -> None:
        """Commit has raised `OutcomeUnknown`."""
        self._end(Outcome.UNKNOWN)

    def _end(self, outcome: Outcome) -> None:
        self.record.outcome = outcome
        self.record.commit_returned = self._now()
        self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(self.record)


class Recorder:
    """Records the transactions of one process.

    `now` orders events: it is the monotonic clock of the machine or, in a simulation, a counter
    (`itertools.count().__next__`), which also orders events of the same virtual instant.
    """

    def __init__(
        self, now: Callable[[], float], *, clock: str = "", listener: Listener | None = None
    ) -> None:
        self.history = History()
        self._now = now
        self._clock = clock
        self._listener = listener
        self._numbers: dict[str, int] = {}

    def begin(
        self,
        session: str,
        *,
        historic: bool = False,
        observer: str = "",
        triggers: tuple[CellKey, ...] = (),
    ) -> RecordedTransaction:
        """Call it before the transaction begins: it reads the clock."""
        number = self._numbers.get(session, 0) + 1
        self._numbers[session] = number
        record = TransactionRecord(
            session,
            number,
            historic=historic,
            observer=observer,
            triggers=triggers,
            clock=self._clock,
            begin_called=self._now(),
        )
        self.history.transactions.append(record)
        return RecordedTransaction(record, self._now, self._listener)


# Histories as files: one JSON object per line, appended as transactions end.
#
# Client processes that are killed on purpose write their records here. A transaction is written
# when its commit is called, and again when it has ended. The last line about it counts, so if its
# process was killed in between, its outcome is read as unknown. The operating system keeps what was
# written, whatever happens to the process, and only the last line can be cut off by the kill.
#
# Bytes are written as text with the same code points (Latin-1), which is readable and exact.

_INSTANTS = ("begin_called", "begin_returned", "commit_called", "commit_returned")


class HistoryFile:
    """Appends records to a file. `written` is a `Recorder`'s listener."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="ascii")

    def written(self, record: TransactionRecord) -> None:
        self._append(_to_json(record))

    def began_with(self, initial: dict[CellKey, bytes]) -> None:
        """Writes down what was stored before the first transaction."""
        cells = [[*_key_to_json(key), _text(value)] for key, value in initial.items()]
        self._append({"initial": cells})

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        # Hand it to the kernel at once: a killed process loses what is in its own buffer.
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_history(history: History, path: Path) -> None:
    """Saves a whole history, so that a failing run can be examined."""
    with HistoryFile(path) as file:
        file.began_with(history.initial)
        for record in history:
            file.written(record)


def read_histories(paths: Iterable[Path]) -> History:
    """Reads the files that several processes wrote, as one history."""
    return History().merged_with(read_history(path) for path in paths)


def read_history(path: Path) -> History:
    """Reads what one process wrote. If its last line was cut off, that line is ignored."""
    records: dict[tuple[str, int], TransactionRecord] = {}
    initial: dict[CellKey, bytes] = {}
    lines = path.read_text(encoding="ascii").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            parsed = json.loads(line)
            if "initial" in parsed:
                initial |= {_key_from_json(cell[:3]): _bytes(cell[3]) for cell in parsed["initial"]}
                continue
            record = _from_json(parsed)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            if number == len(lines):
                break  # no newline follows it: the process was killed while writing it
            raise InvalidArgument(
                "history", f"line {number} is not a transaction: {error!r}", where=str(path)
            ) from error
        records[record.session, record.number] = record
    return History(list(records.values()), initial)


def _to_json(record: TransactionRecord) -> dict[str, Any]:
    line: dict[str, Any] = {
        "session": record.session,
        "number": record.number,
        "outcome": record.outcome.value,
        "start_ts": record.start_ts,
        "commit_ts": record.commit_ts,
        "instants": [getattr(record, name) for name in _INSTANTS],
        "clock": record.clock,
        "operations": [_operation_to_json(operation) for operation in record.operations],
    }
    if record.historic:
        line["historic"] = True
    if record.observer:
        line["observer"] = record.observer
    if record.triggers:
        line["triggers"] = [_key_to_json(key) for key in record.triggers]
    return line


def _from_json(line: dict[str, Any]) -> TransactionRecord:
    return TransactionRecord(
        session=line["session"],
        number=line["number"],
        start_ts=line["start_ts"],
        commit_ts=line["commit_ts"],
        outcome=Outcome(line["outcome"]),
        operations=[_operation_from_json(operation) for operation in line["operations"]],
        historic=line.get("historic", False),
        observer=line.get("observer", ""),
        triggers=tuple(_key_from_json(key) for key in line.get("triggers", ())),
        clock=line["clock"],
        **dict(zip(_INSTANTS, line["instants"], strict=True)),
    )


def _operation_to_json(operation: Operation) -> list[Any]:
    match operation:
        case Read(key, value):
            return ["read", _key_to_json(key), None if value is None else _text(value)]
        case Put(key, value):
            return ["put", _key_to_json(key), _text(value)]
        case Delete(key):
            return ["delete", _key_to_json(key)]
        case Lock(key):
            return ["lock", _key_to_json(key)]
        case ReadLock(key):
            return ["read lock", _key_to_json(key)]
        case Notify(key):
            return ["notify", _key_to_json(key)]
        case Scan():
            return ["scan", _scan_to_json(operation)]


def _operation_from_json(line: list[Any]) -> Operation:
    match line:
        case ["read", key, None]:
            return Read(_key_from_json(key), None)
        case ["read", key, value]:
            return Read(_key_from_json(key), _bytes(value))
        case ["put", key, value]:
            return Put(_key_from_json(key), _bytes(value))
        case ["delete", key]:
            return Delete(_key_from_json(key))
        case ["lock", key]:
            return Lock(_key_from_json(key))
        case ["read lock", key]:
            return ReadLock(_key_from_json(key))
        case ["notify", key]:
            return Notify(_key_from_json(key))
        case ["scan", scan]:
            return _scan_from_json(scan)
        case _:
            raise ValueError(f"unknown operation {line!r}")


def _scan_to_json(scan: Scan) -> dict[str, Any]:
    return {
        "table": scan.table,
        "start": _text(scan.start),
        "stop": _text(scan.stop),
        "found": [[_text(part) for part in found] for found in scan.found],
        "columns": None if scan.columns is None else [_text(column) for column in scan.columns],
        "reverse": scan.reverse,
        "row_limit": scan.row_limit,
        "complete": scan.complete,
    }


def _scan_from_json(scan: dict[str, Any]) -> Scan:
    columns = scan["columns"]
    return Scan(
        scan["table"],
        _bytes(scan["start"]),
        _bytes(scan["stop"]),
        tuple(Found(*map(_bytes, found)) for found in scan["found"]),
        None if columns is None else tuple(map(_bytes, columns)),
        scan["reverse"],
        scan["row_limit"],
        scan["complete"],
    )


def _key_to_json(key: CellKey) -> list[str]:
    table, row, column = key
    return [table, _text(row), _text(column)]


def _key_from_json(key: list[str]) -> CellKey:
    table, row, column = key
    return table, _bytes(row), _bytes(column)


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
