"""Commands that run services: they are found by their names, since the library knows no services
and works without what they need."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from percolator.cli.connection import confirm, connection, fail
from percolator.cli.options import not_empty
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


def certs(
    context: typer.Context,
    directory: Annotated[
        str, typer.Argument(help="Directory to write them to.", callback=not_empty)
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Replace existing ones without asking.")
    ] = False,
) -> None:
    """Create certificates and tokens for development (`percolator-store[server]`).

    Writes an authority, certificates for servers and clients that are valid for a year, tokens,
    and client.env, which a shell reads to use them. Existing ones are replaced.
    """
    if missing := import_module("percolator.services.serve").absent(["cryptography"]):
        fail(UsageError(f"`percolator certs` needs {missing}"))
    authority, where = import_module("percolator.services.local.authority"), Path(directory)
    if authority.key_file(where).exists() and not yes:
        confirm(f"Replace all certificates below {where}? The present ones will be refused.")
    try:
        authority.make_all(where)
    except OSError as error:
        fail(UsageError(f"directory: cannot write {error.filename}: {error.strerror}"))
    shell = authority.environment_file(where)
    connection(context).show(
        {"directory": str(where), "client_env": str(shell)},
        f"`percolator dev --certificates {where}` uses them, and programs after `. {shell}`.",
    )
