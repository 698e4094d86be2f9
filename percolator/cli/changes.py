"""`percolator changes`: the changes of a table, in the order of their commits."""

from __future__ import annotations

import json
from contextlib import aclosing, nullcontext
from typing import Annotated

import typer

from percolator import aio, codecs
from percolator.changes import Change
from percolator.cli.cells import As, TableName, moment_of
from percolator.cli.connection import Connection, connection, console, fail, plain
from percolator.cli.given import not_empty
from percolator.cli.stopping import stopped_by_signals
from percolator.cli.values import Forms, forms_of
from percolator.errors import InvalidArgument
from percolator.row_text import row_text
from percolator.schema import Table
from percolator.tasks import Tasks
from percolator.timestamps import in_json


def changes(
    context: typer.Context,
    table: TableName,
    after: Annotated[
        str,
        typer.Option(
            help="Changes above this: a timestamp, or an ISO 8601 time with its zone "
            "[default with --follow: now].",
            metavar="TIME",
            callback=not_empty,
        ),
    ] = "",
    until: Annotated[
        str,
        typer.Option(
            help="Changes up to this time [default: now].", metavar="TIME", callback=not_empty
        ),
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for further changes until Ctrl-C or SIGTERM.")
    ] = False,
    before: Annotated[
        bool, typer.Option("--before", help="Also show the values before the change.")
    ] = False,
    kind: As = None,
) -> None:
    """Show the changes of a table that has a change feed.

    Each line, and with --json each object, is one change: timestamp, kind, row, column, with
    --before the value before, and the value. Text is in quotes; "-" means no value. To continue
    later, use --after with the timestamp of the last commit that was shown as a whole: its last
    line says so.
    """
    here = connection(context)
    if follow and until:
        fail(InvalidArgument("--until", "cannot be combined with --follow"))
    if not follow and not after:
        fail(InvalidArgument("--after", "is required without --follow; give a timestamp"))
    begin, end = moment_of(after, "--after"), moment_of(until, "--until")

    async def run(database: aio.Database) -> None:
        last = None if follow else end or await database.timestamp()
        forms = await forms_of(database, table, kind, here.timeout_seconds)
        rows = Table(table, key=codecs.stored)
        closing = Tasks()
        found = database.changes(rows, after=begin, until=last, before=before)

        def stop() -> None:
            closing.start(found.close())

        async with aclosing(found):
            # What has an end is not done if it is interrupted.
            with stopped_by_signals(stop) if follow else nullcontext():
                async for change in found:
                    _show(here, change, forms, before=before)

    here.run_with_database(run)


def _show(here: Connection, change: Change[bytes], forms: Forms, *, before: bool) -> None:
    if here.as_json:
        data = {
            "commit_timestamp": in_json(change.commit_timestamp),
            "row": forms.row_data(change.key),
            "column": row_text(change.column),
            "kind": change.kind.value,
            "value": _data(change, change.raw_value, forms),
            "ends_commit": change.ends_commit,
        }
        if before:
            data["before"] = _data(change, change.raw_before, forms)
        typer.echo(json.dumps(data, allow_nan=False))
    else:
        line = _line(change, forms, before=before)
        console.print(plain(line), highlight=False, soft_wrap=True)


def _line(change: Change[bytes], forms: Forms, *, before: bool) -> str:
    row, column = _quoted(forms.row_text(change.key)), _quoted(row_text(change.column))
    words = [str(int(change.commit_timestamp)), change.kind.value, row, column]
    if before:
        words.append(_shown(change, change.raw_before, forms))
    words.append(_shown(change, change.raw_value, forms))
    words += ["(end of commit)"] * change.ends_commit
    return "  ".join(words)


def _data(change: Change[bytes], value: bytes | None, forms: Forms) -> object:
    return None if value is None else forms.value_data(change.column, value)


def _shown(change: Change[bytes], value: bytes | None, forms: Forms) -> str:
    """A value as text that nothing else can be taken for: "-" is that there is none."""
    if value is None:
        return "-"
    data = forms.value_data(change.column, value)
    if isinstance(data, str) and forms.codec(change.column) is not codecs.json:
        return _quoted(data)
    return forms.value_text(change.column, value)


def _quoted(text: str) -> str:
    """Text in quotes; bytes that are not text stay as they are."""
    return text if text.startswith("hex:") else json.dumps(text, ensure_ascii=False)
