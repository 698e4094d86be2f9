"""Which directories are closed to others, and what the umask of their files becomes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from percolator.backup import export_files
from percolator.observers import trace
from percolator.process import private_opener
from percolator.recipes.export_queue import ExportFile
from percolator.services.chassis.lifecycle import ReadyFile, close_root, limit_new_files
from percolator.services.local import directory
from percolator.services.local.authority import make_all
from percolator.v1 import cluster_pb2
from percolator.wire.addresses import HostPort

OWN_GROUP = os.getegid()


@pytest.fixture(name="open_umask", autouse=True)
def _open_umask() -> Iterator[None]:
    """The user lets everybody read and write everything."""
    before = os.umask(0)
    yield
    os.umask(before)


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def started(root: Path) -> list[str]:
    """A service starts on this root. Returns what it logs."""
    limit_new_files(root)
    with capture_logs() as logged:
        close_root(root, structlog.get_logger())
    return [str(entry) for entry in logged]


def made(root: Path, with_mode: int) -> Path:
    root.mkdir()
    root.chmod(with_mode)
    return root


MODES = [
    # What `mkdir` makes, with the usual umasks.
    (0o755, OWN_GROUP, 0o700, 0o077),
    (0o775, OWN_GROUP, 0o700, 0o077),
    # Others have no access: somebody has chosen this.
    (0o700, OWN_GROUP, 0o700, 0o077),
    (0o750, OWN_GROUP, 0o750, 0o027),
    (0o2770, OWN_GROUP, 0o2770, 0o027),
    # The group is not the usual one, or is for all files to come.
    (0o2775, OWN_GROUP, 0o2770, 0o027),
    (0o755, OWN_GROUP + 1, 0o750, 0o027),
    # Containers with other users share it.
    (0o777, OWN_GROUP, 0o777, 0o022),
    (0o1777, OWN_GROUP, 0o1777, 0o022),
]


@pytest.mark.parametrize(("before", "group_of_process", "after", "below"), MODES)
def test_a_store_is_closed_to_others_and_a_chosen_group_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    group_of_process: int,
    after: int,
    below: int,
) -> None:
    monkeypatch.setattr(os, "getegid", lambda: group_of_process)
    root = made(tmp_path / "store", before)
    said = started(root)
    assert (mode(root), umask()) == (after, below)
    assert len(said) == (before != after)
    assert started(root) == []
    assert (mode(root), umask()) == (after, below), "a restart changes nothing"


def test_a_store_of_another_user_is_used_as_it_is_and_a_warning_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made(tmp_path / "volume", 0o2775)

    def refused(path: Path, _mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "chmod", refused)
    (said,) = started(root)
    assert "Operation not permitted" in said
    assert str(root) in said
    assert mode(root) == 0o2775
    assert umask() == 0o027, "the group of the volume reads new files, others do not"


def test_a_store_that_is_made_later_is_for_its_owner_only(tmp_path: Path) -> None:
    limit_new_files(tmp_path / "store")
    assert umask() == 0o077


def _state(path: Path) -> None:
    directory.make_data_directory(path / "data")
    directory.write_state(path / "data", {"pid": 1})


def _ready(path: Path) -> None:
    server = cluster_pb2.Server(address="here:1", server_id="s")
    ReadyFile(str(path / "ready.json")).write(server, HostPort("here", 1), None)


def _traced(path: Path) -> None:
    trace.trace_to(path / "trace")
    handler = trace.logger.handlers.pop()
    handler.close()


def _exported(path: Path) -> None:
    # A release that made files for everybody left this one.
    (path / "table").mkdir(mode=0o700)
    export_files.unfinished(path / "table" / "part").touch(mode=0o666)
    export_files.write_record(path / "table" / "part", {"cells": 1})
    export_files.write_record(path / "other table" / "part", {"cells": 1})


WRITERS: dict[str, Callable[[Path], object]] = {
    "certificates": lambda path: make_all(path / "certificates"),
    "a data directory": _state,
    "a ready file": _ready,
    "a trace": _traced,
    "an export": _exported,
    "the file of a queue": lambda path: ExportFile(path / "queue").append([]),
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_what_is_written_is_for_its_owner_only(
    tmp_path: Path, writer: Callable[[Path], object]
) -> None:
    writer(tmp_path)
    assert wider_than_private(tmp_path) == {}


def wider_than_private(root: Path) -> dict[str, str]:
    """The files and directories below that anybody but their owner has access to."""
    found = list(root.rglob("*"))
    assert found
    return {
        str(path.relative_to(root)): oct(mode(path))
        for path in found
        if not path.is_symlink() and mode(path) & 0o077
    }


def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "queue"
    path.touch(mode=0o640)
    with open(path, "ab", opener=private_opener):
        assert mode(path) == 0o640


def test_the_directories_of_an_old_local_cluster_are_closed(tmp_path: Path) -> None:
    directory.make_data_directory(tmp_path)
    for part in ("store", "logs", "run"):
        (tmp_path / part).chmod(0o755)
    directory.make_data_directory(tmp_path)
    assert {mode(tmp_path / part) for part in ("store", "logs", "run")} == {0o700}
