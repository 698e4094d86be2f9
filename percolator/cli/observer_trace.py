"""`percolator observers trace`: what a change costs, from the traces of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table as Screen

from percolator.cli.connection import connection, fail, plain
from percolator.errors import InvalidArgument
from percolator.observers.traced import Trace, TracedRun, read_trace
from percolator.timestamps import seconds_between

_FIGURES: dict[str, Callable[[TracedRun], float]] = {
    "runs": lambda _: 1,
    "repeated": lambda run: run.is_repeated,
    "without effect": lambda run: run.is_without_effect,
    "rows read": lambda run: run.rows_read,
    "round trips": lambda run: run.round_trips,
    "cells written": lambda run: run.written,
    "cells locked": lambda run: run.locked,
}


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
    here.show(_as_data(found), Group(_sums(found), "", _costliest(found)))


def _per_change(found: Trace, runs: Sequence[TracedRun]) -> list[float]:
    return [sum(map(count, runs)) / len(found.origins) for count in _FIGURES.values()]


def _by_observer(found: Trace) -> dict[tuple[str, str], list[TracedRun]]:
    groups: dict[tuple[str, str], list[TracedRun]] = {}
    for run in found.runs:
        groups.setdefault((run.table, run.observer), []).append(run)
    return groups


def _as_data(found: Trace) -> dict[str, Any]:
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


def _sums(found: Trace) -> Group:
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
