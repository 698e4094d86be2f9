"""Commands that run services: they are found by their names, since the library knows no services
and works without what they need."""

from __future__ import annotations

from importlib import import_module

import typer

from percolator.cli.connection import connection, fail
from percolator.errors import UsageError

AS_THEY_ARE = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Options, even `--help`, are those of the other command."""


def dev(context: typer.Context) -> None:
    """Start a whole cluster on this machine, for development (`percolator-store[server]`)."""
    serve = import_module("percolator.services.serve")
    # Looked for before the services are imported: they would only say which import failed.
    if missing := serve.absent(serve.NEEDED):
        fail(UsageError(f"`percolator dev` needs {missing}"))
    # The global option is taken from wherever it was given: the other command has its own.
    as_json = ["--json"] if connection(context).as_json else []
    command = import_module("percolator.services.local.command")
    command.main([*context.args, *as_json], context.command_path)


def serve(context: typer.Context) -> None:
    """Run one service of a cluster, such as an oracle (`percolator-store[server]`)."""
    raise typer.Exit(import_module("percolator.services.serve").main(context.args))
