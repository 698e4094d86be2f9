"""Looking through the dead letters of a cluster, trying them again, and throwing them away."""

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
from percolator.observers.client import Client
from percolator.observers.dead_letter import DEAD_LETTERS, LETTER, DeadLetter
from percolator.protocol import steps
from percolator.protocol.read import read_rows
from percolator.protocol.scan import scan_pages
from percolator.protocol.surroundings import Statistics
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.wire.questions import RangeQuestion, RowQuestion, Step

_AT_ONCE = 256


class DeadLetterBox:
    """All dead letters."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def look_through(
        self, table: str = "", observer: str = ""
    ) -> AsyncGenerator[DeadLetter, None]:
        """In the order of tables, observers and columns; of one table or observer, if given."""
        client = self._client
        table_id = await self._table_id()
        if table_id is None:
            return
        seconds = client.around.limits.call_seconds
        now = await client.around.timestamps.get(timeout_seconds=seconds)
        question = RangeQuestion(table_id, b"", b"", (LETTER.name,), now)
        pages = scan_pages(client.around, client.cleanup, question, None, seconds, Statistics())
        async with aclosing(pages):
            async for page in pages:
                for row, cells in page:
                    letter = _opened(row, cells[LETTER.name].value)
                    if table in ("", letter.table) and observer in ("", letter.observer):
                        yield letter

    async def retry(self, letters: Sequence[DeadLetter]) -> None:
        """Notifies their observers once more. A letter goes when a run has committed.

        Raises `SchemaError` for one whose table or observer does not exist any more.
        """
        client = self._client
        ids: dict[str, int] = {}
        for table in sorted({letter.table for letter in letters}):
            described = await client.describe(table)
            ids[table] = described.table_id
            known = {one.name for one in described.observers}
            for letter in letters:
                if letter.table == table and letter.observer not in known:
                    raise SchemaError(
                        f"table {table!r} has no observer {letter.observer!r} any more", table=table
                    )
        for at in range(0, len(letters), _AT_ONCE):
            deadline = client.deadline()
            # Above every snapshot that has settled notifications before.
            now = await client.around.timestamps.get(timeout_seconds=deadline - client.now())
            questions = []
            for one in letters[at : at + _AT_ONCE]:
                step = steps.notify(one.row, one.column, now, (one.observer.encode(),))
                questions.append(Step(ids[one.table], step))
            for answer in await client.around.cells.mutate(questions, deadline):
                if isinstance(answer, PercolatorError):
                    raise answer

    async def clear(self, letters: Sequence[DeadLetter]) -> int:
        """Throws them away, unless they have changed meanwhile. Returns how many."""
        cleared = 0
        table_id = await self._table_id()
        if table_id is not None:
            for at in range(0, len(letters), _AT_ONCE):
                cleared += await self._clear(table_id, letters[at : at + _AT_ONCE])
        return cleared

    async def _clear(self, table_id: int, letters: Sequence[DeadLetter]) -> int:
        client = self._client
        while True:
            transaction = client.begin(None)
            start = await transaction.timestamp()
            rows = [DEAD_LETTERS.key.encode(letter.key) for letter in letters]
            questions = [
                RowQuestion(table_id, RowRead(row=row, columns=(LETTER.name,), timestamp=start))
                for row in rows
            ]
            answers = await read_rows(
                client.around,
                client.cleanup,
                questions,
                start,
                client.deadline(),
                transaction.statistics,
            )
            cleared = 0
            for letter, row, answer in zip(letters, rows, answers, strict=True):
                found = answer.found.get(LETTER.name)
                if found is not None and _opened(row, found.value) == letter:
                    transaction.writes.delete(CellAddress(table_id, row, LETTER.name))
                    cleared += 1
            try:
                await transaction.commit()
            except ConflictError:
                continue  # one of them has just been answered, or put aside again
            return cleared

    async def _table_id(self) -> int | None:
        """None when no worker ever ran in this cluster."""
        try:
            info = await self._client.catalog.table(DEAD_LETTERS.name, self._client.deadline())
        except SchemaError:
            return None
        return info.table_id


def _opened(row: bytes, stored: bytes | None) -> DeadLetter:
    try:
        return DeadLetter.of(DEAD_LETTERS.key.decode(row), LETTER.codec.decode(stored or b""))
    except (SchemaError, KeyError, TypeError, binascii.Error) as error:
        raise InvariantViolation(f"row {row!r} of {DEAD_LETTERS.name} is none: {error}") from error


def as_data(letter: DeadLetter) -> dict[str, object]:
    """For programs: everything, rows and columns in base64."""
    return {
        "table": letter.table,
        "observer": letter.observer,
        "column": base64.b64encode(letter.column).decode(),
        **letter.as_json(),
    }
