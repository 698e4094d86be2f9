"""import.log: what an import has noted is found again, and a full disk ends no import."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from percolator.aio.bulk_load import LoadTimestamps
from percolator.backup.import_log import open_log

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
        log.remove()
    assert list(tmp_path.iterdir()) == []
