"""`tabletserver dump PATH`: a closed tablet's cells, as lines or JSON.

It takes nothing over and changes nothing: opening a LevelDB replays its log into new files, so it
opens a clone in a temporary directory instead. It refuses a tablet that some process has open.
Bytes are shown as ASCII, with every other byte, the backslash and the quote as \\xNN.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from percolator.errors import InvariantViolation
from percolator.formats.records import LockRecord, WriteRecord
from percolator.services.chassis import epoch_directory
from percolator.services.chassis.epoch_directory import Stage
from percolator.services.chassis.files import RealFiles
from percolator.services.tabletserver import leveldb
from percolator.services.tabletserver.storage import clone_leveldb
from percolator.tablet.cells import (
    FEED_FENCE,
    FENCES,
    LOCK,
    NOTIFY,
    PREFIX_OF_SPACE,
    WRITE,
    F,
    M,
    decode,
    split_change,
    split_component,
)
from percolator.timestamps import in_json

EXIT_REFUSED = 2
_TIMESTAMPS = frozenset({"timestamp", "start", "min_commit"})


class CannotDump(Exception):
    """The path is not the directory of a closed tablet; the text says what it is."""


def main(arguments: Sequence[str]) -> int:
    """Runs the subcommand. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="percolator serve tabletserver dump",
        description="Shows the cells of a closed tablet directory, without changing anything.",
    )
    parser.add_argument("path", type=Path, help="STORE/<table>/<tablet>, or one of its epochs")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    try:
        directory = closed_directory(options.path)
        for cell in dumped(directory):
            sys.stdout.write((as_json(cell) if options.json else as_line(cell)) + "\n")
    except (CannotDump, OSError, leveldb.Error) as error:
        sys.stderr.write(f"dump: {error}\n")
        return EXIT_REFUSED
    return 0


def closed_directory(path: Path) -> Path:
    """The LevelDB directory to dump: the path itself, or its newest epoch. `CannotDump` if open."""
    if not path.is_dir():
        raise CannotDump(f"{path} is not a directory")
    directory = path if (path / "CURRENT").exists() else _newest_epoch(path)
    if not (directory / "CURRENT").exists():
        raise CannotDump(f"{directory} is not a LevelDB directory")
    if _is_open(directory):
        raise CannotDump(f"{directory} is open: close the tablet first")
    return directory


def dumped(directory: Path) -> Iterator[dict[str, Any]]:
    """Every entry, in key order; the fences between the spaces are left out."""
    with tempfile.TemporaryDirectory(prefix="tablet-dump-") as scratch:
        asyncio.run(_clone(directory, Path(scratch)))
        database = leveldb.DB(scratch, create_if_missing=False)
        try:
            for key, value in database.iterator():
                if key not in FENCES and key != FEED_FENCE:
                    yield _entry(key, value)
        finally:
            database.close()


def as_line(cell: dict[str, Any]) -> str:
    """The entry for humans: its space, then its content as name=value."""
    rest = (f"{name}={_shown(value)}" for name, value in cell.items() if name != "space")
    return " ".join([cell["space"], *rest])


def as_json(cell: dict[str, Any]) -> str:
    """The entry for programs."""
    return json.dumps(
        {name: in_json(value) if name in _TIMESTAMPS else value for name, value in cell.items()}
    )


def text(raw: bytes) -> str:
    """Bytes as ASCII; reversible, because the backslash itself is escaped."""
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'\\"' else f"\\x{byte:02x}" for byte in raw
    )


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _entry(key: bytes, value: bytes) -> dict[str, Any]:
    if key[:1] == M:
        return {"space": "M", "name": text(key[1:]), "value": text(value)}
    try:
        space, entry = _change(key) if key[:1] == F else _cell(key)
    except InvariantViolation as error:
        return {"space": "?", "key": text(key), "value": text(value), "error": str(error)}
    try:
        entry |= _record(space, value)
    except InvariantViolation as error:
        entry |= {"value": text(value), "error": str(error)}
    return entry


def _cell(key: bytes) -> tuple[int, dict[str, Any]]:
    address = decode(key)
    entry: dict[str, Any] = {
        "space": PREFIX_OF_SPACE[address.space].decode(),
        "row": text(address.row),
        "column": text(address.column),
    }
    if address.space == NOTIFY:
        entry["observer"] = text(address.qualifier)
    if address.space != LOCK:
        entry["timestamp"] = address.timestamp
    return address.space, entry


def _change(key: bytes) -> tuple[int, dict[str, Any]]:
    """The entry without its record, which is that of a write."""
    commit, cell = split_change(key)
    row, at = split_component(cell, 0)
    column, _ = split_component(cell, at)
    return WRITE, {
        "space": "F",
        "row": text(row),
        "column": text(column),
        "timestamp": commit,
    }


def _record(space: int, value: bytes) -> dict[str, Any]:
    if space == LOCK:
        lock = LockRecord.decode(value)
        return {
            "start": lock.start_timestamp,
            "min_commit": lock.min_commit_timestamp,
            "ttl_ms": lock.ttl_milliseconds,
            "kind": lock.kind.name,
            "session": lock.session.hex(),
            "primary_table": lock.primary.table_id,
            "primary_row": text(lock.primary.row),
            "primary_column": text(lock.primary.column),
            "value": text(lock.value),
        }
    if space == WRITE:
        write = WriteRecord.decode(value)
        return {
            "start": write.start_timestamp,
            "kind": write.kind.name,
            "value": text(write.value),
        }
    return {"value": text(value)}


def _newest_epoch(path: Path) -> Path:
    names = epoch_directory.parse_all(entry.name for entry in path.iterdir())
    usable = [name for name in names if name.stage in (Stage.LIVE, Stage.SEALED)]
    if not usable:
        raise CannotDump(f"{path} is neither a tablet directory nor an epoch of one")
    return path / str(max(usable, key=lambda name: name.epoch))


def _is_open(directory: Path) -> bool:
    # LevelDB's own lock is of this kind. Closing the file drops all locks of this process on it,
    # so only a process that serves nothing may do this.
    try:
        with (directory / "LOCK").open("r+b") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):
        return True
    return False


async def _clone(source: Path, target: Path) -> None:
    files = RealFiles()
    try:
        await clone_leveldb(files, source, target)
    finally:
        files.close()
