"""The files in the directory of an export.

    plan.json                    what to export, and at which timestamp: written first
    <table>/part-00000.parquet   one tablet's cells: row, column, value, commit_timestamp; or .jsonl
    <table>/part-00000.json      the part's sizes and checksum: says that it is done
    manifest.json                all of the above, with its own checksum: written last
    import.log                   how far an import from here has come

A directory with a manifest is a complete export; one with only a plan was interrupted, and can be
resumed. Each file is written under another name, made durable, and renamed, so none is ever partly
there.

Anyone can edit these files, and sign them again: a checksum is no signature. So the classes that
hold a plan or a manifest refuse, with `ValueError`, what could not become a message to a cluster.
Otherwise an import would find out in the middle.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from percolator.codecs.models import Unfit, model_form
from percolator.errors import InvalidArgument, PercolatorError, UsageError
from percolator.process import PRIVATE_DIRECTORY_MODE, PRIVATE_FILE_MODE

_NAME_BYTES_MAX = 255
"""The longest name in a directory that file systems accept."""
_NUMBER_MAX = (1 << 64) - 1
"""The largest number in a message to the cluster."""


class ExportFormat(StrEnum):
    """The format of the files that hold cells."""

    PARQUET = "parquet"
    """Cells as they are stored."""
    JSONL = "jsonl"
    """Rows as people read them, as lines of JSON."""

    @property
    def suffix(self) -> str:
        return f".{self.value}"


@dataclass(frozen=True)
class ExportPart:
    """The cells of a range of rows: those of one tablet, when the export began."""

    file: str
    """The path of the file, relative to the export's directory."""
    start: str
    end: str
    """The row to end before; like `start` in hexadecimal. Empty: up to the last row."""
    cells: int = 0
    bytes: int = 0
    """The size of the file."""
    sha256: str = ""
    columns: tuple[str, ...] = ()
    """Names of the columns that occur, in hexadecimal; only some if there are very many."""

    def __post_init__(self) -> None:
        _require_hex(self.start, self.end, *self.columns)
        _require_numbers(self.cells, self.bytes)


@dataclass(frozen=True)
class ExportedObserver:
    """An observer, as it is registered with its table."""

    name: str
    columns: tuple[str, ...]
    """In hexadecimal digits."""
    weak: bool
    paused: bool
    backfill: bool = False
    """Its backfill was not finished: an import owes it another one."""

    def __post_init__(self) -> None:
        _require_hex(*self.columns)


@dataclass(frozen=True)
class ExportedCodecs:
    """The codecs of a table, by name: so a reader of the files knows what the bytes mean."""

    key: str
    """Empty if none is known."""
    columns: tuple[tuple[str, str], ...]
    """(column in hexadecimal digits, codec), by column."""

    def __post_init__(self) -> None:
        _require_hex(*(column for column, _ in self.columns))


@dataclass(frozen=True)
class ExportedIndex:
    """An index in a table's schema. Its entries are not exported: an import makes them."""

    name: str
    columns: tuple[tuple[str, str], ...]
    """(column in hexadecimal digits, codec), in the order of the index."""
    unique: bool

    def __post_init__(self) -> None:
        _require_hex(*(column for column, _ in self.columns))


@dataclass(frozen=True)
class ExportedTable:
    """One table: how to create it, and its cells."""

    name: str
    table_id: int
    """The table's id in its cluster. A later table of this name has another id."""
    retention_milliseconds: int
    split_bytes: int
    observers: tuple[ExportedObserver, ...]
    parts: tuple[ExportPart, ...]
    change_feed: bool = False
    codecs: ExportedCodecs | None = None
    """The codecs in its schema; None if it names none."""
    ttls: tuple[tuple[str, int], ...] = ()
    """(column in hexadecimal digits, milliseconds), of columns whose values expire."""
    indexes: tuple[ExportedIndex, ...] = ()

    def __post_init__(self) -> None:
        _require_hex(*(column for column, _ in self.ttls))
        _require_numbers(self.table_id, self.retention_milliseconds, self.split_bytes)
        _require_numbers(*(milliseconds for _, milliseconds in self.ttls))

    @property
    def splits(self) -> list[bytes]:
        """The first rows of its tablets, except the first tablet."""
        return [bytes.fromhex(part.start) for part in self.parts[1:]]

    @property
    def cells(self) -> int:
        return sum(part.cells for part in self.parts)


@dataclass(frozen=True)
class Export:
    """An export: its tables, and the timestamp at which they are exported."""

    at: int
    """The timestamp. The export contains what was committed up to then."""
    tables: tuple[ExportedTable, ...]
    form: ExportFormat = ExportFormat.PARQUET
    cluster: str = ""
    """The id of the cluster."""

    def __post_init__(self) -> None:
        _require_numbers(self.at)

    @property
    def cells(self) -> int:
        return sum(table.cells for table in self.tables)

    @property
    def parts(self) -> list[ExportPart]:
        return [part for table in self.tables for part in table.parts]

    def with_parts(self, done: Mapping[str, ExportPart]) -> Export:
        """The export with these finished parts, by file, in place of those that are planned."""
        return replace(
            self,
            tables=tuple(
                replace(table, parts=tuple(done.get(part.file, part) for part in table.parts))
                for table in self.tables
            ),
        )


def file_of(table: str, number: int, form: ExportFormat = ExportFormat.PARQUET) -> str:
    """The path of a part's file, whatever characters the table's name contains.

    A directory whose name would be too long is named by the beginning and, after a dot, which no
    other one has, a hash.
    """
    directory = quote(table, safe="").replace(".", "%2E")
    if len(directory) > _NAME_BYTES_MAX:
        digest = hashlib.sha256(table.encode()).hexdigest()
        directory = f"{directory[: _NAME_BYTES_MAX - len(digest) - 1]}.{digest}"
    return f"{directory}/part-{number:05}{form.suffix}"


def _require_hex(*digits: str) -> None:
    for one in digits:
        if bytes.fromhex(one).hex() != one:  # it also accepts spaces and capitals
            raise ValueError(f"{one!r:.80} are no hexadecimal digits")


def _require_numbers(*numbers: int) -> None:
    for one in numbers:
        if not 0 <= one <= _NUMBER_MAX:
            raise ValueError(f"{one!r:.80} is out of range")


MANIFEST = "manifest.json"
PLAN = "plan.json"
_CHUNK_BYTES = 1 << 20
_FORMS = {
    1: ExportFormat.PARQUET,
    2: ExportFormat.JSONL,
    3: ExportFormat.PARQUET,
    4: ExportFormat.PARQUET,
    5: ExportFormat.JSONL,
}
"""By the `format` of plans and manifests."""
_EXPORT, _PART = model_form(Export, {}), model_form(ExportPart, {})


class DamagedExport(PercolatorError):
    """A file of an export is missing, or differs from what was written."""


def is_there(path: Path) -> bool:
    """True if a file exists. Raises `InvalidArgument` if that cannot be seen, for instance without
    permission to search its directory."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise InvalidArgument("directory", f"{path} cannot be read: {error}") from error
    return True


@contextmanager
def locked(directory: Path, doing: str) -> Iterator[None]:
    """Locks a directory. Raises `UsageError` if another process has locked it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        lock(descriptor, directory, doing)
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, path: Path, doing: str) -> None:
    """Locks an open file until it is closed. A file must be open for writing: NFS locks no other.

    Raises `UsageError` if another process has locked it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another process is {doing} {path}") from None
    except OSError as error:
        raise InvalidArgument("directory", f"{path} cannot be locked: {error}") from error


def unfinished(path: Path) -> Path:
    """The name under which a file is written before it is renamed."""
    return path.with_name(path.name + ".partial")


@contextmanager
def durable(path: Path) -> Iterator[Path]:
    """Yields a path to write to. At the end of the block, that file is durable and at `path`.

    Raises `InvalidArgument` if the file system refuses, for instance because it is full.
    """
    with being_written(path) as partial:
        yield partial
        publish(path)


@contextmanager
def being_written(path: Path) -> Iterator[Path]:
    """As `durable`, but the block has to `publish` the file, which may take long."""
    try:
        path.parent.mkdir(mode=PRIVATE_DIRECTORY_MODE, exist_ok=True)
        partial = unfinished(path)
        partial.unlink(missing_ok=True)
        partial.touch(mode=PRIVATE_FILE_MODE)
        yield partial
    except OSError as error:
        raise InvalidArgument("directory", f"{path} cannot be written: {error}") from error


def publish(path: Path) -> None:
    """Makes a file that was written durable, and gives it its name."""
    partial = unfinished(path)
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the names of the files in a directory durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_record(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON that contains its own checksum."""
    with durable(path) as partial:
        text = json.dumps(content | {"checksum": _checksum(content)}, indent=1)
        partial.write_text(text + "\n")


def write_export(path: Path, export: Export) -> None:
    """Writes a plan or a manifest."""
    content = {"format": _number_of(export)} | asdict(export)
    del content["form"]
    for table in content["tables"]:
        if not table["change_feed"]:
            # A release without feeds could read the export of a table without one.
            del table["change_feed"]
        if table["codecs"] is None:
            del table["codecs"]  # likewise
        if not table["ttls"]:
            del table["ttls"]
        if not table["indexes"]:
            del table["indexes"]
        for observer in table["observers"]:
            if not observer["backfill"]:
                del observer["backfill"]
    write_record(path, content)


def _number_of(export: Export) -> int:
    # A release without indexes, or times to live, would take the export for a damaged one.
    has_indexes = any(table.indexes for table in export.tables)
    if export.form is ExportFormat.JSONL:
        return 5 if has_indexes else 2
    if has_indexes:
        return 4
    return 3 if any(table.ttls for table in export.tables) else 1


def write_part(directory: Path, part: ExportPart, at: int) -> None:
    """Writes the record that says that a part of the export at this timestamp is done."""
    write_record((directory / part.file).with_suffix(".json"), asdict(part) | {"at": at})


def sha256_of(path: Path) -> str:
    """The hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_record(path: Path) -> dict[str, Any]:
    """Reads a record. Raises `DamagedExport`, naming the file, if it is not as it was written."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise DamagedExport(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        # Also RecursionError: of thousands of nested lists.
        raise DamagedExport(f"{path} cannot be read: {error}") from error
    checksum = content.pop("checksum", "") if isinstance(content, dict) else ""
    # The tuples that were written come back as lists. In JSON they are the same, so the checksums
    # are equal.
    if not checksum or checksum != _checksum(content):
        raise DamagedExport(f"{path} is damaged: its checksum differs")
    found: dict[str, Any] = content
    return found


def read_export(path: Path) -> Export:
    """Reads a plan or a manifest."""
    content = read_record(path)
    number = content.get("format")
    form = _FORMS.get(number) if type(number) is int else None
    if form is None:
        raise InvalidArgument(
            "directory",
            f"{path} is of format {number!s:.80}; this release reads 1 to {max(_FORMS)}",
        )
    del content["format"]
    try:
        export: Export = _EXPORT.unpack(content | {"form": form.value})
    except Unfit as unfit:
        raise DamagedExport(f"{path} is not the record of an export: {_said(unfit)}") from unfit
    _require_own_files(path, export)
    return export


def read_manifest(directory: Path) -> Export:
    """Reads the manifest. Raises `DamagedExport`, or `InvalidArgument` if there is none yet."""
    if not is_there(directory / MANIFEST):
        if is_there(directory / PLAN):
            raise InvalidArgument(
                "directory", f"the export in {directory} was interrupted: finish it first"
            )
        raise InvalidArgument("directory", f"{directory} holds no export: {MANIFEST} is missing")
    return read_export(directory / MANIFEST)


def read_part(directory: Path, planned: ExportPart, at: int) -> ExportPart | None:
    """The part as an earlier run of the export at this timestamp has finished it; None if it has
    not."""
    record = (directory / planned.file).with_suffix(".json")
    if not is_there(record):
        return None
    try:
        content = read_record(record)
        if content.pop("at", None) != at:
            raise DamagedExport(f"{record} is not known to be of this export")
        part: ExportPart = _PART.unpack(content)
    except Unfit as unfit:
        raise DamagedExport(f"{record} is not the record of a part: {_said(unfit)}") from unfit
    if (part.file, part.start, part.end) != (planned.file, planned.start, planned.end):
        raise DamagedExport(f"{record} is about another part: {part.file}")
    check_part(directory, part)
    return part


def check_names(directory: Path, export: Export) -> None:
    """Raises `DamagedExport` if there is a file of cells that does not belong to the export.

    A program that reads all files of a directory, as Spark does, would take it for a part.
    """
    known = {directory / part.file for part in export.parts}
    suffixes = {form.suffix for form in ExportFormat}
    for path in sorted(directory.rglob("*")):
        if path.suffix in suffixes and path not in known:
            raise DamagedExport(f"{path} is not part of this export")


def check_part(directory: Path, part: ExportPart) -> None:
    """Raises `DamagedExport` unless the file is byte for byte what was written."""
    path = directory / PurePosixPath(part.file)
    try:
        size = path.stat().st_size
        if size != part.bytes:
            raise DamagedExport(f"{path} has {size} bytes instead of {part.bytes}")
        if sha256_of(path) != part.sha256:
            raise DamagedExport(f"{path} is damaged: its checksum differs")
    except FileNotFoundError:
        raise DamagedExport(f"{path} is missing") from None
    except OSError as error:
        raise DamagedExport(f"{path} cannot be read: {error}") from error


def _require_own_files(path: Path, export: Export) -> None:
    """A manifest must not name files outside of its directory."""
    for table in export.tables:
        for number, part in enumerate(table.parts):
            if part.file != file_of(table.name, number, export.form):
                raise DamagedExport(
                    f"{path} names {part.file!r:.80}, which is no file of an export"
                )


def _said(unfit: Unfit) -> str:
    return f"{unfit.place.removeprefix('.') or 'it'}: {unfit.reason}"
