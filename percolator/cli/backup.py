"""`percolator export` and `percolator import`: tables to files, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from percolator.backup.export_files import Export, ExportFormat
from percolator.cli.connection import connection, errors_console, fail, plain
from percolator.cli.options import At, PinTtl, not_empty, timestamp_of
from percolator.codecs.readable import counted
from percolator.errors import InvalidArgument, PercolatorError, UsageError
from percolator.timestamps import Timestamp, in_json

Tables = Annotated[
    list[str] | None,
    typer.Option("--table", help="Only this table; repeatable [default: all].", callback=not_empty),
]


def _require_directory(arguments: list[str]) -> None:
    """Refuses an empty one: as a path it is the working directory, which is hardly meant."""
    if "" in arguments:
        fail(InvalidArgument("DIR", "is empty: expected a directory"))


def export(
    context: typer.Context,
    arguments: Annotated[list[str], typer.Argument(metavar="DIR | verify DIR", show_default=False)],
    at: At = "",
    table: Tables = None,
    pin_ttl: PinTtl = None,
    form: Annotated[
        ExportFormat | None,
        typer.Option(
            "--format",
            help="parquet: cells as they are stored, exactly. jsonl: a line of JSON for each row, "
            "as people read it.  [default: parquet]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Copy tables into a directory, or verify such a copy.

    The copy shows all tables as of one timestamp. The cluster stays in use meanwhile. If an
    export is interrupted, run the same command to resume it. Other programs can read the files,
    too. For a directory named "verify", write ./verify.
    """
    here = connection(context)
    from percolator.backup import exporter, importer

    _require_directory(arguments)
    if arguments == ["verify"]:
        fail(UsageError("verify needs a directory; for one named verify, write ./verify"))
    if len(arguments) == 2 and arguments[0] == "verify":
        if at or table or form:
            fail(
                UsageError(
                    "verify checks a whole export: it takes neither --at nor --table nor --format"
                )
            )
        with _bar("cells verified") as tell:
            try:
                found = importer.verify(Path(arguments[1]), tell)
            except PercolatorError as error:
                fail(error)
        here.show(_as_data(found), _as_text("whole", found))
        return
    if len(arguments) != 1:
        fail(UsageError("expected one directory, or: verify DIR"))
    directory, timestamp = Path(arguments[0]), timestamp_of(at)
    with _bar("tablets exported") as tell:

        def note(cells: int, done: int, in_all: int) -> None:
            tell(done, in_all, f"{cells:,} cells; tablets")

        made = here.run_with_database(
            lambda database: exporter.export(
                database,
                directory,
                at=timestamp,
                tables=table or (),
                progress=note,
                pin_ttl_seconds=pin_ttl,
                form=form,
            )
        )
    here.show(_as_data(made), _as_text("exported", made))


def import_export(
    context: typer.Context,
    given: Annotated[str, typer.Argument(metavar="DIR", show_default=False)],
    table: Tables = None,
    abandon: Annotated[
        bool,
        typer.Option(
            "--abandon",
            help="Reopen, empty, the tables that an interrupted import left closed (on Bigtable: "
            "drop what it has loaded).",
        ),
    ] = False,
) -> None:
    """Import the tables of an export, into new or empty tables (on Bigtable: into new ones).

    Readers never see part of a table. Imported cells have the commit timestamp of the import, and
    notify no observers. After an interruption the tables stay closed: run the same command to
    resume; import.log in the directory says where.
    """
    here = connection(context)
    _require_directory([given])
    from percolator.backup import importer

    directory = Path(given)
    if abandon:
        whole = here.run_with_database(
            lambda database: importer.abandon(database, directory, tables=table or ())
        )
        here.show(
            {"whole": whole}, plain(f"opened; already complete: {', '.join(whole) or 'none'}")
        )
        return
    with _bar("cells imported") as tell:
        made = here.run_with_database(
            lambda database: importer.import_tables(
                database, directory, tables=table or (), progress=tell
            )
        )
    here.show(_as_data(made), _as_text("imported", made))


@contextmanager
def _bar(what: str) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error, shown only on a terminal."""
    if not errors_console.is_interactive:
        yield lambda *_: None  # the bar would end with an empty line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=errors_console, transient=True
    ) as progress:
        task = progress.add_task(what, total=None)

        def tell(done: int, in_all: int, text: str = what) -> None:
            progress.update(task, completed=done, total=in_all, description=text)

        yield tell


def _as_data(export: Export) -> dict[str, object]:
    return {
        "timestamp": in_json(export.at),
        "time": Timestamp(export.at).time_text(),
        "cells": export.cells,
        "bytes": sum(part.bytes for part in export.parts),
        "tables": {table.name: table.cells for table in export.tables},
    }


def _as_text(what: str, export: Export) -> object:
    size = counted(sum(part.bytes for part in export.parts), "byte")
    return plain(
        f"{what}: {counted(export.cells, 'cell')} of {counted(len(export.tables), 'table')} in "
        f"{counted(len(export.parts), 'file')}, {size}, as of {Timestamp(export.at).describe()}"
    )
