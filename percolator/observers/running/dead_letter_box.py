"""Lists the dead letters of a cluster, retries them, and throws them away."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from percolator.errors import (
    CellAddress,
    ConflictError,
    InvariantViolation,
    PercolatorError,
    SchemaError,
)
from percolator.observers.context import WorkerContext
from percolator.observers.running.dead_letter import DEAD_LETTERS, LETTER, DeadLetter
from percolator.protocol import steps
from percolator.protocol.read import read_rows
from percolator.protocol.scan import scan_pages
from percolator.protocol.statistics import Statistics
from percolator.routing.cells import CellMutation, RangeRequest, RowRequest
from percolator.row_text import quoted
from percolator.timestamps import in_json
from percolator.v1.master_pb2 import Table
from percolator.v1.tabletserver_pb2 import RowRead

_AT_ONCE = 256


class DeadLetterBox:
    """All dead letters of a cluster."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    async def look_through(
        self, table: str = "", observer: str = ""
    ) -> AsyncGenerator[DeadLetter, None]:
        """Yields dead letters ordered by table, observer and column.

        `table` and `observer` limit them to one table or observer.
        """
        context = self._context
        table_id = await self._table_id()
        if table_id is None:
            return
        seconds = context.env.limits.call_seconds
        now = await context.env.timestamps.get(timeout_seconds=seconds)
        request = RangeRequest(table_id, b"", b"", (LETTER.name,), now)
        pages = scan_pages(context.env, context.cleanup, request, None, seconds, Statistics())
        async with aclosing(pages):
            async for page in pages:
                for row, cells in page:
                    letter = _opened(row, cells[LETTER.name].value)
                    if table in ("", letter.table) and observer in ("", letter.observer):
                        yield letter

    async def retry(self, letters: Sequence[DeadLetter]) -> None:
        """Notifies their observers again. A letter is deleted once a run has committed.

        Raises `SchemaError` at the end if there are letters for whose notification no worker would
        run: the table or the observer no longer exists, there is another table of that name, or the
        observer no longer watches the column. All others are retried: who chooses letters by table
        or row cannot leave single ones out.
        """
        problems: list[SchemaError] = []
        found: list[tuple[int, DeadLetter]] = []
        for name in sorted({letter.table for letter in letters}):
            of_table = [letter for letter in letters if letter.table == name]
            try:
                table = await self._context.describe(name)
            except SchemaError as error:
                problems += [error] * len(of_table)
                continue
            for letter in of_table:
                problem = self._problem(table, letter)
                if problem:
                    problems.append(SchemaError(problem, table=name))
                else:
                    found.append((table.table_id, letter))
        await self._notify(found)
        if problems:
            raise _not_all(problems, len(found))

    async def _notify(self, letters: Sequence[tuple[int, DeadLetter]]) -> None:
        context = self._context
        for at in range(0, len(letters), _AT_ONCE):
            deadline = context.deadline()
            # Above the snapshot of every run that has deleted notifications before.
            now = await context.env.timestamps.get(timeout_seconds=deadline - context.now())
            requests = []
            for table_id, one in letters[at : at + _AT_ONCE]:
                step = steps.notify(one.row, one.column, now, (one.observer.encode(),))
                requests.append(CellMutation(table_id, step))
            for answer in await context.env.cells.mutate(requests, deadline):
                if isinstance(answer, PercolatorError):
                    raise answer

    def _problem(self, table: Table, letter: DeadLetter) -> str:
        """Why no observer would run for the letter in this table; empty if one would."""
        columns = {one.name: one.columns for one in table.observers}.get(letter.observer)
        cell = CellAddress(table.table_id, letter.row, letter.column)
        described = self._context.env.described(cell)
        if letter.parked_at < table.created_at:
            return (
                f"the dead letter of {described} was put aside in a table {table.name!r} that was "
                "dropped; clear it (percolator dead-letters clear)"
            )
        if columns is None:
            return f"table {table.name!r} no longer has an observer {letter.observer!r}"
        if letter.column not in columns:
            return (
                f"observer {letter.observer!r} no longer watches {described}; clear the row's dead "
                "letters"
            )
        return ""

    async def clear(self, letters: Sequence[DeadLetter]) -> int:
        """Deletes the letters that have not changed meanwhile. Returns how many."""
        cleared = 0
        table_id = await self._table_id()
        if table_id is not None:
            for at in range(0, len(letters), _AT_ONCE):
                cleared += await self._clear(table_id, letters[at : at + _AT_ONCE])
        return cleared

    async def _clear(self, table_id: int, letters: Sequence[DeadLetter]) -> int:
        context = self._context
        while True:
            transaction = context.begin(None)
            start = await transaction.timestamp()
            rows = [DEAD_LETTERS.key.encode(letter.key) for letter in letters]
            requests = [
                RowRequest(table_id, RowRead(row=row, columns=(LETTER.name,), timestamp=start))
                for row in rows
            ]
            answers = await read_rows(
                context.env,
                context.cleanup,
                requests,
                context.deadline(),
                transaction.statistics,
            )
            cleared = 0
            for letter, row, answer in zip(letters, rows, answers, strict=True):
                found = answer.found.get(LETTER.name)
                if found is not None and _opened(row, found.value) == letter:
                    transaction.internal.writes.delete(CellAddress(table_id, row, LETTER.name))
                    cleared += 1
            try:
                await transaction.commit()
            except ConflictError:
                continue  # one of them has just been handled, or put aside again
            return cleared

    async def _table_id(self) -> int | None:
        """The id of the table of dead letters; None if no worker ever ran in this cluster."""
        try:
            info = await self._context.catalog.table(DEAD_LETTERS.name, self._context.deadline())
        except SchemaError:
            return None
        return info.table_id


def _not_all(problems: Sequence[SchemaError], retried: int) -> SchemaError:
    first = problems[0]
    if not retried and len(problems) == 1:
        return first
    return SchemaError(
        f"{len(problems)} of {len(problems) + retried} dead letters are not retried, the first of "
        f"them because: {first.message}",
        table=first.table,
    )


def _opened(row: bytes, stored: bytes | None) -> DeadLetter:
    try:
        return DeadLetter.of(DEAD_LETTERS.key.decode(row), LETTER.codec.decode(stored or b""))
    except (SchemaError, KeyError, TypeError, binascii.Error) as error:
        raise InvariantViolation(
            f"row {quoted(row)} of {DEAD_LETTERS.name} is not a dead letter: {error}"
        ) from error


def as_data(letter: DeadLetter) -> dict[str, object]:
    """All fields as JSON, for programs, with rows and columns in base64."""
    return {
        "table": letter.table,
        "observer": letter.observer,
        "column": base64.b64encode(letter.column).decode(),
        **letter.as_json(),
        "commit_timestamp": in_json(letter.commit_timestamp),
        "parked_at": in_json(letter.parked_at),
    }
