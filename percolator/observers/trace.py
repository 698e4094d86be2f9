"""Traces of runs, for `observers trace`: a line of JSON for each attempt to run an observer.

The lines go to the logger `percolator.observers.trace`, at level DEBUG; by default, nothing is
written, and a run costs no more than a look at that level.

Traces are read to find out which change has caused each run. A run that handles a notification at
timestamp t was caused by the transaction that committed at t: another run, or a change that came
from outside. So each run belongs to one change from outside, its *origin*. A run that handles
several at once belongs to the oldest.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from percolator.codecs.readable import row_text
from percolator.errors import InvalidArgument
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.observers.context import RunTransaction
from percolator.observers.work_queue import Work
from percolator.process import PRIVATE_FILE_MODE

_RESERVED = b"\x00"
"""Hidden cells, such as acknowledgements, begin with it."""

logger = logging.getLogger("percolator.observers.trace")


class Ended(StrEnum):
    """How an attempt ended."""

    COMMITTED = "committed"
    HANDLED = "handled"
    """Nothing was left to do, and the function was not called."""
    CONFLICTED = "conflicted"
    POSTPONED = "postponed"
    FAILED = "failed"


def note(
    transaction: RunTransaction, works: Sequence[Work], start: int, ended: Ended, seconds: float
) -> None:
    """Writes a line about an attempt, if the logger takes it. `start` is that of its snapshot."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    observer = works[0].watched.observer
    others = f" and {len(works) - 1} more" if len(works) > 1 else ""
    writes = [
        kind
        for cell, (kind, _) in transaction.internal.writes.cells.items()
        if not cell.column.startswith(_RESERVED)
    ]
    written = sum(1 for kind in writes if kind in (KIND_PUT, KIND_DELETE))
    line = {
        "table": observer.table.name,
        "observer": observer.name,
        "row": row_text(works[0].row) + others,
        "changes": sorted(set[int]().union(*(work.timestamps for work in works))),
        "start": start,
        "commit": transaction.commit_timestamp,
        "ended": ended,
        "rows_read": transaction.statistics.rows_read,
        "round_trips": transaction.statistics.round_trips,
        "written": written,
        "locked": len(writes) - written,
        "seconds": round(seconds, 6),
        "cpu_seconds": round(time.process_time(), 6),
    }
    logger.debug("%s", json.dumps(line))


def trace_to(path: Path) -> None:
    """Appends the trace of all workers of this process to a file. Raises `OSError`."""
    path.touch(mode=PRIVATE_FILE_MODE)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False


@dataclass(frozen=True)
class TracedRun:
    """One attempt to run an observer."""

    table: str
    observer: str
    row: str
    changes: list[int]
    start: int
    commit: int | None
    ended: str
    rows_read: int
    round_trips: int
    written: int
    locked: int
    seconds: float
    cpu_seconds: float
    """The CPU that its process had used by then."""

    @property
    def is_repeated(self) -> bool:
        """The work was tried again."""
        return self.ended not in ("committed", "handled")

    @property
    def is_without_effect(self) -> bool:
        return not self.is_repeated and not self.written


@dataclass
class Trace:
    """The runs of all workers."""

    origins: dict[int, list[TracedRun]] = field(default_factory=dict)
    """By the timestamp of the change from outside; empty lists for what others have handled."""
    caused_by: dict[int, TracedRun] = field(default_factory=dict)
    """The run that committed at this timestamp."""
    cpu_seconds: float = 0.0
    """CPU of the workers between their first and their last line."""

    @property
    def runs(self) -> list[TracedRun]:
        return [run for runs in self.origins.values() for run in runs]

    def parent(self, run: TracedRun) -> TracedRun | None:
        """The run whose commit has caused this one; None for a change from outside."""
        return self.caused_by.get(min(run.changes)) if run.changes else None


def read_trace(files: Mapping[str, Iterable[str]]) -> Trace:
    """Puts the lines of these files together, each of which one worker has written.

    Raises `InvalidArgument`, naming file and line, for what is not a line of a trace.
    """
    trace, runs = Trace(), list[TracedRun]()
    for name, lines in files.items():
        found = [_run(f"{name}, line {number}", line) for number, line in enumerate(lines, 1)]
        if found:
            trace.cpu_seconds += found[-1].cpu_seconds - found[0].cpu_seconds
        runs += found
    trace.caused_by = {run.commit: run for run in runs if run.commit}
    for run in runs:
        for change in run.changes:
            if change not in trace.caused_by:
                trace.origins.setdefault(change, [])
    for run in runs:
        if run.changes:
            trace.origins.setdefault(_origin(trace, run), []).append(run)
    return trace


def _origin(trace: Trace, run: TracedRun) -> int:
    while parent := trace.parent(run):
        run = parent
    return min(run.changes)


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "int | None": (int, type(None)),
    "list[int]": (list,),
}


def _run(place: str, line: str) -> TracedRun:
    try:
        values: Any = json.loads(line)
    except ValueError:
        raise InvalidArgument(place, f"is not JSON: {line[:60].rstrip()!r}") from None
    if not isinstance(values, dict):
        raise InvalidArgument(place, "is not a line of a trace")
    for one in fields(TracedRun):
        if not isinstance(values.get(one.name, ...), _TYPES[str(one.type)]):
            raise InvalidArgument(
                place, f"is not a line of a trace: {one.name} is missing or wrong"
            )
    if not all(isinstance(change, int) for change in values["changes"]):
        raise InvalidArgument(place, "is not a line of a trace: changes are not timestamps")
    return TracedRun(**{one.name: values[one.name] for one in fields(TracedRun)})
