"""`percolator tables`: creates, lists, describes and deletes tables."""

from __future__ import annotations

from math import ceil
from typing import Annotated

import typer
from rich.table import Table as Screen

from percolator.arguments import require_no_internal_name
from percolator.cli.connection import confirm, connection, fail, plain
from percolator.cli.masters import ask_master
from percolator.errors import InvalidArgument
from percolator.row_text import row_bytes
from percolator.v1 import master_pb2 as wire
from percolator.wire import methods

app = typer.Typer(no_args_is_help=True, help="Create, list, describe and delete tables.")

_RETENTION_SECONDS_MAX = 100 * 366 * 86_400

Name = Annotated[str, typer.Argument(help="The table.", show_default=False)]


@app.command()
def create(
    context: typer.Context,
    name: Name,
    split: Annotated[
        list[str] | None,
        typer.Option(help="The first row of a further tablet; repeatable, in ascending order."),
    ] = None,
    retention: Annotated[
        float,
        typer.Option(
            help="Seconds that old versions are kept; 0: the cluster's default.",
            min=0,
            max=_RETENTION_SECONDS_MAX,
        ),
    ] = 0.0,
    split_mib: Annotated[
        int,
        typer.Option(
            help="Size in MiB above which tablets are split; 0: the cluster's default.",
            min=0,
            max=1 << 30,
        ),
    ] = 0,
    change_feed: Annotated[
        bool, typer.Option("--change-feed", help="Let its changes be followed.")
    ] = False,
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="Succeed if the table exists and has these options.")
    ] = False,
) -> None:
    """Create a table."""
    here = connection(context)
    try:
        require_no_internal_name(name)
        splits = [row_bytes("--split", text) for text in split or []]
    except InvalidArgument as error:
        fail(error)
    request = wire.CreateTableRequest(
        name=name,
        splits=splits,
        options=wire.TableOptions(
            retention_milliseconds=ceil(retention * 1000),
            split_bytes=split_mib << 20,
            change_feed=change_feed,
        ),
        exist_ok=exist_ok,
    )
    answer = ask_master(here, methods.CREATE_TABLE, request)
    what = "created" if answer.created else "already exists"
    here.show(
        {"created": answer.created, **_as_data(answer.table)},
        plain(f"table {name} {what}, {answer.table.tablets} tablets"),
    )


@app.command("list")
def list_tables(context: typer.Context) -> None:
    """List all tables."""
    here = connection(context)
    tables = ask_master(here, methods.LIST_TABLES, wire.ListTablesRequest()).tables
    screen = Screen("table", "id", "tablets", "schema", "observers", "retention", box=None)
    for table in tables:
        screen.add_row(
            plain(table.name + (" (being deleted)" if table.deleting else "")),
            str(table.table_id),
            str(table.tablets),
            str(table.schema_version),
            str(len(table.observers)),
            _retention(table),
        )
    here.show([_as_data(table) for table in tables], screen if tables else "no tables")


@app.command()
def describe(context: typer.Context, name: Name) -> None:
    """Show the schema of a table."""
    here = connection(context)
    request = wire.DescribeTableRequest(name=name)
    table = ask_master(here, methods.DESCRIBE_TABLE, request).table
    lines = [
        f"table {table.name}, id {table.table_id}, {table.tablets} tablets",
        f"schema version {table.schema_version}",
        f"retention {_retention(table)}",
        f"change feed {'on' if table.options.change_feed else 'off'}",
    ]
    for observer in table.observers:
        columns = ", ".join(column.decode(errors="backslashreplace") for column in observer.columns)
        states = " (weak)" * observer.weak + " (paused)" * observer.paused
        lines.append(f"observer {observer.name} of {columns}{states}")
    screen = Screen.grid()
    for line in lines:
        screen.add_row(plain(line))
    here.show(_as_data(table), screen)


@app.command("change-feed")
def change_feed(
    context: typer.Context,
    name: Name,
    on: Annotated[bool, typer.Option("--on", help="Switch it on.")] = False,
    off: Annotated[bool, typer.Option("--off", help="Switch it off.")] = False,
) -> None:
    """Give a table a change feed, or take it away.

    It lacks what was committed before it was switched on.
    """
    here = connection(context)
    if on == off:
        fail(InvalidArgument("--on", "expected either --on or --off"))
    request = wire.SetChangeFeedRequest(table=name, change_feed=on)
    table = ask_master(here, methods.SET_CHANGE_FEED, request).table
    state = "on" if table.options.change_feed else "off"
    here.show(_as_data(table), plain(f"the change feed of table {name} is {state}"))


@app.command()
def delete(
    context: typer.Context,
    name: Name,
    missing_ok: Annotated[
        bool, typer.Option("--missing-ok", help="Succeed if the table does not exist.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a table with everything in it."""
    here = connection(context)
    try:
        require_no_internal_name(name)
    except InvalidArgument as error:
        fail(error)
    if not yes:
        confirm(f"Delete the table {name!r} with everything in it?")
    request = wire.DeleteTableRequest(name=name, missing_ok=missing_ok)
    deleted = ask_master(here, methods.DELETE_TABLE, request).deleted
    here.show(
        {"deleted": deleted}, plain(f"table {name} {'deleted' if deleted else 'does not exist'}")
    )


def _retention(table: wire.Table) -> str:
    milliseconds = table.options.retention_milliseconds
    return f"{milliseconds / 1000:g} s" if milliseconds else "default"


def _as_data(table: wire.Table) -> dict[str, object]:
    return {
        "name": table.name,
        "table_id": table.table_id,
        "tablets": table.tablets,
        "schema_version": table.schema_version,
        "retention_seconds": table.options.retention_milliseconds / 1000 or None,
        "split_bytes": table.options.split_bytes or None,
        "change_feed": table.options.change_feed,
        "deleting": table.deleting,
        "observers": [
            {
                "name": one.name,
                "columns": [column.decode(errors="backslashreplace") for column in one.columns],
                "weak": one.weak,
                "paused": one.paused,
            }
            for one in table.observers
        ],
    }
