"""`percolator observers`: lists observers; pauses, resumes, backfills and removes them.

A command that is more than a few lines has a file of its own, and is added here.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table as Screen

from percolator import aio
from percolator.aio.observing import worker_context
from percolator.cli import observer_stats, observer_trace
from percolator.cli.connection import confirm, connection, errors_console, plain
from percolator.cli.given import TableOption, require_row
from percolator.cli.masters import ask_master
from percolator.cli.values import forms_of
from percolator.counts import counted
from percolator.errors import PercolatorError
from percolator.observers.registry.backfilling import Backfilled, backfill
from percolator.observers.registry.removal import Removed, remove_observer
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods

app = typer.Typer(
    no_args_is_help=True, help="List, measure, backfill, pause, resume and remove observers."
)
app.command("stats")(observer_stats.stats)
app.command("trace")(observer_trace.trace)

TableName = Annotated[str, typer.Argument(metavar="TABLE", show_default=False)]
ObserverName = Annotated[str, typer.Argument(metavar="OBSERVER", show_default=False)]


@app.command("list")
def list_observers(
    context: typer.Context,
    table: TableOption = "",
) -> None:
    """List the observers of all tables, and whether they also handle cells older than they are."""
    here = connection(context)
    if table:
        request = pb.DescribeTableRequest(name=table)
        tables = [ask_master(here, methods.DESCRIBE_TABLE, request).table]
    else:
        answer = ask_master(here, methods.LIST_TABLES, pb.ListTablesRequest())
        tables = [*answer.tables, *answer.awaited]
    found = [(one, observer) for one in tables for observer in one.observers if not one.deleting]
    screen = Screen("table", "observer", "columns", "", box=None)
    for one, observer in found:
        screen.add_row(
            plain(one.name), plain(observer.name), plain(_columns(observer)), _state(one, observer)
        )
    here.show(
        [
            {
                "table": one.name,
                "observer": observer.name,
                "columns": [c.decode(errors="backslashreplace") for c in observer.columns],
                "weak": observer.weak,
                "paused": observer.paused,
                "backfill": observer.backfill,
                "backfill_owed": observer.HasField("owed"),
                "backfilled_cells": observer.owed.cells if observer.HasField("owed") else None,
                "table_exists": bool(one.table_id),
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
        bool, typer.Option("--again", help="Also notify it of cells that it has handled already.")
    ] = False,
    start: Annotated[
        str, typer.Option("--from", help="The first row, to resume a backfill where it stopped.")
    ] = "",
    end: Annotated[str, typer.Option("--to", help="The row to end before [default: none].")] = "",
) -> None:
    """Notify an observer of the cells that were written before it was registered.

    Rows are written as the table's keys are: text, 17, ["a", 17], or hex:00ff.
    """
    here = connection(context)
    require_row("--from", start)
    require_row("--to", end)
    progress = Backfilled(0, b"")

    async def run(database: aio.Database) -> Backfilled:
        forms = await forms_of(database, table, None, here.timeout_seconds)
        first, last = forms.end_of_range("--from", start), forms.end_of_range("--to", end)

        def note(done: Backfilled) -> None:
            nonlocal progress
            progress = done
            row = forms.row_text(done.row)
            status.update(plain(f"{done.cells:,} cells, up to row {row}"))

        observing = worker_context(database.internal.engine)
        try:
            return await backfill(
                observing, table, observer, start=first, end=last, again=again, on_progress=note
            )
        except PercolatorError as error:
            if progress.cells:
                error.message += (
                    f"; it was notified of {counted(progress.cells, 'cell')}: resume with "
                    f"--from {forms.row_text(progress.row)!r}"
                )
            raise

    with errors_console.status("looking for cells") as status:
        done = here.run_with_database(run)
    here.show(
        {"table": table, "observer": observer, "cells": done.cells},
        plain(
            f"observer {observer} of table {table} was notified of {counted(done.cells, 'cell')}"
        ),
    )


@app.command()
def pause(context: typer.Context, table: TableName, observer: ObserverName) -> None:
    """Stop running an observer. Changes are queued for it meanwhile."""
    _change(context, pb.ChangeObserversRequest(table=table, pause=[observer]))


@app.command()
def resume(context: typer.Context, table: TableName, observer: ObserverName) -> None:
    """Run a paused observer again."""
    _change(context, pb.ChangeObserversRequest(table=table, resume=[observer]))


@app.command()
def remove(
    context: typer.Context,
    table: TableName,
    observer: ObserverName,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also throw away the changes that still wait for it.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove an observer: it is no longer notified. Stop its workers first: a worker registers its
    observers when it starts."""
    here = connection(context)
    if not yes:
        lost = " and throw away the changes that wait for it" * purge
        confirm(f"Remove the observer {observer!r} of table {table!r}{lost}?")

    async def run(database: aio.Database) -> Removed:
        def note(purged: int) -> None:
            status.update(f"{purged:,} notifications thrown away")

        observing = worker_context(database.internal.engine)
        return await remove_observer(observing, table, observer, purge=purge, on_progress=note)

    with errors_console.status("looking for notifications") as status:
        done = here.run_with_database(run)
    lines = Screen.grid()
    if done.was_registered:
        lines.add_row(plain(f"observer {observer} of table {table} was removed"))
    if done.purged:
        thrown_away = counted(done.purged, "notification was", "notifications were")
        lines.add_row(plain(f"{thrown_away} thrown away"))
    if done.left:
        lines.add_row(
            plain(
                f"{counted(done.left, 'notification')} arrived during the removal, and stayed: "
                "run the same command again with --purge"
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


def _change(context: typer.Context, request: pb.ChangeObserversRequest) -> None:
    here = connection(context)
    table = ask_master(here, methods.CHANGE_OBSERVERS, request).table
    (name,) = [*request.pause, *request.resume]
    (observer,) = [one for one in table.observers if one.name == name]
    state = "paused" if observer.paused else "running"
    here.show(
        {"table": table.name, "observer": name, "paused": observer.paused},
        plain(f"observer {name} of table {table.name} is now {state}"),
    )


def _columns(observer: pb.Observer) -> str:
    return ", ".join(column.decode(errors="backslashreplace") for column in observer.columns)


def _state(table: pb.Table, observer: pb.Observer) -> str:
    states = ["weak"] * observer.weak + ["paused"] * observer.paused
    if observer.HasField("owed"):
        states.append(f"backfilling, {counted(observer.owed.cells, 'cell')} so far")
    elif not observer.weak:
        states.append("with backfill" if observer.backfill else "without backfill")
    states += ["the table does not exist yet"] * (not table.table_id)
    return ", ".join(states)
