"""Changes that an observer could not handle, put aside so that they hold up nothing else.

    table   percolator.dead-letters
    row     table, observer, column, and a hash of the row, which may be as long as a key can be
    letter  JSON: the row, the newest change that was tried, the error and its traceback, the
            attempts, since when

A dead letter is written in a transaction, together with a note in the acknowledgement of its cell,
so that the run that handles a later change deletes it in its own transaction. The notifications are
deleted only after that, as after a run: after a crash in between, the change is tried again.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from percolator import codecs
from percolator.codecs.readable import quoted
from percolator.errors import (
    CellAddress,
    ConflictError,
    InvariantViolation,
    PercolatorError,
    SchemaError,
)
from percolator.observers.context import RunTransaction, WorkerContext
from percolator.observers.watched_cell import Acknowledgement, look
from percolator.observers.work_queue import Work
from percolator.protocol import steps
from percolator.protocol.environment import Statistics
from percolator.protocol.read import read_rows, scan_pages
from percolator.routing.cells import CellMutation, RangeRequest, RowRequest
from percolator.schema import DEAD_LETTERS_NAME, Table
from percolator.timestamps import in_json
from percolator.v1 import master_pb2
from percolator.v1.master_pb2 import TableOptions
from percolator.v1.tabletserver_pb2 import RowRead

DEAD_LETTERS = Table(
    DEAD_LETTERS_NAME,
    key=codecs.tuple_of(codecs.text, codecs.text, codecs.raw, codecs.raw),
)
LETTER = DEAD_LETTERS.column("letter", codecs.json)

_HASH_BYTES = 16
_ERROR_CHARACTERS_MAX = 2_000
_TRACEBACK_CHARACTERS_MAX = 8_000
"""The end of a longer one is kept: it shows where the error was raised."""


@dataclass(frozen=True)
class DeadLetter:
    """A change that was put aside."""

    table: str
    observer: str
    column: bytes
    row: bytes
    commit_timestamp: int
    """The commit timestamp of the newest change that was tried."""
    error: str
    attempts: int
    parked_at: int
    """The timestamp at which it was put aside. The name is stored, and the CLI prints it."""
    traceback: str = ""
    """The traceback of the last attempt; empty if a development version wrote the letter."""

    @property
    def key(self) -> tuple[str, str, bytes, bytes]:
        """Its row in the table of dead letters."""
        return self.table, self.observer, self.column, _hash(self.row)

    def as_json(self) -> dict[str, Any]:
        return {
            "row": base64.b64encode(self.row).decode(),
            "commit_timestamp": self.commit_timestamp,
            "error": self.error,
            "attempts": self.attempts,
            "parked_at": self.parked_at,
            "traceback": self.traceback,
        }

    @classmethod
    def of(cls, key: tuple[str, str, bytes, bytes], stored: dict[str, Any]) -> DeadLetter:
        table, observer, column, _ = key
        return cls(
            table,
            observer,
            column,
            base64.b64decode(stored["row"]),
            stored["commit_timestamp"],
            stored["error"],
            stored["attempts"],
            stored["parked_at"],
            stored.get("traceback", ""),
        )


def _hash(row: bytes) -> bytes:
    return blake2b(row, digest_size=_HASH_BYTES).digest()


async def dead_letters_table(context: WorkerContext) -> int:
    """The id of the table of dead letters, created when the first observers are registered."""
    try:
        info = await context.catalog.table(DEAD_LETTERS.name, context.env.deadline())
    except SchemaError:
        info = await context.catalog.create(
            DEAD_LETTERS.name, (), TableOptions(), exist_ok=True, deadline=context.env.deadline()
        )
    return info.table_id


class PutAside(NamedTuple):
    """The result of trying to put a change aside."""

    seen: int
    """Notifications up to here are done; 0 if there is a newer change that was never tried."""
    is_put_aside: bool


class DeadLetters:
    """Writes and deletes the dead letters of one worker."""

    def __init__(self, context: WorkerContext, table_id: int) -> None:
        """`table_id` is that of the table of dead letters."""
        self._context = context
        self._table_id = table_id

    def clear(self, transaction: RunTransaction, work: Work) -> None:
        """Deletes the dead letter in the transaction of a run that handles a later change."""
        transaction.internal.writes.delete(self._address(work))

    async def put_aside(self, work: Work, error: str, traceback: str) -> PutAside:
        """Puts the work aside, unless it has been handled by now, or changed since it was tried."""
        transaction = self._context.begin(None)
        try:
            start = await transaction.timestamp()
            (cell,) = await look(self._context, [work], transaction, start)
            is_weak = work.watched.observer.weak
            if not is_weak and cell.is_handled:
                return PutAside(start, is_put_aside=False)
            if not is_weak and cell.commit > work.tried_commit:
                return PutAside(0, is_put_aside=False)
            observer = work.watched.observer
            letter = DeadLetter(
                observer.table.name,
                observer.name,
                work.column,
                work.row,
                cell.commit,
                error[:_ERROR_CHARACTERS_MAX],
                work.attempts,
                start,
                traceback[-_TRACEBACK_CHARACTERS_MAX:],
            )
            transaction.internal.writes.put(
                self._address(work), LETTER.codec.encode(letter.as_json())
            )
            noted = Acknowledgement(cell.acknowledged.start, has_dead_letter=True)
            transaction.internal.writes.put(
                work.watched.acknowledgement(work.row, work.column), noted.encode()
            )
            await transaction.commit()
            return PutAside(start, is_put_aside=True)
        finally:
            if not transaction.ended:
                transaction.rollback()

    def _address(self, work: Work) -> CellAddress:
        observer = work.watched.observer
        key = (observer.table.name, observer.name, work.column, _hash(work.row))
        return CellAddress(self._table_id, DEAD_LETTERS.key.encode(key), LETTER.name)


_AT_ONCE = 256


class DeadLetterBox:
    """All dead letters of a cluster: lists them, retries them, and throws them away."""

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
            deadline = context.env.deadline()
            # Above the snapshot of every run that has deleted notifications before.
            now = await context.env.timestamps.get(timeout_seconds=deadline - context.env.now())
            requests = []
            for table_id, one in letters[at : at + _AT_ONCE]:
                step = steps.notify(one.row, one.column, now, (one.observer.encode(),))
                requests.append(CellMutation(table_id, step))
            for answer in await context.env.cells.mutate(requests, deadline):
                if isinstance(answer, PercolatorError):
                    raise answer

    def _problem(self, table: master_pb2.Table, letter: DeadLetter) -> str:
        """The reason why no observer would run for the letter in this table; empty if one would."""
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
                context.env.deadline(),
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
            info = await self._context.catalog.table(
                DEAD_LETTERS.name, self._context.env.deadline()
            )
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
