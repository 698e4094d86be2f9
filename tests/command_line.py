"""`CliRunner`, which runs the command line in this process, as often as tests need it."""

from __future__ import annotations

import functools

import typer.main
import typer.testing
from typer.testing import CliRunner

# Rebuilding the tree of commands from annotations would take nine tenths of each run.
vars(typer.testing)["_get_command"] = functools.cache(typer.main.get_command)

__all__ = ["CliRunner"]
