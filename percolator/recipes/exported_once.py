"""Exports in PostgreSQL, each exactly once: the last number of each key is in a table there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from percolator.errors import UsageError
from percolator.recipes.export_queue import Export, ExportQueue

K = TypeVar("K")
V = TypeVar("V")

_CREATE = """\
CREATE TABLE IF NOT EXISTS percolator_exported (
    queue text, key bytea, sequence numeric NOT NULL, PRIMARY KEY (queue, key))"""
_BEGIN_KEY = """\
INSERT INTO percolator_exported (queue, key, sequence) VALUES (%s, %s, -1) ON CONFLICT DO NOTHING"""
_LOCK_KEYS = """\
SELECT key, sequence FROM percolator_exported
WHERE queue = %s AND key = ANY(%s) ORDER BY key FOR UPDATE"""
_END_KEY = "UPDATE percolator_exported SET sequence = %s WHERE queue = %s AND key = %s"


class Connection(Protocol):
    """A connection of psycopg 3."""

    autocommit: Any

    def cursor(self) -> Any:  # noqa: ANN401 - psycopg's
        """A cursor."""
        ...


class ExportedOnce(Generic[K, V]):
    """Keeps track, in PostgreSQL, of which exports of a queue are new.

        once = ExportedOnce(orders)

        @orders.exporter()
        def send(exports):
            with psycopg.connect(...) as connection:    # one transaction, committed at the end
                for export in once.new(connection, exports):
                    connection.execute("INSERT INTO orders ...")

    Guarantee: if everything that an export leads to is done in the transaction that asks for it
    here, it takes effect exactly once, and in order for each key, whatever dies, and whenever.
    Calls that have keys in common wait for each other there.
    """

    def __init__(self, queue: ExportQueue[K, V]) -> None:
        self._queue = queue

    def create(self, connection: Connection) -> None:
        """Creates the table `percolator_exported`, which all queues share, if it does not exist."""
        with connection.cursor() as cursor:
            cursor.execute(_CREATE)

    def new(self, connection: Connection, exports: Sequence[Export[K, V]]) -> list[Export[K, V]]:
        """The exports that have not taken effect, and will have when this transaction commits.

        Raises `UsageError` for a connection that commits each statement by itself. The transaction
        has to be at the level READ COMMITTED, which is PostgreSQL's default.
        """
        if connection.autocommit:
            raise UsageError(
                "the connection has autocommit: the effect would not happen exactly once"
            )
        name = self._queue.table.name
        keys = {export.key: self._queue.key_bytes(export.key) for export in exports}
        last: dict[bytes, int] = {}
        with connection.cursor() as cursor:
            # In one order everywhere, so that no two transactions wait for each other.
            ordered = sorted(set(keys.values()))
            cursor.executemany(_BEGIN_KEY, [(name, key) for key in ordered])
            cursor.execute(_LOCK_KEYS, (name, ordered))
            before = {bytes(key): int(sequence) for key, sequence in cursor.fetchall()}
            new = [one for one in exports if one.sequence > before[keys[one.key]]]
            for one in new:
                last[keys[one.key]] = one.sequence
            cursor.executemany(_END_KEY, [(last[key], name, key) for key in sorted(last)])
        return new
