"""`percolator top`: what observers and programs do at this moment, and where they conflict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table as Screen
from rich.text import Text

from percolator.cli.activity import Activities, ClientFigures, LostCell, ObserverFigures
from percolator.cli.connection import connection, plain
from percolator.cli.masters import answer_of_leader
from percolator.cli.observer_stats import cell_data, cell_text
from percolator.cli.sessions import list_sessions
from percolator.cli.values import NamedTable, named_tables
from percolator.cli.watching import keep_showing
from percolator.errors import Unavailable
from percolator.v1.master_pb2 import ListTablesRequest
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork

_SHOWN_MAX = 10
_FIRST_SECONDS = 2.0
"""Programs report their counts about once a second."""


@dataclass
class Moment:
    """What all processes had done at one moment, and how much more than at the one before."""

    activities: Activities
    tables: dict[int, NamedTable]
    before: Activities
    seconds: float
    """Since the moment before."""

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
        """Those with the most conflicts first, and then those with the most commits."""
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

    async def fetch(network: GrpcNetwork) -> Moment:
        nonlocal before
        if before is None:
            # A single look has no rates: all of them would be shown as 0.
            before = await look(network)
            await asyncio.sleep(min(every, _FIRST_SECONDS))
        listed = await answer_of_leader(here, network, methods.LIST_TABLES, ListTablesRequest())
        moment, now = await look(network)
        (then, activities), before = before, (moment, now)
        tables = named_tables(listed.tables)
        return Moment(now, tables, activities, max(moment - then, 0.001))

    keep_showing(here, fetch, _as_text, _as_data, every=every, times=times)


def _refuse(missing: str) -> None:
    """What is missing now would count as new when it is back."""
    raise Unavailable(missing)


def _as_text(moment: Moment) -> Group:
    observers = Screen(
        "table", "observer", "workers", "runs/s", "commits/s", "conflicts/s", "failures/s",
        "backlog", "latency", box=None,
    )  # fmt: skip
    for name, now, rates in moment.observers():
        latency = moment.latency_seconds(name)
        observers.add_row(
            *map(plain, name),
            str(now.workers),
            *(f"{rates[key]:,.1f}" for key in ("runs", "commits", "conflicts", "failures")),
            f"{now.backlog:,}",
            "" if latency is None else f"{latency * 1000:,.0f} ms",
        )
    clients = Screen("program", "commits/s", "conflicts/s", box=None)
    for client, commits, conflicts in moment.clients()[:_SHOWN_MAX]:
        clients.add_row(
            plain(client.who or "(no description)"), f"{commits:,.1f}", f"{conflicts:,.1f}"
        )
    cells = Screen("conflicts/s", "cell", box=None)
    for cell, rate in moment.cells()[:_SHOWN_MAX]:
        cells.add_row(f"{rate:,.1f}", plain(cell_text(cell, moment.tables)))
    return Group(
        observers if observers.row_count else Text("no worker runs observers"),
        "",
        clients,
        "",
        cells if cells.row_count else Text("no conflicts"),
    )


def _as_data(moment: Moment) -> Mapping[str, object]:
    return {
        "observers": [
            {
                "table": name[0],
                "observer": name[1],
                "workers": now.workers,
                **{f"{key}_per_second": round(rate, 3) for key, rate in sorted(rates.items())},
                "backlog": now.backlog,
                "latency_seconds": moment.latency_seconds(name),
            }
            for name, now, rates in moment.observers()
        ],
        "programs": [
            {
                "description": client.who,
                "commits_per_second": round(commits, 3),
                "conflicts_per_second": round(conflicts, 3),
            }
            for client, commits, conflicts in moment.clients()
        ],
        "cells": [
            {**cell_data(cell, moment.tables), "conflicts_per_second": round(rate, 3)}
            for cell, rate in moment.cells()
        ],
    }
