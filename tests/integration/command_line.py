"""The command line, run in this process: starting another takes longer than the command itself."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import Result

from percolator.cli.app import app
from tests.command_line import CliRunner


class CommandLine:
    """Runs commands against one cluster. While an event loop runs, they need their own thread."""

    def __init__(self, address: str) -> None:
        self._address = address

    def run(self, *arguments: str, code: int = 0) -> Result:
        """Runs a command. Fails unless it exits with this code."""
        done = CliRunner().invoke(app, ["--address", self._address, *arguments])
        assert done.exit_code == code, done.output
        return done

    def text(self, *arguments: str, code: int = 0) -> str:
        return self.run(*arguments, code=code).stdout

    def data(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.text("--json", *arguments, code=code))

    def error(self, *arguments: str, code: int) -> str:
        """The one line on standard error."""
        done = self.run(*arguments, code=code)
        assert len(done.stderr.strip().splitlines()) == 1
        return done.stderr
