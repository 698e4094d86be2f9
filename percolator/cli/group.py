"""The group of all commands: what is wrong with their arguments ends in one line, never in a
traceback."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from percolator.cli.connection import fail
from percolator.errors import InvalidArgument, PercolatorError


class Commands(TyperGroup):
    """Reports errors that a command itself did not report.

    Python passes on arguments that are not UTF-8 as text that cannot be encoded as UTF-8. Paths may
    be such arguments, but names and rows may not.
    """

    def invoke(self, context: Any) -> Any:  # noqa: ANN401 - click's, wherever typer has it from
        try:
            return super().invoke(context)
        except PercolatorError as error:
            fail(error)
        except UnicodeEncodeError as error:
            if error.encoding != "utf-8" or error.reason != "surrogates not allowed":
                raise
            text = f"{error.object!r} cannot be encoded as UTF-8"
            fail(InvalidArgument("arguments", text))
