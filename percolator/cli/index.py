"""`percolator index`: builds a secondary index over existing data, and checks one."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from percolator import aio
from percolator.cli.connection import connection, fail, plain
from percolator.counts import counted
from percolator.errors import InvalidArgument
from percolator.observers.registry.loading import named
from percolator.recipes import Index

app = typer.Typer(no_args_is_help=True, help="Build and check secondary indexes.")

_Reference = Annotated[str, typer.Argument(help="module:name of a percolator.recipes.Index.")]


@app.callback()
def index() -> None:
    """Build and check secondary indexes."""


@app.command("backfill")
def backfill(context: typer.Context, reference: _Reference) -> None:
    """Build the index over rows that were written before, and fix whatever is wrong in it.

    All programs must already keep the index, or its observer must be registered. They may run
    meanwhile.
    """
    here, chosen = connection(context), _index(reference)
    rows = here.run_with_database(chosen.backfill)
    here.show(
        {"index": chosen.table.name, "rows": rows},
        plain(f"{counted(rows, 'row is', 'rows are')} indexed"),
    )


@app.command("check")
def check(context: typer.Context, reference: _Reference) -> None:
    """Compare the index with its column, at one snapshot. Exits with 1 if they differ.

    If an observer keeps the index, run `percolator wait` before: what it has not handled yet
    differs.
    """
    here, chosen = connection(context), _index(reference)

    async def compare(database: aio.Database) -> list[str]:
        async with database.snapshot() as snapshot:
            return await chosen.check(snapshot)

    problems = here.run_with_database(compare)
    lines = Text("\n").join(map(plain, problems or ["column and index agree"]))
    here.show({"index": chosen.table.name, "problems": problems}, lines)
    if problems:
        raise typer.Exit(1)


def _index(reference: str) -> Index[Any, Any, Any]:
    try:
        found = named(reference, "index")
    except InvalidArgument as error:
        fail(error)
    if not isinstance(found, Index):
        fail(InvalidArgument("index", f"{reference} is {found!r:.80}, not an Index"))
    return found
