"""Changes that an observer could not answer, put aside so that they hold up nobody.

    table   percolator.dead-letters
    row     table, observer, column, and a hash of the row, which may be as long as a key may be
    letter  JSON: the row, the newest change that was tried, the error, how often, since when

A dead letter is written in a transaction, and noted in the acknowledgement of its cell, so that the
run that answers a later change clears it away in its own transaction. Only then are the
notifications deleted, as after a run: after a crash in between, the change is tried again.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from percolator import codecs
from percolator.errors import CellAddress, SchemaError
from percolator.observers.acknowledgement import Acknowledgement
from percolator.observers.change import look
from percolator.observers.client import Client, RunTransaction
from percolator.observers.work import Work
from percolator.schema import Table
from percolator.v1.master_pb2 import TableOptions

DEAD_LETTERS = Table(
    "percolator.dead-letters",
    key=codecs.tuple_of(codecs.text, codecs.text, codecs.raw, codecs.raw),
)
LETTER = DEAD_LETTERS.column("letter", codecs.json)

_HASH_BYTES = 16
_ERROR_CHARACTERS_MAX = 2_000


@dataclass(frozen=True)
class DeadLetter:
    """A change that was put aside."""

    table: str
    observer: str
    column: bytes
    row: bytes
    commit_timestamp: int
    """Of the newest change that was tried."""
    error: str
    attempts: int
    parked_at: int
    """The timestamp at which it was put aside."""

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
        )


def _hash(row: bytes) -> bytes:
    return blake2b(row, digest_size=_HASH_BYTES).digest()


async def dead_letters_table(client: Client) -> int:
    """Its id. The first worker of a cluster creates it."""
    try:
        info = await client.catalog.table(DEAD_LETTERS.name, client.deadline())
    except SchemaError:
        info = await client.catalog.create(
            DEAD_LETTERS.name, (), TableOptions(), exist_ok=True, deadline=client.deadline()
        )
    return info.table_id


class Parked(NamedTuple):
    """What came of putting something aside."""

    seen: int
    """Notifications up to here are settled; 0 when there is a newer change, never tried."""
    is_put_aside: bool


class DeadLetters:
    """What one worker writes and clears away."""

    def __init__(self, client: Client, table_id: int) -> None:
        """`table_id` is that of the table of dead letters."""
        self._client = client
        self._table_id = table_id

    def clear_away(self, transaction: RunTransaction, work: Work) -> None:
        """A later change is being answered."""
        transaction.writes.delete(self._address(work))

    async def park(self, work: Work, error: str) -> Parked:
        """Puts the work aside, unless it is answered by now, or has changed since it was tried."""
        transaction = self._client.begin(None)
        try:
            start = await transaction.timestamp()
            change = await look(self._client, work, transaction, start)
            is_weak = work.watched.observer.weak
            if not is_weak and change.is_answered:
                return Parked(start, is_put_aside=False)
            if not is_weak and change.commit > work.tried_commit:
                return Parked(0, is_put_aside=False)
            observer = work.watched.observer
            letter = DeadLetter(
                observer.table.name,
                observer.name,
                work.column,
                work.row,
                change.commit,
                error[:_ERROR_CHARACTERS_MAX],
                work.attempts,
                start,
            )
            transaction.writes.put(self._address(work), LETTER.codec.encode(letter.as_json()))
            noted = Acknowledgement(change.acknowledged.start, has_dead_letter=True)
            transaction.writes.put(
                work.watched.acknowledgement(work.row, work.column), noted.encode()
            )
            await transaction.commit()
            return Parked(start, is_put_aside=True)
        finally:
            if not transaction.ended:
                transaction.rollback()

    def _address(self, work: Work) -> CellAddress:
        observer = work.watched.observer
        key = (observer.table.name, observer.name, work.column, _hash(work.row))
        return CellAddress(self._table_id, DEAD_LETTERS.key.encode(key), LETTER.name)
