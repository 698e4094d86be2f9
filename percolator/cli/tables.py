"""`percolator tables`: which tables there are."""

from __future__ import annotations

from math import ceil
from typing import Annotated

import typer
from rich.table import Table as Screen

from percolator.cli.connection import connection, fail, plain
from percolator.cli.masters import ask_master, row_bytes
from percolator.errors import InvalidArgument
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
        typer.Option(help="The first row of another tablet; may be repeated, in ascending order."),
    ] = None,
    retention: Annotated[
        float,
        typer.Option(
            help="Seconds that old versions are kept; 0: the cluster's.",
            min=0,
            max=_RETENTION_SECONDS_MAX,
        ),
    ] = 0.0,
    split_mib: Annotated[
        int,
        typer.Option(help="Tablets are split above this; 0: the cluster's.", min=0, max=1 << 30),
    ] = 0,
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="It may be there already, as it is.")
    ] = False,
) -> None:
    """Create a table."""
    here = connection(context)
    try:
        splits = [row_bytes("--split", text) for text in split or []]
    except InvalidArgument as error:
        fail(error)
    request = wire.CreateTableRequest(
        name=name,
        splits=splits,
        options=wire.TableOptions(
            retention_milliseconds=ceil(retention * 1000), split_bytes=split_mib << 20
        ),
        exist_ok=exist_ok,
    )
    answer = ask_master(here, methods.CREATE_TABLE, request)
    what = "created" if answer.created else "was there already"
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
    ]
    for observer in table.observers:
        columns = ", ".join(column.decode(errors="backslashreplace") for column in observer.columns)
        states = " (weak)" * observer.weak + " (paused)" * observer.paused
        lines.append(f"observer {observer.name} of {columns}{states}")
    screen = Screen.grid()
    for line in lines:
        screen.add_row(plain(line))
    here.show(_as_data(table), screen)


@app.command()
def delete(
    context: typer.Context,
    name: Name,
    missing_ok: Annotated[bool, typer.Option("--missing-ok", help="It may not be there.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a table with everything in it."""
    here = connection(context)
    if not yes:
        typer.confirm(f"Delete the table {name!r} with everything in it?", abort=True)
    request = wire.DeleteTableRequest(name=name, missing_ok=missing_ok)
    deleted = ask_master(here, methods.DELETE_TABLE, request).deleted
    here.show({"deleted": deleted}, plain(f"table {name} {'deleted' if deleted else 'not there'}"))


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
