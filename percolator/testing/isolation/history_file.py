"""Histories as files: one JSON object per line, appended as transactions end.

Client processes that are killed on purpose write their records here. A transaction is written when
its commit is called, and again when it has ended. The last line about it counts, so if its process
was killed in between, its outcome is read as unknown. The operating system keeps what was written,
whatever happens to the process, and only the last line can be cut off by the kill.

Bytes are written as text with the same code points (Latin-1), which is readable and exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from percolator.errors import InvalidArgument
from percolator.testing.isolation.history import (
    CellKey,
    Delete,
    Found,
    History,
    Lock,
    Notify,
    Operation,
    Outcome,
    Put,
    Read,
    ReadLock,
    Scan,
    TransactionRecord,
)

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
    if record.early:
        line["early"] = True
    if record.observer:
        line["observer"] = record.observer
    if record.trigger is not None:
        line["trigger"] = _key_to_json(record.trigger)
    return line


def _from_json(line: dict[str, Any]) -> TransactionRecord:
    trigger = line.get("trigger")
    return TransactionRecord(
        session=line["session"],
        number=line["number"],
        start_ts=line["start_ts"],
        commit_ts=line["commit_ts"],
        outcome=Outcome(line["outcome"]),
        operations=[_operation_from_json(operation) for operation in line["operations"]],
        historic=line.get("historic", False),
        early=line.get("early", False),
        observer=line.get("observer", ""),
        trigger=None if trigger is None else _key_from_json(trigger),
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
