"""The top-level command and its global options."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from percolator.cli import servers, sessions, status, tables, tablets, timestamp
from percolator.cli.connection import make_connection

app = typer.Typer(
    name="percolator",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Transactions and observers over a cluster of tablet servers.",
    epilog="Exit codes: 0 done; 1 the cluster refused or did not answer; 2 the command was wrong.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("percolator-store"))
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Option(
            help="host:port of any master or gateway, several separated by commas "
            "[default: $PERCOLATOR_ADDRESS or localhost:7100]",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for an answer.", min=0.001, max=3600)
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    context.obj = make_connection(address, timeout, as_json)


app.add_typer(timestamp.app, name="timestamp")
app.add_typer(tables.app, name="tables")
app.add_typer(tablets.app, name="tablets")
app.add_typer(servers.app, name="servers")
app.command("sessions")(sessions.sessions)
app.command("status")(status.status)


def main() -> None:
    """The entry point of the `percolator` script."""
    app()
