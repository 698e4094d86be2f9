"""Percolator: ACID snapshot-isolation transactions and observers over a cluster of tablet servers.

    import percolator
    from percolator import Table, Transaction, codecs, transactional

    accounts = Table("accounts")
    balance = accounts.column("balance", codecs.integer)

    @transactional
    def transfer(tx: Transaction, source: str, target: str, amount: int) -> None:
        tx.set(source, balance, tx.get(source, balance, default=0) - amount)
        tx.set(target, balance, tx.get(target, balance, default=0) + amount)

    with percolator.connect("localhost:7100") as db:
        db.create_table(accounts, exist_ok=True)
        transfer(db, "bob", "joe", 7)

`percolator.aio` has the same names for asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from percolator import aio, codecs, errors
    from percolator.aio.transaction import Outcome
    from percolator.database import Database, connect
    from percolator.decorators import transactional
    from percolator.errors import (
        ConflictError,
        DeadlineExceeded,
        InvalidArgument,
        OutcomeUnknown,
        PercolatorError,
        Retry,
        SchemaError,
        SnapshotTooOld,
        TransactionTooLarge,
        Unavailable,
        UsageError,
    )
    from percolator.limits import Limits
    from percolator.observers.definition import Observer, observes
    from percolator.observers.worker import WorkerLimits
    from percolator.pin import Pin
    from percolator.retries import RetryPolicy
    from percolator.schema import Column, Row, Table
    from percolator.snapshot import Snapshot
    from percolator.timestamps import Timestamp
    from percolator.transaction import Transaction
    from percolator.wire.tls import Tls

_HOMES = {
    "Column": "schema",
    "ConflictError": "errors",
    "Database": "database",
    "DeadlineExceeded": "errors",
    "InvalidArgument": "errors",
    "Limits": "limits",
    "Observer": "observers.definition",
    "Outcome": "aio.transaction",
    "OutcomeUnknown": "errors",
    "PercolatorError": "errors",
    "Pin": "pin",
    "Retry": "errors",
    "RetryPolicy": "retries",
    "Row": "schema",
    "SchemaError": "errors",
    "Snapshot": "snapshot",
    "SnapshotTooOld": "errors",
    "Table": "schema",
    "Timestamp": "timestamps",
    "Tls": "wire.tls",
    "Transaction": "transaction",
    "TransactionTooLarge": "errors",
    "Unavailable": "errors",
    "UsageError": "errors",
    "WorkerLimits": "observers.worker",
    "connect": "database",
    "observes": "observers.definition",
    "transactional": "decorators",
}
_MODULES = ("aio", "codecs", "errors")

__all__ = [
    "Column",
    "ConflictError",
    "Database",
    "DeadlineExceeded",
    "InvalidArgument",
    "Limits",
    "Observer",
    "Outcome",
    "OutcomeUnknown",
    "PercolatorError",
    "Pin",
    "Retry",
    "RetryPolicy",
    "Row",
    "SchemaError",
    "Snapshot",
    "SnapshotTooOld",
    "Table",
    "Timestamp",
    "Tls",
    "Transaction",
    "TransactionTooLarge",
    "Unavailable",
    "UsageError",
    "WorkerLimits",
    "aio",
    "codecs",
    "connect",
    "errors",
    "observes",
    "transactional",
]


if not TYPE_CHECKING:  # or a type checker would believe in any name

    def __getattr__(name: str) -> object:
        """Loads a name when it is first used: servers import this package, and need no client."""
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"percolator.{name}")
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'percolator' has no attribute {name!r}")
        value: object = getattr(import_module(f"percolator.{home}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
