"""`percolator get`, `set`, `delete` and `scan`: looking at rows, and repairing them by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.table import Table as Screen

from percolator import aio, codecs
from percolator.cli.connection import Connection, connection, fail, plain, tell_of_limit
from percolator.cli.durations import duration_seconds
from percolator.cli.given import not_empty
from percolator.cli.stored import SPACES, described, first_cells, value_of
from percolator.cli.values import Forms, ValueType, forms_of, table_info
from percolator.errors import InvalidArgument, SchemaError
from percolator.row_text import row_bytes, row_text
from percolator.schema import Column, Family, Row, Table
from percolator.timestamps import Timestamp
from percolator.v1.cells_pb2 import Cell

TableName = Annotated[str, typer.Argument(help="The table.", show_default=False)]
RowName = Annotated[
    str,
    typer.Argument(
        help='The row, as the table\'s keys are written: text, 17, ["a", 17], or hex:00ff.',
        show_default=False,
    ),
]
PinTtl = Annotated[
    float | None,
    typer.Option(
        help="Seconds that the pin outlives this process [default: 60, or the limit if lower].",
        min=0.1,
        max=3600,
    ),
]
At = Annotated[
    str,
    typer.Option(
        help="A timestamp, an ISO 8601 time with its zone, or a time ago: -5m [default: now].",
        metavar="TIME",
        callback=not_empty,
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="All stored cells: versions, locks, markers, notifications.")
]
Families = Annotated[
    list[str] | None,
    typer.Option("--family", help="Only columns that begin with this; repeatable."),
]
As = Annotated[
    ValueType | None,
    typer.Option("--as", help="Type of the values [default: the codec of each column, or text]."),
]


_ANY = Table("any", key=codecs.stored)
"""A column has the same rules in every table."""

Bounds = tuple[bytes, bytes]
"""The first row, and the row to end before; empty for none."""


def get(
    context: typer.Context,
    table: TableName,
    row: RowName,
    columns: Annotated[list[str] | None, typer.Argument(help="Columns [default: all].")] = None,
    family: Families = None,
    at: At = "",
    raw: Raw = False,
    limit: Annotated[int, typer.Option(help="With --raw: at most this many cells.", min=1)] = 1_000,
    kind: As = None,
) -> None:
    """Show one row. The exit code is 1 if there is nothing to show."""
    here = connection(context)
    _check_rows(row=row)
    wanted = _columns("columns", columns, hidden_too=raw)
    families = _families(family)
    if raw:
        if at:
            fail(InvalidArgument("--raw", "shows all versions: it cannot be combined with --at"))
        _refuse_families(families)

        def only(forms: Forms) -> Bounds:
            return forms.row("row", row), forms.row("row", row) + b"\0"

        if not _show_stored(here, table, only, wanted, kind, limit):
            raise typer.Exit(1)
        return
    moment = moment_of(at)

    async def read(database: aio.Database) -> tuple[Forms, Row[bytes]]:
        forms = await forms_of(database, table, kind, here.timeout_seconds)
        rows = Table(table, key=codecs.stored)
        async with database.snapshot(at=moment) as snapshot:
            chosen = _chosen(rows, wanted, families)
            return forms, (await snapshot.get_many(rows, [forms.row("row", row)], chosen))[0]

    forms, found = here.run_with_database(read)
    empty = "the row has nothing in these columns" if wanted or families else "the row is empty"
    here.show(_values(found.raw(), forms), _screen([found], forms) if found else empty)
    if not found:
        raise typer.Exit(1)


def set_cells(
    context: typer.Context,
    table: TableName,
    row: RowName,
    cells: Annotated[list[str], typer.Argument(help="COLUMN=VALUE ...", show_default=False)],
    kind: As = None,
) -> None:
    """Write cells of one row, in one transaction.

    Values are written as their columns' codecs say. --as is for columns that have none yet.
    """
    here = connection(context)
    _check_rows(row=row)
    values: dict[bytes, tuple[str, str]] = {}
    for cell in cells:
        column, equals, value = cell.partition("=")
        if not equals:
            fail(InvalidArgument("cells", f"expected COLUMN=VALUE, found {cell[:80]!r}"))
        if not column:
            fail(InvalidArgument("cells", f"no column in {cell[:80]!r}"))
        [name] = _columns("cells", [column])
        if name in values:
            fail(InvalidArgument("cells", f"two values for {column!r}"))
        values[name] = column, value

    async def work(database: aio.Database) -> None:
        forms = await forms_of(database, table, kind, here.timeout_seconds)
        key = forms.row("row", row)
        stored = {name: forms.value(*given) for name, given in values.items()}
        rows = Table(table, key=codecs.stored)

        async def write(tx: aio.Transaction) -> None:
            for name, value in stored.items():
                tx.set(key, forms.to_write(rows, name), value)

        await database.run(write)

    here.run_with_database(work)
    here.show({"written": len(values)}, f"{len(values)} written")


def delete(
    context: typer.Context,
    table: TableName,
    row: RowName,
    columns: Annotated[list[str] | None, typer.Argument(help="Columns [default: all].")] = None,
) -> None:
    """Delete cells of one row, in one transaction. Older versions stay until they are collected."""
    here = connection(context)
    _check_rows(row=row)
    wanted = _columns("columns", columns)

    async def work(database: aio.Database) -> int:
        forms = await forms_of(database, table, None, here.timeout_seconds)
        key, rows = forms.row("row", row), Table(table, key=codecs.stored)

        async def remove(tx: aio.Transaction) -> int:
            # Not read at once: it may be too large for one answer.
            chosen = [_column(rows, name) for name in wanted] or None
            found = [row async for row in tx.scan(rows, start=key, end=key + b"\0", columns=chosen)]
            names = [name for row in found for name in row]
            for name in names:
                tx.delete(key, _column(rows, name))
            return len(names)

        return await database.run(remove)

    deleted = here.run_with_database(work)
    here.show({"deleted": deleted}, f"{deleted} deleted")


def scan(
    context: typer.Context,
    table: TableName,
    start: Annotated[str, typer.Option(help="The first row.")] = "",
    end: Annotated[str, typer.Option(help="The row to end before.")] = "",
    prefix: Annotated[str, typer.Option(help="Only rows that begin with this.")] = "",
    column: Annotated[list[str] | None, typer.Option(help="Only this column; repeatable.")] = None,
    family: Families = None,
    limit: Annotated[int, typer.Option(help="At most this many rows, or raw cells.", min=1)] = 100,
    reverse: Annotated[bool, typer.Option("--reverse", help="From the last to the first.")] = False,
    at: At = "",
    raw: Raw = False,
    kind: As = None,
) -> None:
    """Show rows in order."""
    here = connection(context)
    _check_rows(**{"--start": start, "--end": end, "--prefix": prefix})
    if prefix and (start or end):
        fail(InvalidArgument("--prefix", "cannot be combined with --start or --end"))
    wanted = _columns("--column", column, hidden_too=raw)
    families = _families(family)

    def bounds(forms: Forms) -> Bounds:
        if prefix:
            begin = forms.prefix("--prefix", prefix)
            return begin, codecs.after_prefix(begin)
        return forms.end_of_range("--start", start), forms.end_of_range("--end", end)

    if raw:
        if reverse or at:
            fail(InvalidArgument("--raw", "cannot be combined with --at or --reverse"))
        _refuse_families(families)
        _show_stored(here, table, bounds, wanted, kind, limit)
        return
    moment = moment_of(at)

    async def read(database: aio.Database) -> tuple[Forms, list[Row[bytes]]]:
        forms = await forms_of(database, table, kind, here.timeout_seconds)
        first, last = bounds(forms)
        rows = Table(table, key=codecs.stored)
        chosen = _chosen(rows, wanted, families)
        async with database.snapshot(at=moment) as snapshot:
            pages = snapshot.scan(
                rows,
                start=first or None,
                end=last or None,
                columns=chosen,
                reverse=reverse,
                limit=limit + 1,
            )
            return forms, [row async for row in pages]

    forms, found = here.run_with_database(read)
    if len(found) > limit:
        tell_of_limit(limit, "rows")
        del found[limit:]
    data = [{"row": forms.row_data(row.key), "columns": _values(row.raw(), forms)} for row in found]
    here.show(data, _screen(found, forms) if found else "no rows")


def _show_stored(
    here: Connection,
    table: str,
    bounds: Callable[[Forms], Bounds],
    columns: list[bytes],
    kind: ValueType | None,
    limit: int,
) -> bool:
    """Shows the stored cells of a range of rows. False if there are none."""

    async def read(database: aio.Database) -> tuple[Forms, list[Cell]]:
        info = await table_info(database, table, here.timeout_seconds)
        forms = Forms(info.codecs.names, kind)
        return forms, await first_cells(
            database, info, list(SPACES), *bounds(forms), columns, limit + 1, here.timeout_seconds
        )

    forms, cells = here.run_with_database(read)
    if len(cells) > limit:
        tell_of_limit(limit, "cells")
        del cells[limit:]
    screen = Screen("row", "column", "space", "what", "value", box=None)
    data = []
    for cell in cells:
        what, value = described(cell), value_of(cell)
        data.append(
            {
                "row": forms.row_data(cell.row),
                "column": row_text(cell.column),
                "space": SPACES[cell.space],
                **what,
                "value": None if value is None else forms.value_data(cell.column, value),
            }
        )
        screen.add_row(
            plain(forms.row_text(cell.row)),
            plain(row_text(cell.column)),
            SPACES[cell.space],
            plain(", ".join(f"{name} {one}" for name, one in what.items() if one is not None)),
            plain("" if value is None else forms.value_text(cell.column, value)),
        )
    here.show(data, screen if cells else "nothing is stored there")
    return bool(cells)


def _screen(rows: list[Row[bytes]], forms: Forms) -> Screen:
    screen = Screen("row", "column", "value", box=None)
    for row in rows:
        key = plain(forms.row_text(row.key))
        for name, value in sorted(row.raw().items()):
            screen.add_row(key, plain(row_text(name)), plain(forms.value_text(name, value)))
    return screen


def _values(cells: Mapping[bytes, bytes], forms: Forms) -> dict[str, object]:
    return {row_text(name): forms.value_data(name, value) for name, value in sorted(cells.items())}


def _chosen(
    table: Table[bytes], columns: list[bytes], families: list[bytes]
) -> list[Column[Any] | Family[Any]] | None:
    """What was asked for; None for all columns."""
    chosen: list[Column[Any] | Family[Any]] = [_column(table, one) for one in columns]
    return [*chosen, *(table.family(one, codecs.stored) for one in families)] or None


def _families(given: list[str] | None) -> list[bytes]:
    families = [_bytes("--family", one) for one in given or ()]
    if b"" in families:
        fail(InvalidArgument("--family", "is empty: leave it out to see all columns"))
    return families


def _refuse_families(families: list[bytes]) -> None:
    if families:
        fail(InvalidArgument("--raw", "cannot be combined with --family"))


def _columns(field: str, given: list[str] | None, *, hidden_too: bool = False) -> list[bytes]:
    """The names of columns. `hidden_too`: raw cells are also those that transactions hide."""
    names = [_bytes(field, one) for one in given or ()]
    try:
        for name in names:
            if not (hidden_too and name.startswith(b"\0")):
                _column(_ANY, name)
    except SchemaError as error:
        fail(InvalidArgument(field, error.message))
    return names


def _column(table: Table[bytes], name: bytes) -> Column[bytes]:
    return table.column(name, codecs.stored)


def _check_rows(**rows: str) -> None:
    """Refuses what no codec can mean, before anything is connected to."""
    for field, text in rows.items():
        _bytes(field, text)


def _bytes(field: str, text: str) -> bytes:
    try:
        return row_bytes(field, text)
    except InvalidArgument as error:
        fail(error)


def moment_of(text: str, option: str = "--at") -> Timestamp | None:
    """The timestamp that an option names; None for the present. "-5m" is five minutes ago, by the
    clock of this machine."""
    if not text:
        return None
    try:
        if text.startswith("-"):
            ago = timedelta(seconds=duration_seconds(option, text[1:]))
            return Timestamp.before(datetime.now(UTC) - ago)
        return Timestamp.parse_to_read(text)
    except OverflowError:
        fail(InvalidArgument(option, f"{text!r} is before every commit"))
    except InvalidArgument as error:
        fail(InvalidArgument(option, error.reason))
