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
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from percolator import codecs
from percolator.errors import CellAddress, SchemaError
from percolator.observers.context import RunTransaction, WorkerContext
from percolator.observers.running.acknowledgement import Acknowledgement
from percolator.observers.running.watched_cell import look
from percolator.observers.work import Work
from percolator.schema import DEAD_LETTERS_NAME, Table
from percolator.v1.master_pb2 import TableOptions

DEAD_LETTERS = Table(
    DEAD_LETTERS_NAME,
    key=codecs.tuple_of(codecs.text, codecs.text, codecs.raw, codecs.raw),
)
LETTER = DEAD_LETTERS.column("letter", codecs.json)

_HASH_BYTES = 16
_ERROR_CHARACTERS_MAX = 2_000
_TRACEBACK_CHARACTERS_MAX = 8_000
"""Of a longer one, the end is kept: it shows where the error was raised."""


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
    """Of the last attempt; empty if the letter was written by an earlier release."""

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
        info = await context.catalog.table(DEAD_LETTERS.name, context.deadline())
    except SchemaError:
        info = await context.catalog.create(
            DEAD_LETTERS.name, (), TableOptions(), exist_ok=True, deadline=context.deadline()
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
            cell = await look(self._context, work, transaction, start)
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
