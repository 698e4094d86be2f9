"""Why a service did not start, and whether another attempt may succeed."""

from __future__ import annotations

import errno

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
from services.chassis.refusal import may_pass
from services.chassis.serving.server import CannotListen


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
