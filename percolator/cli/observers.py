"""`percolator observers`: who observes what; pausing, backfilling and removing them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table as Screen

from percolator import aio
from percolator.aio.observing import observers_client
from percolator.cli.connection import connection, errors_console, fail, plain
from percolator.cli.masters import ask_master, row_bytes, row_text
from percolator.errors import InvalidArgument, PercolatorError
from percolator.observers.backfilling import Backfilled, backfill
from percolator.observers.removal import Removed, remove_observer
from percolator.v1 import master_pb2 as wire
from percolator.wire import methods

app = typer.Typer(no_args_is_help=True, help="List, backfill, pause, resume and remove observers.")

TableName = Annotated[str, typer.Argument(metavar="TABLE", show_default=False)]
ObserverName = Annotated[str, typer.Argument(metavar="OBSERVER", show_default=False)]


@app.command("list")
def list_observers(
    context: typer.Context,
    table: Annotated[str, typer.Option(help="Only of this table.")] = "",
) -> None:
    """List the observers of all tables."""
    here = connection(context)
    if table:
        request = wire.DescribeTableRequest(name=table)
        tables = [ask_master(here, methods.DESCRIBE_TABLE, request).table]
    else:
        tables = list(ask_master(here, methods.LIST_TABLES, wire.ListTablesRequest()).tables)
    found = [(one, observer) for one in tables for observer in one.observers if not one.deleting]
    screen = Screen("table", "observer", "columns", "", box=None)
    for one, observer in found:
        screen.add_row(
            plain(one.name), plain(observer.name), plain(_columns(observer)), _state(observer)
        )
    here.show(
        [
            {
                "table": one.name,
                "observer": observer.name,
                "columns": [c.decode(errors="backslashreplace") for c in observer.columns],
                "weak": observer.weak,
                "paused": observer.paused,
            }
            for one, observer in found
        ],
        screen if found else "no observers",
    )


@app.command("backfill")
def backfill_observer(
    context: typer.Context,
    table: TableName,
    observer: ObserverName,
    again: Annotated[
        bool, typer.Option("--again", help="Also what it has answered before is answered again.")
    ] = False,
    start: Annotated[
        str, typer.Option("--from", help="The first row: where a former backfill has ended.")
    ] = "",
    end: Annotated[str, typer.Option("--to", help="The row to end before [default: none].")] = "",
) -> None:
    """Notify an observer of the cells that were written before it was registered."""
    here = connection(context)
    try:
        first, last = row_bytes("--from", start), row_bytes("--to", end)
    except InvalidArgument as error:
        fail(error)
    progress = Backfilled(0, first)

    async def run(database: aio.Database) -> Backfilled:
        def note(done: Backfilled) -> None:
            nonlocal progress
            progress = done
            status.update(f"{done.cells:,} cells, up to row {plain(row_text(done.row))}")

        client = observers_client(database.engine)
        try:
            return await backfill(
                client, table, observer, start=first, end=last, again=again, on_progress=note
            )
        except PercolatorError as error:
            if progress.cells:
                error.message += (
                    f"; {progress.cells:,} cells were notified: go on with "
                    f"--from {row_text(progress.row)!r}"
                )
            raise

    with errors_console.status("looking for cells") as status:
        done = here.run_with_database(run)
    here.show(
        {"table": table, "observer": observer, "cells": done.cells},
        plain(f"observer {observer} of table {table} was notified of {done.cells:,} cells"),
    )


@app.command()
def pause(context: typer.Context, table: TableName, observer: ObserverName) -> None:
    """Stop running an observer. What is notified meanwhile is kept for it."""
    _change(context, wire.ChangeObserversRequest(table=table, pause=[observer]))


@app.command()
def resume(context: typer.Context, table: TableName, observer: ObserverName) -> None:
    """Run an observer again that was paused."""
    _change(context, wire.ChangeObserversRequest(table=table, resume=[observer]))


@app.command()
def remove(
    context: typer.Context,
    table: TableName,
    observer: ObserverName,
    purge: Annotated[
        bool, typer.Option("--purge", help="Throw away what it was notified of and has not done.")
    ] = False,
) -> None:
    """Remove an observer: it is notified no more. Stop its workers first: a worker that starts
    registers it again."""
    here = connection(context)

    async def run(database: aio.Database) -> Removed:
        def note(purged: int) -> None:
            status.update(f"{purged:,} notifications thrown away")

        client = observers_client(database.engine)
        return await remove_observer(client, table, observer, purge=purge, on_progress=note)

    with errors_console.status("looking for notifications") as status:
        done = here.run_with_database(run)
    lines = Screen.grid()
    if done.was_registered:
        lines.add_row(plain(f"observer {observer} of table {table} was removed"))
    if done.purged:
        lines.add_row(plain(f"{done.purged:,} notifications were thrown away"))
    if done.left:
        lines.add_row(
            plain(
                f"{done.left:,} notifications came in that very moment, and are left: "
                "remove it again with --purge"
            )
        )
    here.show(
        {
            "table": table,
            "observer": observer,
            "removed": done.was_registered,
            "purged": done.purged,
            "left": done.left,
        },
        lines,
    )


def _change(context: typer.Context, request: wire.ChangeObserversRequest) -> None:
    here = connection(context)
    table = ask_master(here, methods.CHANGE_OBSERVERS, request).table
    (name,) = [*request.pause, *request.resume]
    (observer,) = [one for one in table.observers if one.name == name]
    state = "paused" if observer.paused else "run"
    here.show(
        {"table": table.name, "observer": name, "paused": observer.paused},
        plain(f"observer {name} of table {table.name} is {state} from now on"),
    )


def _columns(observer: wire.Observer) -> str:
    return ", ".join(column.decode(errors="backslashreplace") for column in observer.columns)


def _state(observer: wire.Observer) -> str:
    states = ["weak"] * observer.weak + ["paused"] * observer.paused
    return ", ".join(states)
