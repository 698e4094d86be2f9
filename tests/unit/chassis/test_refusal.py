"""Why a service did not start, and whether another attempt may succeed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from percolator.errors import (
    InvalidArgument,
    NotReady,
    Overloaded,
    StoreFault,
    StoreUnusable,
    Unavailable,
    UsageError,
    WrongCluster,
)
from percolator.services.chassis.lifecycle import may_pass, one_line
from percolator.services.chassis.server import CannotListen
from percolator.services.chassis.settings import ServiceSettings
from percolator.services.master.service import MasterSettings
from percolator.services.worker.service import WorkerSettings


@pytest.mark.parametrize(
    "error",
    [
        NotReady("no master leads"),
        Overloaded("full", retry_after_seconds=1.0),
        Unavailable("refused"),
        StoreUnusable("no room", fault=StoreFault.DISK_FULL),
        StoreUnusable("a bad block", fault=StoreFault.INPUT_OUTPUT),
        OSError(errno.EIO, "a bad block"),
        OSError(errno.ENOSPC, "no room"),
        OSError(errno.EMFILE, "too many open files"),
    ],
    ids=repr,
)
def test_what_may_pass_by_itself_is_worth_another_start(error: Exception) -> None:
    assert may_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("listen", "is no address"),
        UsageError("in use by another oracle"),
        WrongCluster("another", expected="a", found="b"),
        StoreUnusable("a wrong checksum", fault=StoreFault.DAMAGED),
        StoreUnusable("mounted read-only", fault=StoreFault.READ_ONLY),
        FileNotFoundError(errno.ENOENT, "no such directory"),
        PermissionError(errno.EACCES, "permission denied"),
        CannotListen("address already in use"),
    ],
    ids=repr,
)
def test_what_an_operator_has_to_change_is_not(error: Exception) -> None:
    assert not may_pass(error)


WORKER = WorkerSettings(masters=("localhost:7100",), observers=("shop:all",), trace_file=Path("t"))


@pytest.mark.parametrize(
    ("settings", "setting", "path"),
    [
        (MasterSettings(store="data"), "store", Path("data") / "1"),
        (MasterSettings(store="/data"), "store", Path("/data/1")),
        (MasterSettings(store="/data", ready_file="here"), "ready_file", Path("here.new")),
        (WORKER, "trace_file", Path("t")),
    ],
)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_the_setting_that_has_to_be_changed_is_named(
    settings: ServiceSettings, setting: str, path: Path, is_absolute: bool
) -> None:
    """Some parts of a service make a relative path absolute, others do not."""
    path = path.absolute() if is_absolute else path
    error = PermissionError(errno.EACCES, "Permission denied", str(path))
    assert one_line(error, settings) == f"{setting}: {path}: Permission denied"
