"""`percolator dead-letters`: changes that an observer could not handle."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table as Screen

from percolator import aio
from percolator.aio.observing import worker_context
from percolator.cli.connection import Connection, confirm, connection, fail, plain
from percolator.cli.given import ObserverOption, TableOption, require_row
from percolator.cli.registered import require_observer
from percolator.cli.values import Forms, forms_of
from percolator.codec_names import CodecNames
from percolator.counts import counted
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.observers.running.dead_letter import DeadLetter
from percolator.observers.running.dead_letter_box import DeadLetterBox, as_data
from percolator.row_text import row_text
from percolator.timestamps import Timestamp

app = typer.Typer(help="List [the default], show, retry and clear dead letters.")

_ERROR_CHARACTERS = 80

RowOption = Annotated[
    str | None,
    typer.Option(
        "--row", help="Only this row, as `list` shows it; hex:… for bytes.", show_default=False
    ),
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
    letters, forms = _letters(here, table, observer, None)
    screen = Screen("table", "observer", "column", "row", "changed", "attempts", "error", box=None)
    for one in letters:
        screen.add_row(
            plain(one.table),
            plain(one.observer),
            plain(row_text(one.column)),
            plain(forms[one.table].row_text(one.row)),
            _changed(one),
            str(one.attempts),
            plain(one.error[:_ERROR_CHARACTERS]),
        )
    here.show(_data(letters, forms), screen if letters else "no dead letters")


@app.command()
def show(
    context: typer.Context,
    row: Annotated[
        str,
        typer.Argument(help="The row, as `list` shows it; hex:… for bytes.", show_default=False),
    ],
    table: TableOption = "",
    observer: ObserverOption = "",
) -> None:
    """Show everything about the dead letters of a row."""
    here = connection(context)
    letters, forms = _letters(here, table, observer, row)
    screen = Screen.grid(padding=(0, 2))
    for one in letters:
        for name, text in (
            ("table", one.table),
            ("observer", one.observer),
            ("column", row_text(one.column)),
            ("row", forms[one.table].row_text(one.row)),
            ("changed", _changed(one)),
            ("put aside", Timestamp(one.parked_at).describe()),
            ("attempts", str(one.attempts)),
            ("error", one.error),
        ):
            screen.add_row(name, plain(text))
        for number, line in enumerate(one.traceback.splitlines()):
            screen.add_row("traceback" if number == 0 else "", plain(line))
        screen.add_row("", "")
    here.show(_data(letters, forms), screen if letters else "no such dead letter")


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
    letters, _ = _letters(here, table, observer, row)

    async def run(database: aio.Database) -> None:
        await DeadLetterBox(worker_context(database.internal.engine)).retry(letters)

    here.run_with_database(run)
    here.show({"retried": len(letters)}, f"{counted(len(letters), 'dead letter')} will be retried")


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
    letters, _ = _letters(here, table, observer, row)
    if letters and not yes:
        confirm(f"Clear {counted(len(letters), 'dead letter')}?")

    async def run(database: aio.Database) -> int:
        return await DeadLetterBox(worker_context(database.internal.engine)).clear(letters)

    cleared = here.run_with_database(run)
    text = counted(cleared, "dead letter was", "dead letters were")
    here.show({"cleared": cleared}, f"{text} cleared")


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


def _data(letters: list[DeadLetter], forms: dict[str, Forms]) -> list[dict[str, object]]:
    return [{**as_data(one), "key": forms[one.table].row_data(one.row)} for one in letters]


def _letters(
    here: Connection, table: str, observer: str, row: str | None
) -> tuple[list[DeadLetter], dict[str, Forms]]:
    """The letters, and by table what their rows look like."""
    require_row("row", row)

    async def run(database: aio.Database) -> tuple[list[DeadLetter], dict[str, Forms]]:
        forms: dict[str, Forms] = {}
        chosen: list[DeadLetter] = []
        box = DeadLetterBox(worker_context(database.internal.engine))
        async for letter in box.look_through(table, observer):
            if letter.table not in forms:
                forms[letter.table] = await _forms(database, letter.table, here.timeout_seconds)
            if row is None or _is_of(letter, row, forms[letter.table]):
                chosen.append(letter)
        if not chosen:
            await require_observer(database.internal.engine, table, observer)
        return chosen, forms

    return here.run_with_database(run)


async def _forms(database: aio.Database, table: str, timeout_seconds: float) -> Forms:
    try:
        return await forms_of(database, table, None, timeout_seconds)
    except SchemaError:
        return Forms(CodecNames())  # it is gone, and its letters are not


def _is_of(letter: DeadLetter, row: str, forms: Forms) -> bool:
    try:
        return letter.row == forms.row("row", row)
    except InvalidArgument:
        return False  # the row of another table, whose keys look different
