"""A trace of runs: one line of JSON for each attempt to run an observer, for `observers trace`.

The lines go to the logger `percolator.observers.trace`, at level DEBUG; by default, nothing is
written, and a run costs no more than a look at that level.
"""

from __future__ import annotations

import json
import logging
import time
from enum import StrEnum
from pathlib import Path

from percolator import private_files
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.observers.running.run import ObserverRun
from percolator.observers.work import Work
from percolator.row_text import row_text

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


def note(run: ObserverRun, work: Work, ended: Ended, seconds: float) -> None:
    """Writes a line, if the logger takes it."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    observer, transaction = work.watched.observer, run.transaction
    writes = [
        kind
        for cell, (kind, _) in transaction.internal.writes.cells.items()
        if not cell.column.startswith(_RESERVED)
    ]
    written = sum(1 for kind in writes if kind in (KIND_PUT, KIND_DELETE))
    line = {
        "table": observer.table.name,
        "observer": observer.name,
        "row": row_text(work.row),
        "changes": sorted(work.timestamps),
        "start": run.start,
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
    path.touch(mode=private_files.FILE_MODE)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
