"""Commands about history and exports report bad input before they contact the cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from percolator.cli.app import app
from percolator.cli.cells import moment_of
from percolator.cli.overview import Overview
from percolator.v1.cluster_pb2 import DescribeResponse
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.v1.master_pb2 import DescribeCollectionResponse
from tests.command_line import CliRunner

run = CliRunner()


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
def test_every_command_explains_itself(command: str) -> None:
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
    found = moment_of("-5m")
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
