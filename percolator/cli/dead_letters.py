"""`percolator dead-letters`: changes that an observer could not handle."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table as Screen

from percolator import aio
from percolator.aio.observing import worker_context
from percolator.cli.connection import Connection, confirm, connection, fail, plain
from percolator.errors import InvalidArgument, UsageError
from percolator.observers.running.dead_letter import DeadLetter
from percolator.observers.running.dead_letter_box import DeadLetterBox, as_data
from percolator.row_text import row_bytes, row_text
from percolator.timestamps import Timestamp

app = typer.Typer(help="List [the default], show, retry and clear dead letters.")

_ERROR_CHARACTERS = 80

TableOption = Annotated[str, typer.Option("--table", help="Only this table.")]
ObserverOption = Annotated[str, typer.Option("--observer", help="Only this observer.")]
RowOption = Annotated[
    str | None, typer.Option("--row", help="Only this row; hex:… for bytes.", show_default=False)
]
AllOption = Annotated[bool, typer.Option("--all", help="All dead letters.")]


@app.callback(invoke_without_command=True)
def dead_letters(context: typer.Context) -> None:
    """List all dead letters, or do something about some of them with a subcommand."""
    if context.invoked_subcommand is None:
        list_letters(context)


@app.command("list")
def list_letters(
    context: typer.Context, table: TableOption = "", observer: ObserverOption = ""
) -> None:
    """List the changes that were put aside, and why."""
    here = connection(context)
    letters = _letters(here, table, observer, None)
    screen = Screen("table", "observer", "column", "row", "changed", "attempts", "error", box=None)
    for one in letters:
        screen.add_row(
            plain(one.table),
            plain(one.observer),
            plain(row_text(one.column)),
            plain(row_text(one.row)),
            _changed(one),
            str(one.attempts),
            plain(one.error[:_ERROR_CHARACTERS]),
        )
    here.show([as_data(one) for one in letters], screen if letters else "no dead letters")


@app.command()
def show(
    context: typer.Context,
    row: Annotated[str, typer.Argument(help="The row; hex:… for bytes.", show_default=False)],
    table: TableOption = "",
    observer: ObserverOption = "",
) -> None:
    """Show everything about the dead letters of a row."""
    here = connection(context)
    letters = _letters(here, table, observer, row)
    screen = Screen.grid(padding=(0, 2))
    for one in letters:
        for name, text in (
            ("table", one.table),
            ("observer", one.observer),
            ("column", row_text(one.column)),
            ("row", row_text(one.row)),
            ("changed", _changed(one)),
            ("put aside", Timestamp(one.parked_at).describe()),
            ("attempts", str(one.attempts)),
            ("error", one.error),
        ):
            screen.add_row(name, plain(text))
        for number, line in enumerate(one.traceback.splitlines()):
            screen.add_row("traceback" if number == 0 else "", plain(line))
        screen.add_row("", "")
    here.show([as_data(one) for one in letters], screen if letters else "no such dead letter")


@app.command()
def retry(
    context: typer.Context,
    table: TableOption = "",
    observer: ObserverOption = "",
    row: RowOption = None,
    everything: AllOption = False,
) -> None:
    """Have observers try again. A dead letter is removed once a run has committed."""
    here = connection(context)
    _require_choice(table, observer, row, everything=everything)
    letters = _letters(here, table, observer, row)

    async def run(database: aio.Database) -> None:
        await DeadLetterBox(worker_context(database.internal.engine)).retry(letters)

    here.run_with_database(run)
    here.show({"retried": len(letters)}, f"{len(letters):,} dead letters will be retried")


@app.command()
def clear(
    context: typer.Context,
    table: TableOption = "",
    observer: ObserverOption = "",
    row: RowOption = None,
    everything: AllOption = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Clear dead letters. Observers do not run for their cells until these change again."""
    here = connection(context)
    _require_choice(table, observer, row, everything=everything)
    letters = _letters(here, table, observer, row)
    if letters and not yes:
        confirm(f"Clear {len(letters):,} dead letters?")

    async def run(database: aio.Database) -> int:
        return await DeadLetterBox(worker_context(database.internal.engine)).clear(letters)

    cleared = here.run_with_database(run)
    here.show({"cleared": cleared}, f"{cleared:,} dead letters were cleared")


def _changed(letter: DeadLetter) -> str:
    """The time of the change; weak notifications have none."""
    at = letter.commit_timestamp
    return Timestamp(at).describe() if at else "never"


def _require_choice(table: str, observer: str, row: str | None, *, everything: bool) -> None:
    chosen = bool(table or observer or row is not None)
    if everything and chosen:
        fail(InvalidArgument("--all", "cannot be combined with --table, --observer or --row"))
    if not everything and not chosen:
        fail(UsageError("nothing selected: give --table, --observer, --row or --all"))


def _letters(here: Connection, table: str, observer: str, row: str | None) -> list[DeadLetter]:
    try:
        wanted = None if row is None else row_bytes("row", row)
    except InvalidArgument as error:
        fail(error)

    async def run(database: aio.Database) -> list[DeadLetter]:
        box = DeadLetterBox(worker_context(database.internal.engine))
        return [
            letter
            async for letter in box.look_through(table, observer)
            if wanted in (None, letter.row)
        ]

    return here.run_with_database(run)
