"""How far an import has come, beside what is imported: import.log in the directory of the export.

Lines of JSON, each behind its CRC-32, each durable before the import goes on:

    begun   a table is closed, and its load has these timestamps
    part    all cells of a file are loaded by that run

Only the last line that a process was writing can be broken. Whether what is noted is still true is
for the tablets to say: they know whose load they are closed for, and a run that was taken over or
cleared is refused. So a log that is lost, damaged, or of an import into another cluster costs
nothing but loading again.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from percolator.aio.bulk_load import LoadTimestamps
from percolator.backup import layout

NAME = "import.log"

_log = logging.getLogger("percolator.backup")


@dataclass
class TableLog:
    """What is noted of one table."""

    timestamps: LoadTimestamps
    parts: set[str] = field(default_factory=set)


class ImportLog:
    """As it was found, and what is added to it."""

    def __init__(self, path: Path, file: IO[bytes] | None) -> None:
        self._path = path
        self._file = file
        self.tables: dict[str, TableLog] = {}
        if file is not None:
            self._read(file)

    def begun(self, table: str, timestamps: LoadTimestamps) -> None:
        """Whatever was noted of the table before is over."""
        self._note(
            {"begun": table, "start": int(timestamps.start), "commit": int(timestamps.commit)}
        )

    def loaded(self, table: str, file: str) -> None:
        self._note({"part": file, "table": table})

    def remove(self) -> None:
        """Nothing is left to be gone on with."""
        self.tables.clear()
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            layout.sync_directory(self._path.parent)

    def _note(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        if self._file is None:
            return
        text = json.dumps(entry).encode()
        self._file.write(b"%08x %s\n" % (zlib.crc32(text), text))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, file: IO[bytes]) -> None:
        content = file.read()
        whole = 0
        for line in content.splitlines(keepends=True):
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
                break
            self._take(json.loads(text))
            whole += len(line)
        if whole < len(content):
            # What is added now must not follow half a line.
            file.truncate(whole)

    def _take(self, entry: dict[str, Any]) -> None:
        if "begun" in entry:
            timestamps = LoadTimestamps(entry["start"], entry["commit"])
            self.tables[entry["begun"]] = TableLog(timestamps)
        else:
            self.tables[entry["table"]].parts.add(entry["part"])


@contextmanager
def open_log(directory: Path) -> Iterator[ImportLog]:
    """Raises `UsageError` when another process is importing from there."""
    path = directory / NAME
    try:
        file = path.open("a+b")
    except OSError as error:
        _log.warning(
            "how far the import has come cannot be noted, and it cannot be gone on with when it is "
            "interrupted: %s",
            error,
        )
        yield ImportLog(path, None)
        return
    with file, layout.locked(path, "importing, as it notes in"):
        file.seek(0)
        yield ImportLog(path, file)
