"""Commands about history and exports report bad input before they contact the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from percolator.cli.app import app
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


@pytest.mark.parametrize("command", ["pins", "gc", "history", "export", "import"])
def test_every_command_explains_itself(command: str) -> None:
    result = run.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert len(result.output) > 200
