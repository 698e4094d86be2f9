"""How far an import has come: import.log, in the directory of the export.

It has lines of JSON, each after its CRC-32, and each durable before the import continues:

    begun   a table is closed, and its load has these timestamps
    part    that run has loaded all cells of a file

Only the line that a process was writing last can be broken. Whether an entry is still true is
decided by the tablets: they know whose load they are closed for, and refuse a run that was taken
over or cleared. So if the log is lost, damaged, or belongs to an import into another cluster, the
only cost is that everything is loaded again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from percolator import private_files
from percolator.aio.bulk_load import LoadTimestamps
from percolator.backup import layout

NAME = "import.log"

_log = logging.getLogger("percolator.backup")


@dataclass
class TableLog:
    """What the log says about one table."""

    timestamps: LoadTimestamps
    parts: set[str] = field(default_factory=set)


class ImportLog:
    """The entries that were found, and those that this import adds."""

    def __init__(self, path: Path, file: IO[bytes] | None) -> None:
        self._path = path
        self._file = file
        self._can_note = file is not None
        self.tables: dict[str, TableLog] = {}
        if file is not None:
            self._read(file)

    def begun(self, table: str, timestamps: LoadTimestamps) -> None:
        """Notes a new load of the table, which replaces all earlier entries about it."""
        self._note(
            {"begun": table, "start": int(timestamps.start), "commit": int(timestamps.commit)}
        )

    def loaded(self, table: str, file: str) -> None:
        self._note({"part": file, "table": table})

    def remove(self, tables: Iterable[str]) -> None:
        """Deletes the log, since nothing of these tables is left to resume. It stays, as it is, if
        it is about others, too: an import of some tables must not cost the others their progress.
        """
        for table in tables:
            self.tables.pop(table, None)
        if self._file is None or self.tables:
            return
        try:
            self._path.unlink(missing_ok=True)
            layout.sync_directory(self._path.parent)
        except OSError as error:
            _log.warning("%s, which is not needed any more, cannot be deleted: %s", NAME, error)

    def _note(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        if self._file is None or not self._can_note:
            return
        text = json.dumps(entry).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        try:
            _write_out(self._file, line)
        except OSError as error:
            # The tables are closed, and loading them needs no log.
            self._can_note = False
            _log.warning(
                "the import's progress cannot be written down any more, so part of it is repeated "
                "if it is interrupted: %s",
                error,
            )

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
            # New entries must not follow half a line.
            file.truncate(whole)

    def _take(self, entry: dict[str, Any]) -> None:
        if "begun" in entry:
            timestamps = LoadTimestamps(entry["start"], entry["commit"])
            self.tables[entry["begun"]] = TableLog(timestamps)
        else:
            self.tables[entry["table"]].parts.add(entry["part"])


def _write_out(file: IO[bytes], line: bytes) -> None:
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


@contextmanager
def open_log(directory: Path) -> Iterator[ImportLog]:
    """Opens the log. Raises `UsageError` if another process is importing from this directory."""
    path = directory / NAME
    try:
        # Unbuffered, so that what could not be written is not tried again when it is closed.
        file = open(path, "a+b", buffering=0, opener=private_files.opener)  # noqa: SIM115
    except OSError as error:
        _log.warning(
            "the import's progress cannot be written down, so it cannot be resumed if it is "
            "interrupted: %s",
            error,
        )
        yield ImportLog(path, None)
        return
    with file:
        layout.lock(file.fileno(), path, "importing, according to")
        file.seek(0)
        yield ImportLog(path, file)
