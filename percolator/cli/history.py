"""`percolator history`: the versions of a row that are still stored, newest first."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table as Screen

from percolator import aio
from percolator.cli.cells import As, RowName, TableName
from percolator.cli.connection import connection, fail, plain, tell_of_limit
from percolator.cli.given import not_empty, require_row
from percolator.cli.stored import shown_column, stored_cells
from percolator.cli.values import Forms, table_info
from percolator.errors import InvalidArgument
from percolator.formats.hidden_cells import locked_column
from percolator.formats.records import RecordKind, WriteRecord
from percolator.row_text import row_bytes, row_text
from percolator.timestamps import Timestamp, in_json
from percolator.v1.cells_pb2 import Cell, Space

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
    require_row("row", row)
    try:
        wanted = row_bytes("column", column)
    except InvalidArgument as error:
        fail(error)

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
        moment = Timestamp(committed)
        screen.add_row(
            plain(row_text(shown_column(name))),
            moment.describe(),
            _kind(name, record),
            plain("" if value is None else forms.value_text(name, value)),
        )
        data.append(
            {
                "column": row_text(shown_column(name)),
                "commit_timestamp": in_json(committed),
                "committed": moment.time_text(),
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
