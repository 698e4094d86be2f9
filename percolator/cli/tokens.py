"""`percolator tokens`: makes the secrets with which clients prove their role."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from percolator.cli.connection import connection, fail
from percolator.errors import InvalidArgument
from percolator.process import private_opener
from percolator.wire.tokens import ROLES, new_token, token_entry


class TokenRole(StrEnum):
    """A role, as written on the command line."""

    CLIENT = "client"
    ADMIN = "admin"


app = typer.Typer(no_args_is_help=True, help="Make tokens for clients.")


@app.command()
def new(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Who it belongs to.", show_default=False)],
    file: Annotated[Path, typer.Option(help="Where to write the token; must not exist yet.")],
    role: Annotated[TokenRole, typer.Option(help="What it allows.")] = TokenRole.CLIENT,
) -> None:
    """Write a new token to a file, and print the entry for the servers' file of tokens.

    The token itself is never printed.
    """
    try:
        token = new_token()
        entry = token_entry(name, ROLES[role.value], token)
        _write_secret(file, token)
    except InvalidArgument as error:
        fail(error)
    shown = Text(entry.rstrip())
    connection(context).show({"name": name, "role": role.value, "entry": entry}, shown)


def _write_secret(path: Path, token: str) -> None:
    try:
        file = open(path, "x", encoding="ascii", opener=private_opener)  # noqa: SIM115
    except OSError as error:
        raise InvalidArgument("--file", f"{path}: {error.strerror}") from None
    with file:
        file.write(token + "\n")
