"""`percolator top`: observers and programs at work, and the cells where they conflict.

Clients and workers report their figures with their sessions; `observers stats` shows them, too.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import typer
from rich.console import Group
from rich.table import Table as Screen
from rich.text import Text

from percolator.cli.connection import answer_of_leader, connection, keep_showing, plain
from percolator.cli.sessions import list_sessions
from percolator.cli.values import UNKNOWN, NamedTable, column_text, named_tables
from percolator.codecs.readable import row_text
from percolator.errors import Unavailable
from percolator.v1.lockservice_pb2 import ContendedCell, Session
from percolator.v1.master_pb2 import ListTablesRequest
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork

_COUNTS = ("runs", "commits", "conflicts", "postponed", "failures", "dead_letters")


class LostCell(NamedTuple):
    """A cell where transactions have lost."""

    table_id: int
    row: bytes
    column: bytes


@dataclass
class ObserverFigures:
    """Sums over all processes that run one observer."""

    workers: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    backlog: int = 0
    latency_milliseconds: int = 0
    """The sum over all commits."""
    cells: Counter[LostCell] = field(default_factory=Counter)

    def latency_seconds(self, since: ObserverFigures | None = None) -> float | None:
        """The mean time from a change to the commit of its run; None without commits."""
        commits, sum_milliseconds = self.counts["commits"], self.latency_milliseconds
        if since is not None:
            commits -= since.counts["commits"]
            sum_milliseconds -= since.latency_milliseconds
        return sum_milliseconds / commits / 1000 if commits > 0 else None


@dataclass
class ClientFigures:
    """Counts of the transactions of one process."""

    who: str
    commits: int
    conflicts: int


@dataclass
class Activities:
    """Figures of all processes of the cluster, since each of them connected."""

    observers: dict[tuple[str, str], ObserverFigures] = field(default_factory=dict)
    """By table and observer."""
    clients: dict[bytes, ClientFigures] = field(default_factory=dict)
    """By session."""
    cells: Counter[LostCell] = field(default_factory=Counter)
    """Where all their transactions have lost, those of observers among them."""

    @classmethod
    def of(cls, sessions: Iterable[Session]) -> Activities:
        found = cls()
        for session in sessions:
            if not session.info.HasField("activity"):
                continue
            activity = session.info.activity
            found.clients[session.session_id] = ClientFigures(
                session.info.description, activity.commits, activity.conflicts
            )
            found.cells.update(_by_cell(activity.cells))
            for one in activity.observers:
                figures = found.observers.setdefault((one.table, one.observer), ObserverFigures())
                figures.workers += 1
                figures.counts.update({name: getattr(one, name) for name in _COUNTS})
                figures.backlog += one.backlog
                figures.latency_milliseconds += one.latency_milliseconds
                figures.cells.update(_by_cell(one.cells))
        return found


def workers_of(sessions: Iterable[Session]) -> list[Session]:
    """The sessions of processes that run observers."""
    return [one for one in sessions if one.info.activity.observers]


def _by_cell(cells: Sequence[ContendedCell]) -> dict[LostCell, int]:
    return {LostCell(one.table_id, one.row, one.column): one.conflicts for one in cells}


_SHOWN_MAX = 10
_FIRST_SECONDS = 2.0
"""Programs report their counts about once a second."""


@dataclass
class Sample:
    """Figures of all processes, and those of the sample before: the difference is the rate."""

    activities: Activities
    tables: dict[int, NamedTable]
    before: Activities
    seconds: float
    """Since the sample before."""

    def rate(self, now: int, before: int) -> float:
        """Per second. A process that has gone takes its counts along: that is no negative rate."""
        return max(now - before, 0) / self.seconds

    def observers(self) -> list[tuple[tuple[str, str], ObserverFigures, dict[str, float]]]:
        return [
            (name, now, {key: self.rate(now.counts[key], then.counts[key]) for key in now.counts})
            for name, now in sorted(self.activities.observers.items())
            for then in [self.before.observers.get(name, now)]
        ]

    def latency_seconds(self, name: tuple[str, str]) -> float | None:
        return self.activities.observers[name].latency_seconds(self.before.observers.get(name))

    def clients(self) -> list[tuple[ClientFigures, float, float]]:
        """Processes with the most conflicts first, and then those with the most commits."""
        rates = [
            (
                now,
                self.rate(now.commits, then.commits),
                self.rate(now.conflicts, then.conflicts),
            )
            for session_id, now in self.activities.clients.items()
            for then in [self.before.clients.get(session_id, now)]
        ]
        return sorted(rates, key=lambda one: (-one[2], -one[1], one[0].who))

    def cells(self) -> list[tuple[LostCell, float]]:
        """Where transactions lose now, the most first."""
        rates = [
            (cell, self.rate(count, self.before.cells.get(cell, 0)))
            for cell, count in self.activities.cells.items()
        ]
        return sorted((one for one in rates if one[1]), key=lambda one: (-one[1], one[0]))


def top(
    context: typer.Context,
    every: Annotated[
        float, typer.Option(help="Seconds between refreshes.", min=0.2, max=86_400)
    ] = 2.0,
    times: Annotated[
        int | None,
        typer.Option(
            help="Number of refreshes [default: until Ctrl-C].", min=1, show_default=False
        ),
    ] = None,
) -> None:
    """Show live what observers and programs do, and the cells where their transactions conflict.

    All figures are per second, since the previous refresh (the first one comes after 2 s at the
    latest); `backlog` is what workers have found and
    not yet handled, `latency` the mean time from a change to the commit of its run.
    """
    here = connection(context)
    before: tuple[float, Activities] | None = None

    async def look(network: GrpcNetwork) -> tuple[float, Activities]:
        found = Activities.of(await list_sessions(here, network, activity=True, tell=_refuse))
        return time.monotonic(), found

    async def fetch(network: GrpcNetwork) -> Sample:
        nonlocal before
        if before is None:
            # A single look has no rates: all of them would be shown as 0.
            before = await look(network)
            await asyncio.sleep(min(every, _FIRST_SECONDS))
        listed = await answer_of_leader(here, network, methods.LIST_TABLES, ListTablesRequest())
        taken_at, now = await look(network)
        (then, activities), before = before, (taken_at, now)
        tables = named_tables(listed.tables)
        return Sample(now, tables, activities, max(taken_at - then, 0.001))

    keep_showing(here, fetch, _as_text, _as_data, every=every, times=times)


def _refuse(missing: str) -> None:
    """A process that is missing now would count as new when it is back."""
    raise Unavailable(missing)


def _as_text(sample: Sample) -> Group:
    observers = Screen(
        "table", "observer", "workers", "runs/s", "commits/s", "conflicts/s", "failures/s",
        "backlog", "latency", box=None,
    )  # fmt: skip
    for name, now, rates in sample.observers():
        latency = sample.latency_seconds(name)
        observers.add_row(
            *map(plain, name),
            str(now.workers),
            *(f"{rates[key]:,.1f}" for key in ("runs", "commits", "conflicts", "failures")),
            f"{now.backlog:,}",
            "" if latency is None else f"{latency * 1000:,.0f} ms",
        )
    clients = Screen("program", "commits/s", "conflicts/s", box=None)
    for client, commits, conflicts in sample.clients()[:_SHOWN_MAX]:
        clients.add_row(
            plain(client.who or "(no description)"), f"{commits:,.1f}", f"{conflicts:,.1f}"
        )
    cells = Screen("conflicts/s", "cell", box=None)
    for cell, rate in sample.cells()[:_SHOWN_MAX]:
        cells.add_row(f"{rate:,.1f}", plain(cell_text(cell, sample.tables)))
    return Group(
        observers if observers.row_count else Text("no worker runs observers"),
        "",
        clients,
        "",
        cells if cells.row_count else Text("no conflicts"),
    )


def _as_data(sample: Sample) -> Mapping[str, object]:
    return {
        "observers": [
            {
                "table": name[0],
                "observer": name[1],
                "workers": now.workers,
                **{f"{key}_per_second": round(rate, 3) for key, rate in sorted(rates.items())},
                "backlog": now.backlog,
                "latency_seconds": sample.latency_seconds(name),
            }
            for name, now, rates in sample.observers()
        ],
        "programs": [
            {
                "description": client.who,
                "commits_per_second": round(commits, 3),
                "conflicts_per_second": round(conflicts, 3),
            }
            for client, commits, conflicts in sample.clients()
        ],
        "cells": [
            {**cell_data(cell, sample.tables), "conflicts_per_second": round(rate, 3)}
            for cell, rate in sample.cells()
        ],
    }


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
