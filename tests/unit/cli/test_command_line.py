"""The parts of the command line that need no cluster."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from percolator.cli import app as program
from percolator.cli.app import app
from percolator.cli.connection import plain
from percolator.cli.overview import Overview
from percolator.cli.sessions import _as_table
from percolator.cli.status import _as_text
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind
from percolator.v1.lockservice_pb2 import Session, SessionInfo
from tests.command_line import CliRunner

run = CliRunner()


def test_a_timestamp_is_decoded_to_its_time_and_sequence() -> None:
    result = run.invoke(app, ["--json", "timestamp", "decode", str((1_800_000_000_000 << 18) | 7)])
    assert result.exit_code == 0
    assert json.loads(result.output) == {
        "timestamp": str((1_800_000_000_000 << 18) | 7),
        "time": "2027-01-15T08:00:00.000Z",
        "physical_milliseconds": 1_800_000_000_000,
        "sequence": 7,
    }


def test_garbage_collections_of_a_command_skip_what_it_has_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipped = []
    monkeypatch.setattr(program, "app", lambda args: skipped.append(gc.get_freeze_count()))
    monkeypatch.setattr(sys, "argv", ["percolator", "timestamp"])
    gc.unfreeze()
    program.main()
    assert skipped > [0]


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (">/dev/full", 1, "error: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
    ],
)
@pytest.mark.parametrize("arguments", ["timestamp decode 7", "--json timestamp decode 7", "--help"])
def test_output_that_cannot_be_written_is_no_traceback(
    output: str, code: int, said: str, arguments: str
) -> None:
    command = f"{sys.executable} -m percolator.cli {arguments} {output}"
    done = subprocess.run(
        command, shell=True, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", r"\xe9\u4e2d"), ("latin-1", "\u00e9\\u4e2d")]
)
def test_what_the_encoding_of_a_locale_lacks_is_shown_escaped(
    tmp_path: Path, encoding: str, shown: str
) -> None:
    """Rows and names may be in any language, whatever the reader's locale can express."""
    line: dict[str, object] = dict.fromkeys(("rows_read", "round_trips", "written", "locked"), 1)
    line |= {"table": "t", "observer": "o", "row": "\u00e9\u4e2d", "ended": "committed"}
    line |= {"changes": [7], "start": 8, "commit": 9, "seconds": 0.1, "cpu_seconds": 0.1}
    (tmp_path / "trace").write_text(json.dumps(line) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "percolator.cli", "observers", "trace", tmp_path / "trace"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert f"o of {shown}" in done.stdout.decode(encoding)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["tables", "create", "NAME"], "arguments"),
        (["tables", "create", "orders", "--split", "NAME"], "--split"),
        (["tablets", "--table", "NAME"], "arguments"),
        (["locks", "orders", "NAME"], "row"),
        (["servers", "drain", "NAME"], "arguments"),
        (["observers", "pause", "orders", "NAME"], "arguments"),
    ],
)
def test_an_argument_that_is_not_utf8_is_refused_in_one_line_that_shows_it(
    arguments: list[str], field: str
) -> None:
    """Python passes bytes that are not UTF-8 on as text that cannot be encoded."""
    given = ["a\udcffb" if one == "NAME" else one for one in arguments]
    result = run.invoke(app, ["--address", "127.0.0.1:1", *given])
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: {field}: 'a\\udcffb' cannot be encoded as UTF-8")


def test_a_moment_is_turned_into_its_first_timestamp() -> None:
    result = run.invoke(app, ["--json", "timestamp", "decode", "2027-01-15T08:00:00Z"])
    assert json.loads(result.output)["timestamp"] == str(1_800_000_000_000 << 18)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--address", "", "status"], "--address"),
        (["--address", "nowhere", "status"], "--address"),
        (["--address", "host:0", "status"], "--address"),
        (["--address", "host:7100,,host:7101", "status"], "--address"),
        (["observers", "backfill", "t", "o", "--to", "hex:0"], "--to"),
        (["timestamp", "--count", "0"], "--count"),
        (["timestamp", "--count", "-1"], "--count"),
        (["timestamp", "--count", "1000001"], "--count"),
        (["timestamp", "decode", "soon"], "timestamp"),
        (["timestamp", "decode", "2027-01-15T08:00:00"], "time zone"),
        (["timestamp", "decode", str(1 << 64)], "timestamp"),
        (["get", "t", "a", ""], "columns"),
        (["get", "t", "a", "c" * 256], "columns"),
        (["get", "t", "a", "hex:00ff"], "columns"),
        (["delete", "t", "a", ""], "columns"),
        (["delete", "t", "a", "hex:00ff"], "columns"),
        (["scan", "t", "--column", ""], "--column"),
        (["set", "t", "a", "c" * 256 + "=1"], "cells"),
        (["set", "t", "a", "hex:00ff=1"], "cells"),
    ],
)
def test_bad_input_names_the_field_and_exits_with_2(arguments: list[str], named: str) -> None:
    result = run.invoke(app, arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["get", "t", "a", "--at", ""], "--at"),
        (["scan", "t", "--at="], "--at"),
        (["export", "--at", "", "d"], "--at"),
        (["pins", "create", "--at", ""], "--at"),
        (["changes", "t", "--follow", "--after", ""], "--after"),
        (["changes", "t", "--after", "1", "--until", ""], "--until"),
        (["history", "t", "a", ""], "column"),
        (["tablets", "--table", ""], "--table"),
        (["tablets", "move", "1", "--to", ""], "--to"),
        (["notifications", "--observer", ""], "--observer"),
        (["observers", "list", "--table", ""], "--table"),
        (["observers", "stats", "--observer", ""], "--observer"),
        (["dead-letters", "retry", "--table", "", "--observer", "o"], "--table"),
        (["dead-letters", "clear", "--yes", "--table", "t", "--observer", ""], "--observer"),
        (["export", "d", "--table", ""], "--table"),
        (["import", "d", "--table", ""], "--table"),
        (["pins", "create", "--for", ""], "--for"),
    ],
)
def test_a_variable_of_the_shell_that_is_not_set_does_not_widen_a_command(
    arguments: list[str], named: str
) -> None:
    """Without the refusal an empty value would mean all tables, or now."""
    result = run.invoke(app, ["--address", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    assert result.stderr == f"error: {named}: is empty: give a value, or leave it out\n"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["status", "--watch", "--every", "inf"], "--every"),
        (["top", "--every", "1e15"], "--every"),
        (["top", "--times", "0"], "--times"),
    ],
)
def test_a_pause_that_never_ends_is_refused(arguments: list[str], option: str) -> None:
    """Such a pause cannot be slept, and no refresh at all is not until Ctrl-C."""
    result = run.invoke(app, ["--address", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


def test_the_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERCOLATOR_ADDRESS", "host;7100")
    result = run.invoke(app, ["status"])
    assert result.exit_code == 2
    assert "PERCOLATOR_ADDRESS" in result.output


def test_every_command_explains_itself() -> None:
    commands: tuple[list[str], ...] = (
        [],
        ["status"],
        ["sessions"],
        ["timestamp"],
        ["timestamp", "decode"],
        ["observers"],
        ["observers", "backfill"],
        ["notifications"],
        ["wait"],
    )
    for command in commands:
        result = run.invoke(app, [*command, "--help"])
        assert result.exit_code == 0
        assert "Usage:" in result.output


HOSTILE = "[/red] \x1b[2J\r\n\u202e"
"""Markup that closes nothing, terminal control codes, more lines, and right-to-left text."""
HARMLESS = r"[/red] \x1b[2J\r\n\u202e"


def printed(shown: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_text_that_others_wrote_is_shown_without_taking_effect() -> None:
    """Any client may open a session, or register a server, under any description."""
    session = Session(session_id=b"x" * 16, info=SessionInfo(description=HOSTILE))
    server = Server(kind=ServiceKind.SERVICE_KIND_WORKER, address=HOSTILE, version=HOSTILE)
    cluster = DescribeResponse(cluster_id=HOSTILE, servers=[server])
    assert printed(plain(HOSTILE)).strip() == HARMLESS
    assert printed(_as_table([session])).count(HARMLESS) == 1
    assert printed(_as_text(Overview(cluster))).count(HARMLESS) == 3


@pytest.mark.parametrize("form", [["--json"], []])
def test_what_is_shown_a_number_of_times_fails_if_the_last_time_did(form: list[str]) -> None:
    there = ["--address", "127.0.0.1:1", *form]
    result = run.invoke(app, [*there, "top", "--times", "2", "--every", "0.2"])
    assert result.exit_code == 1
    assert result.output.count("failed to connect") == 2
