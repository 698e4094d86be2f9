"""import.log: what an import has noted is found again, and a full disk ends no import."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from percolator.aio.bulk_load import LoadTimestamps
from percolator.backup import export_files
from percolator.backup.importer import open_log
from percolator.errors import InvalidArgument, UsageError

NOTED = LoadTimestamps(3, 4)


def test_an_import_whose_disk_is_full_goes_on_and_can_be_resumed_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_log(tmp_path) as log:
        log.begun("t", NOTED)
        log.loaded("t", "t/part-00000.jsonl")
        monkeypatch.setattr(os, "fsync", refuse)
        log.loaded("t", "t/part-00001.jsonl")
        log.loaded("t", "t/part-00002.jsonl")
        assert len(log.tables["t"].parts) == 3
    assert [one.message for one in caplog.records] == [
        "the import's progress cannot be written down any more, so part of it is repeated if it is "
        "interrupted: [Errno 28] No space left on device"
    ]
    with open_log(tmp_path) as again:
        assert again.tables["t"].timestamps == NOTED
        assert again.tables["t"].parts >= {"t/part-00000.jsonl"}
        assert "t/part-00002.jsonl" not in again.tables["t"].parts


def test_an_import_whose_disk_was_full_leaves_no_log_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_log(tmp_path) as log:
        with monkeypatch.context() as failing:
            failing.setattr(os, "fsync", refuse)
            log.begun("t", NOTED)
        log.remove(["t"])
    assert list(tmp_path.iterdir()) == []


def test_a_log_is_locked_on_nfs_too_which_locks_only_what_is_open_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct = fcntl.flock

    def as_on_nfs(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        correct(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    with (
        open_log(tmp_path),
        pytest.raises(UsageError, match="another process is importing, according to"),
        open_log(tmp_path),
    ):
        pass


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(InvalidArgument, match=r"import\.log cannot be locked: .*No locks available"),
        open_log(tmp_path),
    ):
        pass
    with (
        pytest.raises(InvalidArgument, match=f"{tmp_path} cannot be locked"),
        export_files.locked(tmp_path, "exporting to"),
    ):
        pass
