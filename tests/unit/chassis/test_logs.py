"""Logs: one line per event, JSON unless a human reads them on a terminal.

Why a service did not start, and whether another attempt may succeed.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import structlog

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
from percolator.services.chassis import lifecycle
from percolator.services.chassis.lifecycle import may_pass, one_line
from percolator.services.chassis.server import CannotListen
from percolator.services.chassis.settings import ServiceSettings
from percolator.services.master.service import MasterSettings
from percolator.services.worker.service import WorkerSettings


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_every_event_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    lifecycle.configure_logs("oracle", "auto", "info")
    structlog.get_logger("percolator.oracle").info("mark extended", mark=7, text="two\nlines")
    logging.getLogger("another.package").warning("of %s", "another package")
    try:
        dict[str, str]()["why"]
    except KeyError:
        structlog.get_logger("percolator.oracle").exception("failed")
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [entry["event"] for entry in entries] == [
        "mark extended",
        "of another package",
        "failed",
    ]
    assert {entry["service"] for entry in entries} == {"oracle"}
    assert entries[0]["mark"] == 7
    assert entries[0]["level"] == "info"
    assert entries[1]["logger"] == "another.package"
    assert "KeyError: 'why'" in entries[2]["exception"]
    assert all(entry["timestamp"].endswith("Z") for entry in entries)


def test_values_that_are_no_json_are_logged_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lifecycle.configure_logs("oracle", "json", "info")
    structlog.get_logger("percolator.oracle").info("odd", key=b"\xff", thing=object())
    assert "xff" in json.loads(capsys.readouterr().err)["key"]


@pytest.mark.parametrize("log_format", ["json", "human"])
def test_a_traceback_with_a_huge_message_is_shortened(
    log_format: Literal["json", "human"], capsys: pytest.CaptureFixture[str]
) -> None:
    lifecycle.configure_logs("worker", log_format, "info")
    try:
        dict[str, str]()["x" * 1_000_000]
    except KeyError:
        logging.getLogger("percolator.observers").warning("failed", exc_info=True)
    written = capsys.readouterr().err
    assert len(written) < 40_000
    assert "test_a_traceback_with_a_huge_message_is_shortened" in written
    assert "KeyError: 'xxx" in written
    assert "characters left out" in written


def test_a_caller_that_left_before_its_answer_was_sent_is_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """gRPC logs it with a traceback: any caller could fill the disk."""
    lifecycle.configure_logs("oracle", "json", "info")
    grpc = logging.getLogger("grpc._cython.cygrpc")
    grpc.error("ExecuteBatchError raised in core by servicer method [%s]", "/a/B")
    assert capsys.readouterr().err == ""
    grpc.error("Unexpected [%s] raised by servicer method [%s]", "KeyError", "/a/B")
    assert "KeyError" in capsys.readouterr().err


def test_less_important_lines_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    lifecycle.configure_logs("oracle", "json", "warning")
    structlog.get_logger("percolator.oracle").info("chatter")
    logging.getLogger("another.package").info("chatter")
    structlog.get_logger("percolator.oracle").warning("news")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["news"]


def test_humans_get_text(capsys: pytest.CaptureFixture[str]) -> None:
    lifecycle.configure_logs("oracle", "human", "info")
    structlog.get_logger("percolator.oracle").info("mark extended", mark=7)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "mark extended" in line
    assert "mark=7" in line
    assert not line.startswith("{")


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_a_traceback_shows_no_values(
    log_format: Literal["human", "json"], capsys: pytest.CaptureFixture[str]
) -> None:
    """Local variables hold tokens, keys and what users have stored."""
    lifecycle.configure_logs("oracle", log_format, "info")
    token = "".join(["s3", "cret"])
    try:
        dict[str, str]()["why"]
    except KeyError:
        structlog.get_logger("percolator.oracle").exception("failed")
    said = capsys.readouterr().err
    assert "KeyError" in said
    assert token not in said


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
