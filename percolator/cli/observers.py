"""`percolator observers`: lists, measures, pauses, resumes, backfills and removes observers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table as Screen

from percolator import aio
from percolator.aio.observing import worker_context
from percolator.cli.connection import ask_master, confirm, connection, errors_console, fail, plain
from percolator.cli.notifications import no_observer, waiting
from percolator.cli.options import ObserverOption, TableOption, bytes_of
from percolator.cli.sessions import list_sessions
from percolator.cli.top import Activities, ObserverFigures, cell_data, cell_text
from percolator.cli.values import NamedTable, forms_of, named_tables
from percolator.codecs.readable import counted
from percolator.errors import InvalidArgument, PercolatorError
from percolator.observers.backfill import Backfilled, backfill
from percolator.observers.quiet import count_dead_letters
from percolator.observers.registration import Removed, remove_observer
from percolator.observers.trace import Trace, TracedRun, read_trace
from percolator.timestamps import seconds_between
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods

app = typer.Typer(
    no_args_is_help=True, help="List, measure, backfill, pause, resume and remove observers."
)

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
        request = pb.DescribeTableRequest(name=table, knows_indexes=True)
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
    bytes_of("--from", start)
    bytes_of("--to", end)
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


_CELLS = 5
WAITING_MAX = 10_000
"""The number of waiting cells that are looked at, of all observers together."""

Name = tuple[str, str]


@dataclass
class _Waiting:
    """Notifications and dead letters that are stored for the observers of the cluster."""

    registered: list[Name]
    paused: set[Name]
    tables: dict[int, NamedTable]
    dead_letters: dict[Name, int]
    cells: dict[Name, int] = field(default_factory=dict)
    oldest_seconds: dict[Name, float] = field(default_factory=dict)
    is_complete: bool = True


@app.command()
def stats(
    context: typer.Context,
    table: TableOption = "",
    observer: ObserverOption = "",
) -> None:
    """Show what observers have done, how far behind they are, and the cells where they conflict.

    Runs, commits, conflicts and failures are those of the workers that run now, since each of them
    started. `oldest` is the age of the oldest change that waits.
    """
    here = connection(context)
    stored = here.run_with_database(lambda database: _stored(database, table, observer))
    if not stored.registered and (table or observer):
        fail(no_observer(table, observer))
    sessions = here.run(lambda network: list_sessions(here, network, activity=True))
    figures = Activities.of(sessions).observers
    rows = [(name, figures.get(name, ObserverFigures())) for name in stored.registered]
    data = [_stats_data(name, one, stored) for name, one in rows]
    here.show(data, _stats_text(rows, stored) if rows else "no observers")


async def _stored(database: aio.Database, table: str, observer: str) -> _Waiting:
    engine = database.internal.engine
    tables = await engine.catalog.describe_all(engine.now() + engine.limits.call_seconds)
    found = [
        ((one.name, its.name), its.paused)
        for one in tables
        for its in one.observers
        if not one.deleting and table in ("", one.name) and observer in ("", its.name)
    ]
    stored = _Waiting(
        sorted(name for name, _ in found),
        {name for name, paused in found if paused},
        named_tables(tables),
        await count_dead_letters(worker_context(engine)),
    )
    now = await engine.timestamps.get(timeout_seconds=engine.limits.call_seconds)
    seen = 0
    async for one in waiting(engine, table, observer):
        if seen == WAITING_MAX:
            stored.is_complete = False
            break
        seen += 1
        name = (one.table, one.observer)
        stored.cells[name] = stored.cells.get(name, 0) + 1
        age = max(seconds_between(one.timestamps[-1], now), 0.0)
        stored.oldest_seconds[name] = max(age, stored.oldest_seconds.get(name, 0.0))
    return stored


def _stats_data(name: Name, figures: ObserverFigures, stored: _Waiting) -> dict[str, object]:
    return {
        "table": name[0],
        "observer": name[1],
        "paused": name in stored.paused,
        "workers": figures.workers,
        **{key: figures.counts[key] for key in ("runs", "commits", "conflicts", "failures")},
        "dead_letters": stored.dead_letters.get(name, 0),
        "waiting": stored.cells.get(name, 0),
        "waiting_is_complete": stored.is_complete,
        "oldest_seconds": stored.oldest_seconds.get(name),
        "latency_seconds": figures.latency_seconds(),
        "cells": [
            {**cell_data(cell, stored.tables), "conflicts": conflicts}
            for cell, conflicts in figures.cells.most_common(_CELLS)
        ],
    }


def _stats_text(rows: list[tuple[Name, ObserverFigures]], stored: _Waiting) -> Group:
    screen = Screen(
        "table", "observer", "workers", "runs", "commits", "conflicts", "failures", "dead letters",
        "waiting", "oldest", "latency", box=None,
    )  # fmt: skip
    cells = Screen("conflicts", "observer", "cell", box=None)
    for name, one in rows:
        counts, latency = one.counts, one.latency_seconds()
        oldest = stored.oldest_seconds.get(name)
        waits = f"{stored.cells.get(name, 0):,}" + ("" if stored.is_complete else " or more")
        screen.add_row(
            plain(name[0]),
            plain(name[1]),
            "paused" if name in stored.paused else str(one.workers or "none"),
            *(f"{counts[key]:,}" for key in ("runs", "commits", "conflicts", "failures")),
            f"{stored.dead_letters.get(name, 0):,}",
            waits,
            "" if oldest is None else f"{oldest:.1f} s",
            "" if latency is None else f"{latency * 1000:,.0f} ms",
        )
        for cell, conflicts in one.cells.most_common(_CELLS):
            cells.add_row(f"{conflicts:,}", plain(name[1]), plain(cell_text(cell, stored.tables)))
    return Group(screen, "", cells) if cells.row_count else Group(screen)


_FIGURES: dict[str, Callable[[TracedRun], float]] = {
    "runs": lambda _: 1,
    "repeated": lambda run: run.is_repeated,
    "without effect": lambda run: run.is_without_effect,
    "rows read": lambda run: run.rows_read,
    "round trips": lambda run: run.round_trips,
    "cells written": lambda run: run.written,
    "cells locked": lambda run: run.locked,
}


@app.command()
def trace(
    context: typer.Context,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="What workers wrote with --trace.")
    ],
) -> None:
    """Show what a change costs: runs, reads, writes and CPU, from the traces of all workers.

    Each run belongs to the change that caused it, directly or through other runs. Below the sums,
    all runs of the change that has caused the most.
    """
    here = connection(context)
    try:
        with ExitStack() as stack:
            lines = {str(one): stack.enter_context(one.open(encoding="utf-8")) for one in files}
            found = read_trace(lines)
    except (OSError, UnicodeDecodeError) as error:
        fail(InvalidArgument("FILE", str(error)))
    except InvalidArgument as error:
        fail(error)
    if not found.origins:
        here.show({"changes": 0}, "the trace has no changes")
        return
    here.show(_trace_data(found), Group(_trace_sums(found), "", _costliest(found)))


def _per_change(found: Trace, runs: Sequence[TracedRun]) -> list[float]:
    return [sum(map(count, runs)) / len(found.origins) for count in _FIGURES.values()]


def _by_observer(found: Trace) -> dict[tuple[str, str], list[TracedRun]]:
    groups: dict[tuple[str, str], list[TracedRun]] = {}
    for run in found.runs:
        groups.setdefault((run.table, run.observer), []).append(run)
    return groups


def _trace_data(found: Trace) -> dict[str, Any]:
    def figures(runs: Sequence[TracedRun]) -> dict[str, float]:
        names = [name.replace(" ", "_") for name in _FIGURES]
        return dict(zip(names, _per_change(found, runs), strict=True))

    return {
        "changes": len(found.origins),
        "cpu_seconds_per_change": found.cpu_seconds / len(found.origins),
        "per_change": figures(found.runs),
        "observers": [
            {"table": table, "observer": observer, "per_change": figures(runs)}
            for (table, observer), runs in sorted(_by_observer(found).items())
        ],
    }


def _trace_sums(found: Trace) -> Group:
    screen = Screen("per change", *_FIGURES, box=None)
    for (_, observer), runs in sorted(_by_observer(found).items()):
        screen.add_row(plain(observer), *(f"{one:.2f}" for one in _per_change(found, runs)))
    screen.add_row("all", *(f"{one:.2f}" for one in _per_change(found, found.runs)))
    changes = len(found.origins)
    cpu = found.cpu_seconds / changes * 1000
    return Group(f"{changes:,} changes; CPU of the workers: {cpu:.1f} ms per change", "", screen)


def _costliest(found: Trace) -> Group:
    origin, runs = max(found.origins.items(), key=lambda one: (len(one[1]), -one[0]))
    screen = Screen("after", "run", "", "rows read", "round trips", "written", "locked", box=None)
    for run in sorted(runs, key=lambda one: one.start):
        depth, parent = 0, found.parent(run)
        while parent:
            depth, parent = depth + 1, found.parent(parent)
        screen.add_row(
            f"{seconds_between(origin, run.start) * 1000:.0f} ms",
            plain(f"{'  ' * depth}{run.observer} of {run.row}"),
            run.ended,
            *map(str, (run.rows_read, run.round_trips, run.written, run.locked)),
        )
    return Group(f"the change with the most runs, at {origin}:", screen)
