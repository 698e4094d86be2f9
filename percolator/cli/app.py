"""The top-level command and its global options."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from gc import freeze
from io import TextIOWrapper
from itertools import takewhile
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import percolator
from percolator.cli import (
    backup,
    dev,
    notifications,
    observers,
    pins,
    rows,
    sessions,
    status,
    store,
    tables,
    tablets,
    tokens,
    top,
    worker,
)
from percolator.cli.connection import errors_console, fail, make_connection, plain
from percolator.errors import InvalidArgument, PercolatorError


class Commands(TyperGroup):
    """The group of all commands: an error that a command did not report ends in one line, never in
    a traceback.

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


_JSON = "--json"
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    name="percolator",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    # Local variables hold tokens and users' data: a traceback must not show them.
    pretty_exceptions_show_locals=False,
    help="Transactions and observers over a cluster of tablet servers.",
    epilog="Exit codes: 0 success; 1 the cluster refused or did not answer; 2 the command was "
    "wrong; 3 `status --check` found something wrong.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(percolator.__version__)
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
    as_json: Annotated[
        bool, typer.Option(_JSON, help="Print JSON, for programs. May be given anywhere.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    context.obj = make_connection(address, timeout, as_json)


for _command in (dev.dev, dev.serve):
    app.command(context_settings=dev.AS_THEY_ARE, add_help_option=False)(_command)
app.command()(dev.certs)
app.add_typer(pins.timestamp_app, name="timestamp")
app.add_typer(tables.app, name="tables")
app.add_typer(tablets.app, name="tablets")
app.add_typer(tablets.servers_app, name="servers")
app.add_typer(observers.app, name="observers")
app.add_typer(tables.index_app, name="index")
app.command("notifications")(notifications.notifications)
app.add_typer(notifications.app, name="dead-letters")
app.command("wait")(notifications.wait)
app.command("worker")(worker.worker)
app.command("get")(rows.get)
app.command("set")(rows.set_cells)
app.command("delete")(rows.delete)
app.command("scan")(rows.scan)
app.command("find")(rows.find)
app.command("changes")(rows.changes)
app.command("locks")(sessions.locks)
app.add_typer(tokens.app, name="token")
app.command("export")(backup.export)
app.command("import")(backup.import_export)
app.command("history")(rows.history)
app.add_typer(pins.app, name="pins")
app.add_typer(pins.gc_app, name="gc")
app.command("sessions")(sessions.sessions)
app.command("status")(status.status)
app.add_typer(store.app, name="store")
app.command("top")(top.top)


def main() -> None:
    """The entry point of the `percolator` script."""
    # What was imported stays: to look through it again, above all at the exit, took a sixth of the
    # CPU time of a short command.
    freeze()
    if isinstance(sys.stdout, TextIOWrapper):
        # Rows and names may be in any language, whatever the reader's locale can express.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app(args=json_first(sys.argv[1:]))
        except SystemExit as ended:
            _exit_before_threads_of_obstore(ended.code)
            raise
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        text = plain(f"error: the output cannot be written: {error.strerror}")
        errors_console.print(text, highlight=False, soft_wrap=True)
        with suppress(OSError):
            # At the exit, Python would write what is left, and report that as an exception.
            sys.stdout.close()
        sys.exit(1)


def _exit_before_threads_of_obstore(code: object) -> None:
    """Ends the process at once if the package was used that speaks to buckets.

    Its threads may still be letting go of Python's objects. One that needs the interpreter for that
    while Python is ending aborts the process, which happened at every tenth exit on a busy machine.
    """
    if "obstore" in sys.modules:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # either may be closed
            stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def json_first(arguments: Sequence[str]) -> list[str]:
    """Moves `--json` to the front, since people write `percolator status --json`.

    Arguments after `--` belong to another command and stay where they are.
    """
    options = list(takewhile(lambda one: one != "--", arguments))
    others = [one for one in options if one != _JSON]
    asked = [_JSON] if len(others) < len(options) else []
    return [*asked, *others, *arguments[len(options) :]]
