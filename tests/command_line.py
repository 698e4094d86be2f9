"""`CliRunner`, which runs the command line within this process, as often as tests want."""

from __future__ import annotations

import functools

import typer.main
import typer.testing
from typer.testing import CliRunner

# Made anew from annotations for each run, the tree of commands is nine tenths of what one takes.
vars(typer.testing)["_get_command"] = functools.cache(typer.main.get_command)

__all__ = ["CliRunner"]
