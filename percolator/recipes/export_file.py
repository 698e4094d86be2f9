"""Exports in a file, each exactly once.

A line is an export. So the file itself says what has been exported, whatever died while it was
written, and nothing has to agree with anything else.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from percolator import private_files
from percolator.errors import InvalidArgument
from percolator.recipes.export_queue import Export


class ExportFile:
    """A file of JSON lines, to which the exports of one queue are appended.

        {"key": "ann", "sequence": 2021817333478212635621064729, "value": {"order": 17}}

    Guarantees: after `append` returns, each export is in the file exactly once and on disk, and
    those of a key are in order. This holds among any number of processes of one machine that append
    to the file, even if they die at any time. Keys and values have to be JSON values.

    It keeps the last number of each key in memory, and reads the file once when it is first used.
    Do not append anything else. To begin a new file, stop the workers and move the old one away
    when `ExportQueue.pending` is 0; a worker that dies while it appends leaves some pending.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._last: dict[str, int] = {}
        self._read_to = 0
        self._durable_to = 0
        """What others have appended may not be on disk yet: they may have died before."""
        self._inode = 0

    def append(self, exports: Iterable[Export[Any, Any]]) -> int:
        """Appends what is not in the file yet; returns how many exports that were.

        Raises `InvalidArgument` if a key or a value is no JSON value, or if something in the file
        is not an export; then nothing is appended.
        """
        given = [(_json("key", one.key), one.sequence, _line(one)) for one in exports]
        with self._locked() as file:
            self._read_on(file)
            new: dict[str, int] = {}
            lines = []
            for key, sequence, line in given:
                if sequence > new.get(key, self._last.get(key, -1)):
                    new[key] = sequence
                    lines.append(line)
            data = b"".join(lines)
            file.write(data)
            file.flush()
            if self._read_to + len(data) > self._durable_to:
                os.fsync(file.fileno())
            self._read_to += len(data)
            self._durable_to = self._read_to
            self._last.update(new)
            return len(lines)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The file, while no other process appends to it."""
        with open(self._path, "ab+", opener=private_files.opener) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _read_on(self, file: BinaryIO) -> None:
        """Reads what was appended since, and cuts off what a process that died has half written."""
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._read_to:
            # Whoever created the file may have died before it was sure to stay.
            _sync_directory(self._path.parent)
            self._inode, self._read_to, self._durable_to, self._last = found.st_ino, 0, 0, {}
        file.seek(self._read_to)
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(self._read_to)
                break
            self._note(line)
            self._read_to += len(line)
        file.seek(0, os.SEEK_END)

    def _note(self, line: bytes) -> None:
        try:
            found = json.loads(line)
            self._last[_json("key", found["key"])] = int(found["sequence"])
        except (ValueError, KeyError, TypeError):
            raise InvalidArgument(
                "path", f"{self._path}, byte {self._read_to}: this line is not an export"
            ) from None


def _line(export: Export[Any, Any]) -> bytes:
    key, value = _json("key", export.key), _json("value", export.value)
    return f'{{"key": {key}, "sequence": {export.sequence}, "value": {value}}}\n'.encode()


def _json(field: str, value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"not a JSON value: {error}") from None


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
