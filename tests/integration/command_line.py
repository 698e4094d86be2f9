"""The command line, in this process: starting another one takes longer than all that it does."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import Result

from percolator.cli.app import app
from tests.command_line import CliRunner


class CommandLine:
    """What the commands print at one cluster. Beside a running loop, they need a thread."""

    def __init__(self, address: str) -> None:
        self._address = address

    def run(self, *arguments: str, code: int = 0) -> Result:
        """Fails unless it exits with this code."""
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
