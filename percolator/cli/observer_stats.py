"""`percolator observers stats`: what observers have done, what waits, and where they conflict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import typer
from rich.console import Group
from rich.table import Table as Screen

from percolator import aio
from percolator.aio.observing import worker_context
from percolator.cli.activity import Activities, LostCell, ObserverFigures
from percolator.cli.connection import connection, fail, plain
from percolator.cli.given import ObserverOption, TableOption
from percolator.cli.notifications import waiting
from percolator.cli.registered import no_observer
from percolator.cli.sessions import list_sessions
from percolator.cli.stored import column_text
from percolator.cli.values import UNKNOWN, NamedTable, named_tables
from percolator.observers.waiting import count_dead_letters
from percolator.row_text import row_text
from percolator.timestamps import seconds_between

_CELLS = 5
WAITING_MAX = 10_000
"""Of all observers together, so many waiting cells are looked at."""

Name = tuple[str, str]


@dataclass
class _Waiting:
    """What is stored for the observers of the cluster."""

    registered: list[Name]
    paused: set[Name]
    tables: dict[int, NamedTable]
    dead_letters: dict[Name, int]
    cells: dict[Name, int] = field(default_factory=dict)
    oldest_seconds: dict[Name, float] = field(default_factory=dict)
    is_complete: bool = True


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
    data = [_as_data(name, one, stored) for name, one in rows]
    here.show(data, _as_text(rows, stored) if rows else "no observers")


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


def _as_data(name: Name, figures: ObserverFigures, stored: _Waiting) -> dict[str, object]:
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


def _as_text(rows: list[tuple[Name, ObserverFigures]], stored: _Waiting) -> Group:
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


def cell_text(cell: LostCell, tables: Mapping[int, NamedTable]) -> str:
    """The cell for people, with its table's name if that is known."""
    table = tables.get(cell.table_id, NamedTable(f"table {cell.table_id}", UNKNOWN))
    row = table.forms.row_text(cell.row)
    return f"{table.name}, row {row}, column {column_text(cell.column)}"


def cell_data(cell: LostCell, tables: Mapping[int, NamedTable]) -> dict[str, object]:
    """The cell for programs."""
    table = tables.get(cell.table_id, NamedTable("", UNKNOWN))
    return {
        "table": table.name,
        "row": table.forms.row_data(cell.row),
        "column": row_text(cell.column),
    }
