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
    __version__: str
    """The version of the installed distribution."""
    from percolator import aio, codecs, errors, recipes
    from percolator.aio.shared import Receipt, Ticket
    from percolator.aio.transaction import Outcome
    from percolator.blocking.api import (
        Changes,
        Database,
        Pin,
        Share,
        SharedTransaction,
        Snapshot,
        Transaction,
        connect,
    )
    from percolator.changes import Change, ChangeKind, ChangePage
    from percolator.decorators import both_kinds, observes, transactional
    from percolator.errors import (
        ConflictError,
        DeadlineExceeded,
        InvalidArgument,
        OtherDriverCommitted,
        OutcomeLost,
        OutcomeUnknown,
        PercolatorError,
        Retry,
        RowChanged,
        SchemaError,
        SnapshotTooOld,
        TransactionTooLarge,
        Unavailable,
        UniqueViolation,
        UsageError,
        WrittenTwice,
    )
    from percolator.limits import Limits
    from percolator.observers.definition import Observer
    from percolator.observers.worker import WorkerLimits
    from percolator.process import tune_garbage_collector
    from percolator.retries import RetryPolicy
    from percolator.schema import Column, Family, Index, Row, Table
    from percolator.timestamps import Timestamp
    from percolator.wire.tls import Tls

_HOMES = {
    "Change": "changes",
    "ChangeKind": "changes",
    "ChangePage": "changes",
    "Changes": "blocking.api",
    "Column": "schema",
    "ConflictError": "errors",
    "Database": "blocking.api",
    "DeadlineExceeded": "errors",
    "Family": "schema",
    "Index": "schema",
    "InvalidArgument": "errors",
    "Limits": "limits",
    "Observer": "observers.definition",
    "OtherDriverCommitted": "errors",
    "Outcome": "aio.transaction",
    "OutcomeLost": "errors",
    "OutcomeUnknown": "errors",
    "PercolatorError": "errors",
    "Pin": "blocking.api",
    "Receipt": "aio.shared",
    "Retry": "errors",
    "RetryPolicy": "retries",
    "Row": "schema",
    "SchemaError": "errors",
    "Share": "blocking.api",
    "SharedTransaction": "blocking.api",
    "Snapshot": "blocking.api",
    "RowChanged": "errors",
    "SnapshotTooOld": "errors",
    "Table": "schema",
    "Ticket": "aio.shared",
    "Timestamp": "timestamps",
    "Tls": "wire.tls",
    "Transaction": "blocking.api",
    "TransactionTooLarge": "errors",
    "Unavailable": "errors",
    "UniqueViolation": "errors",
    "UsageError": "errors",
    "WorkerLimits": "observers.worker",
    "WrittenTwice": "errors",
    "both_kinds": "decorators",
    "connect": "blocking.api",
    "observes": "decorators",
    "transactional": "decorators",
    "tune_garbage_collector": "process",
}
_MODULES = ("aio", "codecs", "errors", "recipes")

__all__ = [
    "Change",
    "ChangeKind",
    "ChangePage",
    "Changes",
    "Column",
    "ConflictError",
    "Database",
    "DeadlineExceeded",
    "Family",
    "Index",
    "InvalidArgument",
    "Limits",
    "Observer",
    "OtherDriverCommitted",
    "Outcome",
    "OutcomeLost",
    "OutcomeUnknown",
    "PercolatorError",
    "Pin",
    "Receipt",
    "Retry",
    "RetryPolicy",
    "Row",
    "RowChanged",
    "SchemaError",
    "Share",
    "SharedTransaction",
    "Snapshot",
    "SnapshotTooOld",
    "Table",
    "Ticket",
    "Timestamp",
    "Tls",
    "Transaction",
    "TransactionTooLarge",
    "Unavailable",
    "UniqueViolation",
    "UsageError",
    "WorkerLimits",
    "WrittenTwice",
    "aio",
    "both_kinds",
    "codecs",
    "connect",
    "errors",
    "observes",
    "recipes",
    "transactional",
    "tune_garbage_collector",
]


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Loads a name when it is first used: servers import this package but need no client."""
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"percolator.{name}")
        if name == "__version__":
            from importlib.metadata import PackageNotFoundError, version

            try:
                return version("percolator-store")
            except PackageNotFoundError:
                raise AttributeError("percolator is not installed here, only copied") from None
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'percolator' has no attribute {name!r}")
        value: object = getattr(import_module(f"percolator.{home}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, "__version__"})
