"""What lies in the directory of an export.

    plan.json                    what is to be exported, at which timestamp: written first
    <table>/part-00000.parquet   one tablet's cells: row, column, value, commit_timestamp
    <table>/part-00000.json      the part's figures and checksum: it is done
    manifest.json                everything of the above, with a checksum of its own: written last
    import.log                   how far an import from here has come (import_log.py)

A directory with a manifest is an export; one with a plan alone was interrupted, and can be gone on
with. Each file is written under another name, made durable, and renamed: none is half there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from percolator.errors import InvalidArgument, PercolatorError, UsageError

FORMAT = 1
MANIFEST = "manifest.json"
PLAN = "plan.json"
_CHUNK_BYTES = 1 << 20


class DamagedExport(PercolatorError):
    """A file of an export is missing, or is not what was written."""


@dataclass(frozen=True)
class Part:
    """The cells of a range of rows: one tablet's, when the export began."""

    file: str
    """Below the export's directory."""
    start: str
    end: str
    """Rows in hexadecimal; an empty end means to the last row."""
    cells: int = 0
    bytes: int = 0
    """Of the file."""
    sha256: str = ""
    columns: tuple[str, ...] = ()
    """Names that occur, in hexadecimal; of very many only some."""


@dataclass(frozen=True)
class ExportedObserver:
    """As the table knows it."""

    name: str
    columns: tuple[str, ...]
    weak: bool
    paused: bool


@dataclass(frozen=True)
class ExportedTable:
    """One table: how to make it, and its cells."""

    name: str
    table_id: int
    """In its cluster: another table of this name has another one."""
    retention_milliseconds: int
    split_bytes: int
    observers: tuple[ExportedObserver, ...]
    parts: tuple[Part, ...]

    @property
    def splits(self) -> list[bytes]:
        """Where its tablets begin, but for the first."""
        return [bytes.fromhex(part.start) for part in self.parts[1:]]

    @property
    def cells(self) -> int:
        return sum(part.cells for part in self.parts)


@dataclass(frozen=True)
class Export:
    """All of it."""

    at: int
    """The timestamp: what was committed up to then."""
    tables: tuple[ExportedTable, ...]

    @property
    def cells(self) -> int:
        return sum(table.cells for table in self.tables)

    @property
    def parts(self) -> list[Part]:
        return [part for table in self.tables for part in table.parts]

    def with_parts(self, done: Mapping[str, Part]) -> Export:
        """With these, by their files, instead of those that are only planned."""
        return replace(
            self,
            tables=tuple(
                replace(table, parts=tuple(done.get(part.file, part) for part in table.parts))
                for table in self.tables
            ),
        )


def file_of(table: str, number: int) -> str:
    """The name of a part, for any name of a table."""
    return f"{quote(table, safe='').replace('.', '%2E')}/part-{number:05}.parquet"


@contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Raises `UsageError` when another process has it, be it a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is {doing} {path}") from None
        yield
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------- writing


def unfinished(path: Path) -> Path:
    """Under this name a file is written."""
    return path.with_name(path.name + ".partial")


@contextmanager
def durable(path: Path) -> Iterator[Path]:
    """Where to write; what is there at the end of the block is at `path`, durable and whole.

    Raises `InvalidArgument` for what the file system refuses, as when it is full.
    """
    partial = unfinished(path)
    try:
        path.parent.mkdir(exist_ok=True)
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise InvalidArgument("directory", f"{path} cannot be written: {error}") from error


def sync_directory(path: Path) -> None:
    """Makes its names durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_record(path: Path, content: dict[str, Any]) -> None:
    """JSON, with a checksum in it."""
    with durable(path) as partial:
        text = json.dumps(content | {"checksum": _checksum(content)}, indent=1)
        partial.write_text(text + "\n")


def write_export(path: Path, export: Export) -> None:
    """A plan or a manifest."""
    write_record(path, {"format": FORMAT} | asdict(export))


def write_part(directory: Path, part: Part) -> None:
    """That it is done."""
    write_record((directory / part.file).with_suffix(".json"), asdict(part))


def sha256_of(path: Path) -> str:
    """Of the file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------- reading


def read_record(path: Path) -> dict[str, Any]:
    """Raises `DamagedExport`, naming the file."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise DamagedExport(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise DamagedExport(f"{path} cannot be read: {error}") from error
    checksum = content.pop("checksum", "") if isinstance(content, dict) else ""
    # Lists and tuples are the same in JSON, and so is the checksum of what was read.
    if not checksum or checksum != _checksum(content):
        raise DamagedExport(f"{path} is damaged: its checksum is another one")
    found: dict[str, Any] = content
    return found


def read_export(path: Path) -> Export:
    """A plan or a manifest."""
    content = read_record(path)
    if content.get("format") != FORMAT:
        raise InvalidArgument(
            "directory", f"{path} is of format {content.get('format')}; this release reads {FORMAT}"
        )
    try:
        return Export(content["at"], tuple(map(_table, content["tables"])))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedExport(f"{path} has not what an export has: {error!r}") from error


def read_manifest(directory: Path) -> Export:
    """Of a whole export. Raises `DamagedExport`, `InvalidArgument` for one that is not finished."""
    if not (directory / MANIFEST).exists():
        if (directory / PLAN).exists():
            raise InvalidArgument(
                "directory", f"the export in {directory} was interrupted: finish it first"
            )
        raise InvalidArgument("directory", f"{directory} holds no export: {MANIFEST} is missing")
    return read_export(directory / MANIFEST)


def read_part(directory: Path, planned: Part) -> Part | None:
    """What was done of it before; None when that is to be done again."""
    record = (directory / planned.file).with_suffix(".json")
    if not record.exists():
        return None
    part = _part(read_record(record))
    check_part(directory, part)
    return part


def check_names(directory: Path, export: Export) -> None:
    """Raises `DamagedExport` for a Parquet file that is not of the export: whoever reads all files
    of a directory, as Spark does, would take it for a part."""
    known = {directory / part.file for part in export.parts}
    for path in sorted(directory.rglob("*.parquet")):
        if path not in known:
            raise DamagedExport(f"{path} is not part of this export")


def check_part(directory: Path, part: Part) -> None:
    """Raises `DamagedExport` unless the file is byte by byte what was written."""
    path = directory / PurePosixPath(part.file)
    try:
        size = path.stat().st_size
        if size != part.bytes:
            raise DamagedExport(f"{path} has {size} bytes instead of {part.bytes}")
        if sha256_of(path) != part.sha256:
            raise DamagedExport(f"{path} is damaged: its checksum is another one")
    except FileNotFoundError:
        raise DamagedExport(f"{path} is missing") from None
    except OSError as error:
        raise DamagedExport(f"{path} cannot be read: {error}") from error


def _table(content: dict[str, Any]) -> ExportedTable:
    observers = tuple(
        ExportedObserver(**(one | {"columns": tuple(one["columns"])}))
        for one in content["observers"]
    )
    parts = tuple(map(_part, content["parts"]))
    for number, part in enumerate(parts):
        # Nothing outside of the directory is an export's.
        if part.file != file_of(content["name"], number):
            raise ValueError(part.file)
    return ExportedTable(**(content | {"observers": observers, "parts": parts}))


def _part(content: dict[str, Any]) -> Part:
    return Part(**(content | {"columns": tuple(content["columns"])}))
