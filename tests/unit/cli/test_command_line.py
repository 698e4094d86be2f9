"""The parts of the command line that need no cluster."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from percolator.cli import app as program
from percolator.cli.app import app
from percolator.cli.connection import plain
from percolator.cli.options import timestamp_of
from percolator.cli.sessions import _as_table
from percolator.cli.status import Overview, _as_text
from percolator.codecs.readable import row_bytes, row_text
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.v1.lockservice_pb2 import Session, SessionInfo
from percolator.v1.master_pb2 import DescribeCollectionResponse
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


@given(st.binary(max_size=40))
def test_every_row_is_read_back_from_the_text_that_shows_it(row: bytes) -> None:
    assert row_bytes("row", row_text(row)) == row
    assert row_text(row).isprintable()


@given(
    st.text(st.characters(codec="utf-8"), max_size=40).filter(
        lambda text: not text.startswith("hex:")
    )
)
def test_a_row_of_text_is_written_as_that_text(text: str) -> None:
    assert row_bytes("row", text) == text.encode()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tables", "create", "t", "--split", "hex:0"], "--split"),
        (["tables", "create", "t", "--split", "hex:0g"], "--split"),
        (["tables", "create", "t", "--retention", "-1"], "--retention"),
        (["tables", "create", "t", "--retention", "1e300"], "--retention"),
        (["tables", "create", "t", "--retention", "nan"], "--retention"),
        (["tables", "create", "t", "--split-mib", "99999999999999"], "--split-mib"),
        (["tablets", "split", "7", "--row", "hex:xyz"], "--row"),
        (["tablets", "split", "0"], "tablet"),
        (["wait", "--timeout", "0"], "--timeout"),
        (["notifications", "--limit", "0"], "--limit"),
        (["notifications", "--follow", "--count"], "--count"),
        (["tablets", "split", "99999999999999999999999"], "tablet"),
        (["tablets", "move", "seven"], "tablet"),
        (["tables", "change-feed", "t"], "--on"),
        (["tables", "change-feed", "t", "--on", "--off"], "--on"),
        (["changes", "t"], "--after"),
        (["changes", "t", "--after", "soon"], "--after"),
        (["changes", "t", "--after", "5", "--until", "2027-01-15T08:00:00"], "--until"),
        (["changes", "t", "--follow", "--until", "5"], "--until"),
    ],
)
def test_bad_input_names_the_option_and_exits_with_2(arguments: list[str], named: str) -> None:
    result = run.invoke(app, arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_no_table_is_deleted_without_confirmation() -> None:
    result = run.invoke(app, ["tables", "delete", "t"], input="n\n")
    assert result.exit_code == 2
    assert "Delete the table 't'" in result.output


def test_without_a_terminal_the_option_that_confirms_is_named() -> None:
    result = run.invoke(app, ["tables", "delete", "t"], input="")
    assert result.exit_code == 2
    assert "Without a terminal, answer with --yes" in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["pins", "create", "--for", "soon"], "--for"),
        (["pins", "create", "--for", "-1h"], "--for"),
        (["pins", "create", "--at", "yesterday"], "'yesterday' is neither"),
        (["pins", "create", "--at", "2026-01-01T00:00:00"], "no time zone"),
        (["pins", "release", "zz"], "session_id: expected 32 hexadecimal digits"),
        (["history", "accounts", "hex:0"], "row: expected pairs"),
        (["export", "a", "b"], "expected one directory"),
        (["export", "verify"], "verify needs a directory"),
        (["export", ""], "DIR: is empty"),
        (["export", "verify", ""], "DIR: is empty"),
        (["import", ""], "DIR: is empty"),
        (["import", "--abandon", ""], "DIR: is empty"),
        (["export", "verify", "a", "--at", "1"], "it takes neither --at nor --table"),
    ],
)
def test_a_wrong_command_names_what_is_wrong(arguments: list[str], named: str) -> None:
    result = run.invoke(app, arguments)
    assert result.exit_code == 2
    assert named in " ".join(result.output.split())


def test_a_directory_that_holds_no_export_is_refused_by_name(tmp_path: Path) -> None:
    result = run.invoke(app, ["export", "verify", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no export" in " ".join(result.output.split())


def test_without_a_terminal_an_export_says_on_standard_error_only_what_is_wrong(
    tmp_path: Path,
) -> None:
    """A line of a progress bar, even an empty one, would be mail from cron after each backup."""
    result = run.invoke(app, ["export", "verify", str(tmp_path)])
    [line] = result.stderr.splitlines()
    assert line.startswith("error: directory: ")


@pytest.mark.parametrize("command", ["pins", "gc", "history", "export", "import"])
def test_commands_about_history_explain_themselves(command: str) -> None:
    result = run.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert len(result.output) > 200


@pytest.mark.parametrize("ago", ["-", "-5x", "-0s", "--5m", "-inf", "-nans", "-99999999999d"])
def test_a_time_ago_that_is_none_is_refused_by_name(ago: str) -> None:
    result = run.invoke(app, ["--address", "127.0.0.1:1", "get", "t", "a", "--at", ago])
    assert result.exit_code == 2
    assert "--at" in result.output


def test_a_time_ago_is_a_moment_before_now() -> None:
    now = datetime.now(UTC)
    found = timestamp_of("-5m")
    assert found is not None
    assert abs((now - found.to_datetime()).total_seconds() - 300) < 60


@pytest.mark.parametrize("command", ["pins", "dead-letters"])
def test_a_group_without_a_subcommand_lists(command: str) -> None:
    result = run.invoke(app, ["--address", "127.0.0.1:1", "--timeout", "0.1", command])
    assert result.exit_code == 1
    assert "Usage" not in result.output


DAY_MILLISECONDS = 86_400_000


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ({}, ""),
        ({"held_by": "a report", "held_milliseconds": DAY_MILLISECONDS}, ""),
        (
            {"held_by": "a report", "held_milliseconds": 2 * DAY_MILLISECONDS},
            "a report holds back history for 2 days, 0:00:00 longer than tables keep it",
        ),
        ({"age_milliseconds": 3_600_000}, ""),
        (
            {"age_milliseconds": 7_200_000, "error": ErrorDetail(message="tablet 3 is gone")},
            "no history was collected for 2:00:00: tablet 3 is gone",
        ),
    ],
)
def test_status_names_what_has_held_collection_back_for_too_long(
    history: dict[str, Any], problem: str
) -> None:
    described = DescribeCollectionResponse(**history)
    found = Overview(DescribeResponse(), history=described).problems()
    told = [one for one in found if "history" in one]
    assert len(told) == bool(problem)
    assert all(one.startswith(problem) for one in told)
