"""Rows and their versions: `percolator get`, `set`, `delete`, `scan`, `history` and `changes`."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, nullcontext
from functools import reduce
from operator import and_
from types import FrameType
from typing import Annotated, Any

import typer
from rich.table import Table as Screen

from percolator import aio, codecs
from percolator.aio.find import declared_for_bytes, index_named
from percolator.changes import Change
from percolator.cli.connection import Connection, connection, console, fail, plain, tell_of_limit
from percolator.cli.options import As, At, RowName, TableName, bytes_of, not_empty, timestamp_of
from percolator.cli.values import (
    SPACES,
    Forms,
    ValueType,
    described,
    first_cells,
    forms_of,
    shown_column,
    stored_cells,
    table_info,
    value_of,
)
from percolator.codecs.indexes import entry_part
from percolator.codecs.readable import counted, quoted, row_text, value_bytes, value_codec
from percolator.codecs.values import after_prefix
from percolator.conditions import Condition, compared
from percolator.errors import InvalidArgument, SchemaError
from percolator.formats.records import RecordKind, WriteRecord, locked_column
from percolator.schema import Column, Family, Row, Table
from percolator.tasks import Tasks
from percolator.timestamps import Timestamp, in_json
from percolator.v1.cells_pb2 import Cell, RowFilter, Space
from percolator.wire.table_indexes import no_index

Raw = Annotated[
    bool, typer.Option("--raw", help="All stored cells: versions, locks, markers, notifications.")
]
Families = Annotated[
    list[str] | None,
    typer.Option("--family", help="Only columns that begin with this; repeatable."),
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
    bytes_of("row", row)
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
    timestamp = timestamp_of(at)

    async def read(database: aio.Database) -> tuple[Forms, Row[bytes]]:
        forms = await forms_of(database, table, kind, here.timeout_seconds)
        rows = Table(table, key=codecs.stored)
        async with database.snapshot(at=timestamp) as snapshot:
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
    bytes_of("row", row)
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
    bytes_of("row", row)
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
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="Only rows whose column compares like this; repeatable: all must hold.",
            metavar="COLUMN(=|!=|<|<=|>|>=)VALUE",
        ),
    ] = None,
    counts: Annotated[
        bool, typer.Option("--count", help="Only how many rows there are, whatever the limit.")
    ] = False,
    limit: Annotated[int, typer.Option(help="At most this many rows, or raw cells.", min=1)] = 100,
    reverse: Annotated[bool, typer.Option("--reverse", help="From the last to the first.")] = False,
    at: At = "",
    raw: Raw = False,
    kind: As = None,
) -> None:
    """Show rows in order.

    Values in --where are read as their columns' codecs say, or as --as does.
    """
    here = connection(context)
    for option, text in {"--start": start, "--end": end, "--prefix": prefix}.items():
        bytes_of(option, text)
    if prefix and (start or end):
        fail(InvalidArgument("--prefix", "cannot be combined with --start or --end"))
    wanted = _columns("--column", column, hidden_too=raw)
    families = _families(family)
    comparisons = [_comparison(one) for one in where or ()]
    if counts and (wanted or families or reverse):
        reason = "cannot be combined with --column, --family or --reverse"
        fail(InvalidArgument("--count", reason))

    def bounds(forms: Forms) -> Bounds:
        if prefix:
            begin = forms.prefix("--prefix", prefix)
            return begin, after_prefix(begin)
        return forms.end_of_range("--start", start), forms.end_of_range("--end", end)

    if raw:
        if reverse or at or comparisons or counts:
            reason = "cannot be combined with --at, --reverse, --where or --count"
            fail(InvalidArgument("--raw", reason))
        _refuse_families(families)
        _show_stored(here, table, bounds, wanted, kind, limit)
        return
    timestamp = timestamp_of(at)

    async def count(database: aio.Database) -> int:
        forms = await forms_of(database, table, kind, here.timeout_seconds)
        first, last = bounds(forms)
        rows = Table(table, key=codecs.stored)
        async with database.snapshot(at=timestamp) as snapshot:
            return await snapshot.count(
                rows,
                start=first or None,
                end=last or None,
                where=_condition(rows, forms, comparisons),
            )

    if counts:
        number = here.run_with_database(count)
        here.show({"rows": number}, counted(number, "row"))
        return

    async def read(database: aio.Database) -> tuple[Forms, list[Row[bytes]]]:
        forms = await forms_of(database, table, kind, here.timeout_seconds)
        first, last = bounds(forms)
        rows = Table(table, key=codecs.stored)
        chosen = _chosen(rows, wanted, families)
        async with database.snapshot(at=timestamp) as snapshot:
            pages = snapshot.scan(
                rows,
                start=first or None,
                end=last or None,
                columns=chosen,
                where=_condition(rows, forms, comparisons),
                reverse=reverse,
                limit=limit + 1,
            )
            return forms, [row async for row in pages]

    _show_rows(here, *here.run_with_database(read), limit)


def find(
    context: typer.Context,
    table: TableName,
    index: Annotated[str, typer.Argument(help="The index.", show_default=False)],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            help='Values of its first columns, after "--" if one begins with "-" '
            "[default: all rows of the index].",
        ),
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="The first value of the column after those.")
    ] = None,
    end: Annotated[str | None, typer.Option(help="Its value to end before.")] = None,
    prefix: Annotated[str | None, typer.Option(help="The beginning of its value.")] = None,
    column: Annotated[list[str] | None, typer.Option(help="Only this column; repeatable.")] = None,
    family: Families = None,
    limit: Annotated[int, typer.Option(help="At most this many rows.", min=1)] = 100,
    reverse: Annotated[bool, typer.Option("--reverse", help="From the last to the first.")] = False,
    at: At = "",
) -> None:
    """Show the rows with these values in the columns of an index, in its order."""
    here, timestamp = connection(context), timestamp_of(at)
    wanted, families = _columns("--column", column), _families(family)

    async def read(database: aio.Database) -> tuple[Forms, list[Row[bytes]]]:
        info = await table_info(database, table, here.timeout_seconds)
        engine = database.internal.engine
        deadline = engine.now() + here.timeout_seconds
        known = await index_named(engine.env, info.table_id, index, deadline)
        if known is None:
            raise no_index(table, index)
        rows = Table(table, key=codecs.stored)

        def value(field: str, place: int, text: str) -> bytes:
            # Values beyond its columns, and their number, are refused by the look-up.
            name, codec = known.columns[min(place, len(known.columns) - 1)]
            stored = value_bytes(field, value_codec(codec), text)
            try:
                entry_part(codec, stored, name)
            except SchemaError as error:
                raise InvalidArgument(field, error.message) from error
            return stored

        def of_next(option: str, text: str | None) -> bytes | None:
            return None if text is None else value(option, len(values or ()), text)

        async with database.snapshot(at=timestamp) as snapshot:
            found = snapshot.find(
                declared_for_bytes(rows, known),
                *(value("values", place, text) for place, text in enumerate(values or ())),
                start=of_next("--start", start),
                end=of_next("--end", end),
                prefix=of_next("--prefix", prefix),
                columns=_chosen(rows, wanted, families),
                reverse=reverse,
                limit=limit + 1,
            )
            return Forms(info.codecs.names), [row async for row in found]

    _show_rows(here, *here.run_with_database(read), limit)


def _show_rows(here: Connection, forms: Forms, found: list[Row[bytes]], limit: int) -> None:
    if len(found) > limit:
        tell_of_limit(limit, "rows")
        del found[limit:]
    data = [{"row": forms.row_data(row.key), "columns": _values(row.raw(), forms)} for row in found]
    here.show(data, _screen(found, forms) if found else "no rows")


_OPERATORS = {
    "=": RowFilter.KIND_EQUAL,
    "!=": RowFilter.KIND_NOT_EQUAL,
    "<": RowFilter.KIND_LESS,
    "<=": RowFilter.KIND_AT_MOST,
    ">": RowFilter.KIND_GREATER,
    ">=": RowFilter.KIND_AT_LEAST,
}
_COMPARISON = re.compile(r"([^=!<>]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
Comparison = tuple[str, RowFilter.Kind, str]
"""A column, how it is compared, and with which value."""


def _comparison(text: str) -> Comparison:
    found = _COMPARISON.fullmatch(text)
    if found is None:
        reason = f"expected COLUMN=VALUE, or with !=, <, <=, > or >=, found {text[:80]!r}"
        fail(InvalidArgument("--where", reason))
    column, operator, value = found.groups()
    _columns("--where", [column])
    return column, _OPERATORS[operator], value


def _condition(
    table: Table[bytes], forms: Forms, comparisons: list[Comparison]
) -> Condition | None:
    """That all of these hold; None if there are none."""
    conditions = []
    for column, kind, text in comparisons:
        try:
            compare_with = forms.value(column, text)
            one = forms.to_compare(table, bytes_of("--where", column))
            conditions.append(compared(one, kind, [compare_with]))
        except InvalidArgument as error:
            reason = f"column {quoted(column.encode())}: {error.reason}"
            raise InvalidArgument("--where", reason) from error
        except SchemaError as error:
            raise InvalidArgument("--where", error.message) from error
    return reduce(and_, conditions) if conditions else None


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
    """The columns and families that were asked for; None for all columns."""
    chosen: list[Column[Any] | Family[Any]] = [_column(table, one) for one in columns]
    return [*chosen, *(table.family(one, codecs.stored) for one in families)] or None


def _families(given: list[str] | None) -> list[bytes]:
    families = [bytes_of("--family", one) for one in given or ()]
    if b"" in families:
        fail(InvalidArgument("--family", "is empty: leave it out to see all columns"))
    return families


def _refuse_families(families: list[bytes]) -> None:
    if families:
        fail(InvalidArgument("--raw", "cannot be combined with --family"))


def _columns(field: str, given: list[str] | None, *, hidden_too: bool = False) -> list[bytes]:
    """The names of columns. `hidden_too`: raw cells are also those that transactions hide."""
    names = [bytes_of(field, one) for one in given or ()]
    try:
        for name in names:
            if not (hidden_too and name.startswith(b"\0")):
                _column(_ANY, name)
    except SchemaError as error:
        fail(InvalidArgument(field, error.message))
    return names


def _column(table: Table[bytes], name: bytes) -> Column[bytes]:
    return table.column(name, codecs.stored)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` in the event loop on the first SIGINT or SIGTERM. The next has its usual effect,
    even if the loop waits for the reader of the output."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        restore()
        loop.call_soon_threadsafe(stop)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()


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
    later, use --after with the timestamp of the last commit that was shown completely: its last
    line says so.
    """
    here = connection(context)
    if follow and until:
        fail(InvalidArgument("--until", "cannot be combined with --follow"))
    if not follow and not after:
        fail(InvalidArgument("--after", "is required without --follow; give a timestamp"))
    begin, end = timestamp_of(after, "--after"), timestamp_of(until, "--until")

    async def run(database: aio.Database) -> None:
        last = None if follow else end or await database.timestamp()
        forms = await forms_of(database, table, kind, here.timeout_seconds)
        rows = Table(table, key=codecs.stored)
        closing = Tasks()
        found = database.changes(rows, after=begin, until=last, before=before)

        def stop() -> None:
            closing.start(found.close())

        async with aclosing(found):
            # A list that has an end is not complete if it is interrupted.
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


Version = tuple[bytes, int, WriteRecord, bytes | None]
"""Column, commit timestamp, record, value."""


def history(
    context: typer.Context,
    table: TableName,
    row: RowName,
    column: Annotated[
        str, typer.Argument(help="Only this column.", show_default=False, callback=not_empty)
    ] = "",
    limit: Annotated[int, typer.Option(help="At most this many versions.", min=1)] = 1_000,
    kind: As = None,
) -> None:
    """Show the committed versions of a row, newest first. The exit code is 1 if there are none.

    Some or all versions older than the table's history may be gone; `gc status` shows since when
    it is complete.
    """
    here = connection(context)
    bytes_of("row", row)
    wanted = bytes_of("column", column)

    async def read(database: aio.Database) -> tuple[Forms, list[Version]]:
        info = await table_info(database, table, here.timeout_seconds)
        forms = Forms(info.codecs.names, kind)
        key = forms.row("row", row)
        # Records first: a value is stored before its record, and is kept as long. In the other
        # order, a record could be found whose value was written after the values were read.
        spaces = [Space.SPACE_WRITE, Space.SPACE_DATA]
        cells = stored_cells(database, info, spaces, key, key + b"\0", here.timeout_seconds)
        return forms, _versions([cell async for cell in cells if _is_shown(cell.column, wanted)])

    forms, found = here.run_with_database(read)
    if len(found) > limit:
        tell_of_limit(limit, "versions")
        del found[limit:]
    screen = Screen("column", "committed", "kind", "value", box=None)
    data = []
    for name, committed, record, value in found:
        timestamp = Timestamp(committed)
        screen.add_row(
            plain(row_text(shown_column(name))),
            timestamp.describe(),
            _kind(name, record),
            plain("" if value is None else forms.value_text(name, value)),
        )
        data.append(
            {
                "column": row_text(shown_column(name)),
                "commit_timestamp": in_json(committed),
                "committed": timestamp.time_text(),
                "start_timestamp": in_json(record.start_timestamp),
                "kind": _kind(name, record),
                "value": None if value is None else forms.value_data(name, value),
            }
        )
    here.show(data, screen if found else "no versions")
    if not found:
        raise typer.Exit(1)


_KINDS = {
    RecordKind.PUT: "put",
    RecordKind.PUT_IN_DATA: "put",
    RecordKind.DELETE: "delete",
    RecordKind.LOCK_ONLY: "lock",
}


def _kind(column: bytes, record: WriteRecord) -> str:
    return _KINDS[record.kind] if locked_column(column) is None else "read lock"


def _is_shown(column: bytes, wanted: bytes) -> bool:
    """Reserved columns are shown only if named, as in all other reads; but read locks are shown
    with the columns that they lock."""
    shown = shown_column(column)
    return wanted in (column, shown) if wanted else not shown.startswith(b"\0")


def _versions(cells: list[Cell]) -> list[Version]:
    data = {
        (cell.column, cell.timestamp): cell.value
        for cell in cells
        if cell.space == Space.SPACE_DATA
    }
    found: list[Version] = []
    for cell in cells:
        if cell.space != Space.SPACE_WRITE:
            continue
        record = WriteRecord.decode(cell.value)
        value: bytes | None = None
        if record.kind == RecordKind.PUT:
            value = record.value
        elif record.kind == RecordKind.PUT_IN_DATA:
            value = data.get((cell.column, record.start_timestamp))
            if value is None:
                continue  # collected between the two scans
        found.append((cell.column, cell.timestamp, record, value))
    found.sort(key=lambda version: (shown_column(version[0]), -version[1]))
    return found
