"""`percolator get`, `set`, `delete` and `scan`: looking at rows, and repairing them by hand."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.table import Table as Screen

from percolator import aio, codecs
from percolator.cli.connection import Connection, connection, fail, plain, tell_of_limit
from percolator.cli.durations import duration_seconds
from percolator.cli.stored import SPACES, described, first_cells, value_of
from percolator.cli.values import ValueType, value_bytes, value_data, value_text
from percolator.errors import InvalidArgument
from percolator.row_text import row_bytes, row_text
from percolator.schema import Column, Family, Row, Table
from percolator.timestamps import Timestamp
from percolator.v1.cells_pb2 import Cell

TableName = Annotated[str, typer.Argument(help="The table.", show_default=False)]
RowName = Annotated[str, typer.Argument(help="The row: text, or hex:00ff.", show_default=False)]
At = Annotated[
    str,
    typer.Option(
        help="A timestamp, an ISO 8601 time with its zone, or a time ago: -5m [default: now].",
        metavar="TIME",
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="All stored cells: versions, locks, markers, notifications.")
]
Families = Annotated[
    list[str] | None,
    typer.Option("--family", help="Only columns that begin with this; repeatable."),
]
As = Annotated[ValueType, typer.Option("--as", help="Type of the values.")]


def get(
    context: typer.Context,
    table: TableName,
    row: RowName,
    columns: Annotated[list[str] | None, typer.Argument(help="Columns [default: all].")] = None,
    family: Families = None,
    at: At = "",
    raw: Raw = False,
    limit: Annotated[int, typer.Option(help="With --raw: at most this many cells.", min=1)] = 1_000,
    kind: As = ValueType.TEXT,
) -> None:
    """Show one row. The exit code is 1 if it is empty."""
    here = connection(context)
    key, wanted = _bytes("row", row), [_bytes("columns", one) for one in columns or ()]
    families = _families(family)
    if raw:
        if at:
            fail(InvalidArgument("--raw", "shows all versions: it cannot be combined with --at"))
        _refuse_families(families)
        if not _show_stored(here, table, key, key + b"\0", wanted, kind, limit):
            raise typer.Exit(1)
        return
    moment = moment_of(at)

    async def read(database: aio.Database) -> Row[bytes]:
        rows = Table(table, key=codecs.raw)
        async with database.snapshot(at=moment) as snapshot:
            chosen = _chosen(rows, wanted, families)
            return (await snapshot.get_many(rows, [key], chosen))[0]

    found = here.run_with_database(read)
    here.show(_values(found.raw(), kind), _screen([found], kind) if found else "the row is empty")
    if not found:
        raise typer.Exit(1)


def set_cells(
    context: typer.Context,
    table: TableName,
    row: RowName,
    cells: Annotated[list[str], typer.Argument(help="COLUMN=VALUE ...", show_default=False)],
    kind: As = ValueType.TEXT,
) -> None:
    """Write cells of one row, in one transaction."""
    here = connection(context)
    key = _bytes("row", row)
    values: dict[bytes, bytes] = {}
    for cell in cells:
        column, equals, value = cell.partition("=")
        if not equals:
            fail(InvalidArgument("cells", f"expected COLUMN=VALUE, found {cell[:80]!r}"))
        name = _bytes("cells", column)
        if not name or name in values:
            reason = f"two values for {column!r}" if name else f"no column in {cell[:80]!r}"
            fail(InvalidArgument("cells", reason))
        try:
            values[name] = value_bytes(column, value, kind)
        except InvalidArgument as error:
            fail(error)

    async def write(tx: aio.Transaction) -> None:
        rows = Table(table, key=codecs.raw)
        for name, value in values.items():
            await tx.set(key, _column(rows, name), value)

    here.run_with_database(lambda database: database.run(write))
    here.show({"written": len(values)}, f"{len(values)} written")


def delete(
    context: typer.Context,
    table: TableName,
    row: RowName,
    columns: Annotated[list[str] | None, typer.Argument(help="Columns [default: all].")] = None,
) -> None:
    """Delete cells of one row, in one transaction. Older versions stay until they are collected."""
    here = connection(context)
    key, wanted = _bytes("row", row), [_bytes("columns", one) for one in columns or ()]

    async def remove(tx: aio.Transaction) -> int:
        rows = Table(table, key=codecs.raw)
        found = (await tx.get_many(rows, [key]))[0]
        names = [name for name in found if not wanted or name in wanted]
        for name in names:
            await tx.delete(key, _column(rows, name))
        return len(names)

    deleted = here.run_with_database(lambda database: database.run(remove))
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
    kind: As = ValueType.TEXT,
) -> None:
    """Show rows in order."""
    here = connection(context)
    bounds = {"start": _bytes("--start", start), "end": _bytes("--end", end)}
    if prefix:
        if start or end:
            fail(InvalidArgument("--prefix", "cannot be combined with --start or --end"))
        begin = _bytes("--prefix", prefix)
        bounds = {"start": begin, "end": codecs.after_prefix(begin)}
    wanted = [_bytes("--column", one) for one in column or ()]
    families = _families(family)
    if raw:
        if reverse or at:
            fail(InvalidArgument("--raw", "cannot be combined with --at or --reverse"))
        _refuse_families(families)
        _show_stored(here, table, bounds["start"], bounds["end"], wanted, kind, limit)
        return
    moment = moment_of(at)

    async def read(database: aio.Database) -> list[Row[bytes]]:
        rows = Table(table, key=codecs.raw)
        chosen = _chosen(rows, wanted, families)
        async with database.snapshot(at=moment) as snapshot:
            pages = snapshot.scan(
                rows,
                start=bounds["start"] or None,
                end=bounds["end"] or None,
                columns=chosen,
                reverse=reverse,
                limit=limit + 1,
            )
            return [row async for row in pages]

    found = here.run_with_database(read)
    if len(found) > limit:
        tell_of_limit(limit, "rows")
        del found[limit:]
    data = [{"row": row_text(row.key), "columns": _values(row.raw(), kind)} for row in found]
    here.show(data, _screen(found, kind) if found else "no rows")


def _show_stored(
    here: Connection,
    table: str,
    start: bytes,
    end: bytes,
    columns: list[bytes],
    kind: ValueType,
    limit: int,
) -> bool:
    """Shows the stored cells of a range of rows. False if there are none."""

    async def read(database: aio.Database) -> list[Cell]:
        deadline = database.internal.engine.now() + here.timeout_seconds
        info = await database.internal.engine.catalog.table(table, deadline)
        return await first_cells(
            database, info, list(SPACES), start, end, columns, limit + 1, here.timeout_seconds
        )

    cells = here.run_with_database(read)
    if len(cells) > limit:
        tell_of_limit(limit, "cells")
        del cells[limit:]
    screen = Screen("row", "column", "space", "what", "value", box=None)
    data = []
    for cell in cells:
        what, value = described(cell), value_of(cell)
        data.append(
            {
                "row": row_text(cell.row),
                "column": row_text(cell.column),
                "space": SPACES[cell.space],
                **what,
                "value": None if value is None else value_data(value, kind),
            }
        )
        screen.add_row(
            plain(row_text(cell.row)),
            plain(row_text(cell.column)),
            SPACES[cell.space],
            plain(", ".join(f"{name} {one}" for name, one in what.items() if one is not None)),
            plain("" if value is None else value_text(value, kind)),
        )
    here.show(data, screen if cells else "nothing is stored there")
    return bool(cells)


def _screen(rows: list[Row[bytes]], kind: ValueType) -> Screen:
    screen = Screen("row", "column", "value", box=None)
    for row in rows:
        for name, value in sorted(row.raw().items()):
            screen.add_row(
                plain(row_text(row.key)), plain(row_text(name)), plain(value_text(value, kind))
            )
    return screen


def _values(cells: Mapping[bytes, bytes], kind: ValueType) -> dict[str, object]:
    return {row_text(name): value_data(value, kind) for name, value in sorted(cells.items())}


def _chosen(
    table: Table[bytes], columns: list[bytes], families: list[bytes]
) -> list[Column[Any] | Family[Any]] | None:
    """What was asked for; None for all columns."""
    chosen: list[Column[Any] | Family[Any]] = [_column(table, one) for one in columns]
    return [*chosen, *(table.family(one, codecs.raw) for one in families)] or None


def _families(given: list[str] | None) -> list[bytes]:
    families = [_bytes("--family", one) for one in given or ()]
    if b"" in families:
        fail(InvalidArgument("--family", "is empty: leave it out to see all columns"))
    return families


def _refuse_families(families: list[bytes]) -> None:
    if families:
        fail(InvalidArgument("--raw", "cannot be combined with --family"))


def _column(table: Table[bytes], name: bytes) -> Column[Any]:
    return table.column(name, codecs.raw)


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
