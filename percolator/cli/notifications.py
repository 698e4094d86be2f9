"""Changes that observers have not handled: `percolator notifications`, `dead-letters`, `wait`."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, NamedTuple

import typer
from rich.table import Table as Screen
from rich.text import Text

from percolator import aio
from percolator.aio.engine import Engine
from percolator.aio.observing import worker_context
from percolator.cli.connection import (
    Connection,
    confirm,
    connection,
    console,
    errors_console,
    fail,
    plain,
    tell_of_limit,
)
from percolator.cli.options import ObserverOption, TableOption, bytes_of
from percolator.cli.values import Forms, forms_of, named_tables
from percolator.codecs.names import CodecNames
from percolator.codecs.readable import counted, row_text
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.observers.context import WorkRequest
from percolator.observers.dead_letters import DeadLetter, DeadLetterBox, as_data
from percolator.observers.quiet import Quiet, Remaining, wait_until_quiet
from percolator.timestamps import Timestamp, in_json

Count = tuple[str, str]
"""A table and an observer."""


class Shown(NamedTuple):
    """One cell, and the observer that it notifies."""

    table: str
    observer: str
    column: str
    row: bytes
    forms: Forms
    timestamps: tuple[int, ...]
    """Newest first."""

    def as_data(self) -> dict[str, object]:
        return {
            "table": self.table,
            "observer": self.observer,
            "column": self.column,
            "row": self.forms.row_data(self.row),
            "timestamps": list(map(in_json, self.timestamps)),
        }

    def as_text(self) -> list[Text | str]:
        oldest = Timestamp(self.timestamps[-1])
        return [
            plain(self.table),
            plain(self.observer),
            plain(self.column),
            plain(self.forms.row_text(self.row)),
            oldest.time_text(),
        ]


def notifications(
    context: typer.Context,
    table: TableOption = "",
    observer: ObserverOption = "",
    limit: Annotated[int, typer.Option(help="List at most this many cells.", min=1)] = 100,
    count: Annotated[
        bool, typer.Option("--count", help="Count all, by observer, instead of listing some.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Show notifications as they are written, until interrupted."),
    ] = False,
) -> None:
    """List the changes that wait for observers, in row order."""
    here = connection(context)
    if follow and count:
        fail(InvalidArgument("--count", "cannot be combined with --follow"))
    if follow:
        here.run_with_database(
            lambda database: _follow(here, database.internal.engine, table, observer)
        )
    elif count:
        _show_counts(here, here.run_with_database(lambda db: _count(db, table, observer)))
    else:
        _show(here, here.run_with_database(lambda db: _list(db, table, observer, limit)), limit)


async def waiting(engine: Engine, table: str, observer: str) -> AsyncIterator[Shown]:
    """Yields the cells that wait for observers, table by table; empty names mean all."""
    observing = worker_context(engine)
    wanted = (observer.encode(),) if observer else ()
    for one in await observing.catalog.describe_all(observing.env.deadline()):
        if one.deleting or (table and one.name != table):
            continue
        forms = Forms(CodecNames.of(one.codecs))
        async with aclosing(
            observing.notifications.survey(WorkRequest(one.table_id, observers=wanted))
        ) as found:
            async for answer in found:
                for waiting in answer.waiting:
                    yield Shown(
                        one.name,
                        _text(waiting.observer),
                        _text(waiting.column),
                        waiting.row,
                        forms,
                        waiting.timestamps,
                    )


async def _list(database: aio.Database, table: str, observer: str, limit: int) -> list[Shown]:
    """Lists one more than `limit` if there are more."""
    await _require(database.internal.engine, table)
    listed: list[Shown] = []
    async for one in waiting(database.internal.engine, table, observer):
        listed.append(one)
        if len(listed) > limit:
            break
    if not listed:
        await require_observer(database.internal.engine, table, observer)
    return listed


async def _count(database: aio.Database, table: str, observer: str) -> Counter[Count]:
    await _require(database.internal.engine, table)
    counts: Counter[Count] = Counter()
    async for one in waiting(database.internal.engine, table, observer):
        counts[one.table, one.observer] += 1
    if not counts:
        await require_observer(database.internal.engine, table, observer)
    return counts


async def _require(engine: Engine, table: str) -> None:
    if table:
        await engine.catalog.describe(table, engine.now() + engine.limits.call_seconds)


def _show(here: Connection, listed: list[Shown], limit: int) -> None:
    screen = Screen("table", "observer", "column", "row", "since", box=None)
    for one in listed[:limit]:
        screen.add_row(*one.as_text())
    if len(listed) > limit:
        tell_of_limit(limit, "cells")
    here.show([one.as_data() for one in listed[:limit]], screen if listed else "no notifications")


def _show_counts(here: Connection, counts: Counter[Count]) -> None:
    screen = Screen("table", "observer", "cells", box=None)
    for (table, observer), cells in sorted(counts.items()):
        screen.add_row(plain(table), plain(observer), f"{cells:,}")
    here.show(
        [
            {"table": table, "observer": observer, "cells": cells}
            for (table, observer), cells in sorted(counts.items())
        ],
        screen if counts else "no notifications",
    )


async def _follow(here: Connection, engine: Engine, table: str, observer: str) -> None:
    """Prints notifications as they arrive. It only listens, so it takes no work from workers."""
    deadline = engine.now() + engine.limits.call_seconds
    watched: dict[int, list[bytes]] = {}
    described = await engine.catalog.describe_all(deadline)
    tables = named_tables(described)
    for one in described:
        wanted = [o.name for o in one.observers if not observer or o.name == observer]
        if one.deleting or not wanted or (table and one.name != table):
            continue
        watched[one.table_id] = [name.encode() for name in wanted]
    if not watched:
        if table or observer:
            raise no_observer(table, observer)
        raise SchemaError("no observers are registered")
    async with aclosing(
        worker_context(engine).notifications.hints(watched, listen_only=True)
    ) as hints:
        async for batch in hints:
            for hint in batch.notifications:
                shown = Shown(
                    tables[hint.table_id].name,
                    _text(hint.observer),
                    _text(hint.column),
                    hint.row,
                    tables[hint.table_id].forms,
                    (hint.timestamp,),
                )
                _print(here, shown)
            if batch.left_out:
                _print_left_out(here, batch.left_out)
            await asyncio.sleep(0)


def _print(here: Connection, shown: Shown) -> None:
    """One line for each, so that a reader need not wait for the end."""
    if here.as_json:
        typer.echo(json.dumps(shown.as_data()))
        return
    time = Timestamp(shown.timestamps[0]).time_text()
    row = shown.forms.row_text(shown.row)
    line = f"{time}  {shown.table}  {shown.observer}  {shown.column}  {row}"
    console.print(plain(line), soft_wrap=True)


def _print_left_out(here: Connection, left_out: int) -> None:
    if here.as_json:
        typer.echo(json.dumps({"left_out": left_out}))
    else:
        console.print(f"({left_out} more are not shown: they came too quickly)")


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


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
    bytes_of("row", row)

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


def wait(
    context: typer.Context,
    timeout: Annotated[
        float | None,
        typer.Option(help="Give up after this many seconds [default: never].", min=0.001),
    ] = None,
) -> None:
    """Wait until observers have nothing left to do, in any table.

    It waits neither for paused observers nor for dead letters, but reports both.
    """
    here = connection(context)

    async def run(database: aio.Database) -> Quiet:
        def note(remaining: Remaining) -> None:
            left = f"at least {remaining}" if remaining else "nothing found; checking once more"
            status.update(plain(left))

        return await wait_until_quiet(
            worker_context(database.internal.engine), timeout, on_pass=note
        )

    with errors_console.status("looking for work") as status:
        quiet = here.run_with_database(run)
    lines = Screen.grid()
    lines.add_row(f"nothing left to do ({quiet.passes} passes, {quiet.seconds:.1f} s)")
    for table, observer in quiet.paused:
        lines.add_row(plain(f"did not wait for observer {observer} of table {table}: it is paused"))
    for (table, observer), count in sorted(quiet.dead_letters.items()):
        left = counted(count, "dead letter")
        lines.add_row(plain(f"observer {observer} of table {table} has {left}"))
    here.show(
        {
            "passes": quiet.passes,
            "seconds": round(quiet.seconds, 3),
            "paused": [{"table": table, "observer": observer} for table, observer in quiet.paused],
            "dead_letters": [
                {"table": table, "observer": observer, "count": count}
                for (table, observer), count in sorted(quiet.dead_letters.items())
            ],
        },
        lines,
    )


async def require_observer(engine: Engine, table: str, observer: str) -> None:
    """Raises `SchemaError` if an observer is named, and none of that name is registered.

    For commands that have found nothing: what a removed observer has left is shown before.
    """
    if not observer:
        return
    described = await engine.catalog.describe_all(engine.now() + engine.limits.call_seconds)
    tables = [one for one in described if not one.deleting and table in ("", one.name)]
    if observer not in {its.name for one in tables for its in one.observers}:
        raise no_observer(table, observer)


def no_observer(table: str, observer: str) -> SchemaError:
    """The error for names of which none matches; at least one of them is given."""
    name = f" {observer!r}" if observer else ""
    return SchemaError(f"no observer{name}{f' of table {table!r}' if table else ''} is registered")
