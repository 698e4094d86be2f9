"""Everything that can go wrong, in one vocabulary.

    PercolatorError
    ├── TransactionError
    │   ├── ConflictError          another transaction wrote first; run this one again
    │   ├── OtherDriverCommitted   of one shared transaction, without some that this one named
    │   ├── OutcomeUnknown         committed or not: find out before you repeat anything
    │   │   └── OutcomeLost        ... and it can never be found out
    │   ├── RowChanged             computed from a row that was written since: read it again
    │   ├── SnapshotTooOld         older than what the store still keeps
    │   ├── TransactionTooLarge
    │   ├── UniqueViolation        two rows would have the same values in a unique index
    │   └── WrittenTwice           two tasks of a shared transaction write one cell
    ├── InvalidArgument            a field is wrong; nothing was written
    ├── UsageError                 the program uses the library in a way that cannot work
    ├── SchemaError                unknown table or column, or a type that does not fit
    ├── Unauthenticated            the cluster does not know who is calling
    ├── PermissionDenied           the caller is known, but not permitted
    ├── NotExecuted                definitely not done: sending it again is safe
    │   ├── Overloaded             too much at once; says when to try again
    │   ├── NotReady               starting, draining, or unable to answer truthfully
    │   │   └── UnknownServer      a gateway was to forward it to a server that does not exist
    │   ├── TabletMoved            another server, or another epoch, serves these rows
    │   ├── SchemaChanged          the request was made under an older schema
    │   └── StoreUnusable          disk full, failing or damaged
    ├── ExecutionUnknown           may or may not have been done
    │   ├── Unavailable            nothing answered at the address, or the connection broke
    │   └── DeadlineExceeded       no answer in time
    ├── SessionExpired             it is never revived: open a new session
    ├── WrongCluster               different clusters, or incompatible versions
    ├── TimestampRegression        the oracle went back: refuse to continue
    └── InvariantViolation         a rule that must always hold is broken: a bug, or damaged data

Every error says what happened, where, and (in `retry`) whether the same call may be sent again.
`percolator/wire/status.py` is the one place that maps them to gRPC and back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Retry(Enum):
    """Safety of sending exactly the same call again."""

    SAFE = "safe"
    USELESS = "useless"
    UNKNOWN = "unknown"


class PercolatorError(Exception):
    """The base of every error that this library raises on purpose."""

    retry: Retry = Retry.USELESS
    """Safety of a retry. It is set by the class, unless more is known about this one error."""
    retry_after_seconds: float = 0.0
    """How long the server asked us to wait before trying again; 0 if it did not say."""

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        """The service, and what it was working on; empty in the caller's own process."""

    def __str__(self) -> str:
        return f"{self.message} [{self.where}]" if self.where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles all attributes, since errors travel from Spark's executors to the driver."""
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(
    kind: type[PercolatorError], args: tuple[object, ...], state: dict[str, object]
) -> PercolatorError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


_NAME_BYTES_SHOWN = 64
_KEY_CHARACTERS_SHOWN = 100


class CellAddress(NamedTuple):
    """A cell anywhere in the cluster. Ordered by table, row, column, as primaries are chosen."""

    table_id: int
    row: bytes
    column: bytes

    def __str__(self) -> str:
        return self.described()

    def described(self, table: str = "", key: object = None) -> str:
        """The cell for people, with its table's name and the key of its row if they are known."""
        of = repr(table) if table else str(self.table_id)
        row = _shortened(self.row) if key is None else _shortened_key(key, self.row)
        return f"row {row}, column {_shortened(self.column)} of table {of}"


def _shortened(name: bytes) -> str:
    """A row or the name of a column, which may have thousands of bytes, for an error."""
    shown = repr(_text(name[:_NAME_BYTES_SHOWN]))
    return shown if len(name) <= _NAME_BYTES_SHOWN else f"{shown}... ({len(name)} bytes)"


def _text(name: bytes) -> str | bytes:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return name
    return text if text.isprintable() else name


def _shortened_key(key: object, row: bytes) -> str:
    """A key as the command line takes it: text in quotes, a tuple as a list."""
    shown = repr(key) if isinstance(key, str) else json.dumps(key, ensure_ascii=False)
    if len(shown) <= _KEY_CHARACTERS_SHOWN:
        return shown
    return f"{shown[:_KEY_CHARACTERS_SHOWN]}... ({len(row)} bytes)"


class TransactionError(PercolatorError):
    """A transaction did not commit, or it is unknown whether it did."""


class ConflictError(TransactionError):
    """Another transaction wrote, or is writing, one of the same cells.

    Nothing was committed. Run the whole transaction again, on a new snapshot.
    """

    retry = Retry.SAFE

    def __init__(
        self,
        message: str,
        *,
        cell: CellAddress | None = None,
        start_timestamp: int = 0,
        other_start_timestamp: int = 0,
        other_commit_timestamp: int = 0,
        where: str = "",
    ) -> None:
        super().__init__(message, where=where)
        self.cell = cell
        """The cell for which the two transactions conflict."""
        self.start_timestamp = start_timestamp
        """The start timestamp of the transaction that lost."""
        self.other_start_timestamp = other_start_timestamp
        """The start timestamp of the other transaction; 0 if it is not known."""
        self.other_commit_timestamp = other_commit_timestamp
        """The commit timestamp of the other transaction; 0 if it had not committed."""


_NAMED_MAX = 5


class OtherDriverCommitted(TransactionError):
    """Another driver of the same shared transaction has committed it, without participants that
    this call has named. They are rolled back, and never will be committed.

    Only one driver may decide on a ticket. Let one of them do it, with the receipts of all tasks.
    """

    def __init__(
        self, commit_timestamp: int, without: Sequence[str] = (), *, of: int = 0, where: str = ""
    ) -> None:
        """`of`: how many participants were named."""
        named = ", ".join(without[:_NAMED_MAX]) + ", ..." * (len(without) > _NAMED_MAX)
        known = f"without {len(without)} of the {of} participants named here ({named}), "
        super().__init__(
            f"another driver has committed the shared transaction at {commit_timestamp}, "
            + (known if of else "")
            + "and nothing more of it ever will be committed",
            where=where,
        )
        self.commit_timestamp = commit_timestamp
        """When the other driver has committed its participants."""
        self.without = tuple(without)
        """The participants that were named and are not committed."""


class OutcomeUnknown(TransactionError):
    """The commit was sent, and its outcome could not be determined in time.

    Never run the transaction again blindly: it may have committed. `resolve()` of the transaction,
    or of the database with this error, finds out.
    """

    retry = Retry.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        start_timestamp: int = 0,
        primary: CellAddress | None = None,
        where: str = "",
    ) -> None:
        super().__init__(message, where=where)
        self.start_timestamp = start_timestamp
        self.primary = primary
        """The cell that decides the outcome."""


class OutcomeLost(OutcomeUnknown):
    """The outcome of the transaction can no longer be determined.

    It is older than the history that is kept, or the table of the cell that decides is gone. Asking
    again is useless: look at the data.
    """

    retry = Retry.USELESS


class RowChanged(TransactionError):
    """A row was written after the snapshot that its new values were computed from.

    Nothing of the transaction was written. Read the row again, and compute again.
    """

    def __init__(
        self,
        message: str,
        *,
        table: str = "",
        row: bytes = b"",
        column: bytes = b"",
        since: int = 0,
        commit_timestamp: int = 0,
        where: str = "",
    ) -> None:
        super().__init__(message, where=where)
        self.table = table
        self.row = row
        self.column = column
        """The column that was written last."""
        self.since = since
        """The timestamp of the snapshot."""
        self.commit_timestamp = commit_timestamp
        """When the row was written; 0 if its history has been collected."""


class SnapshotTooOld(TransactionError):
    """The snapshot is below the safe point, where old versions may already be collected.

    Begin a new transaction or snapshot. A follower of changes has missed some for good: it scans
    the table in a new snapshot, and then reads the changes after the snapshot's timestamp.
    """

    def __init__(
        self, message: str, *, timestamp: int = 0, safe_point: int = 0, where: str = ""
    ) -> None:
        super().__init__(message, where=where)
        self.timestamp = timestamp
        self.safe_point = safe_point


class TransactionTooLarge(TransactionError):
    """More cells or bytes than one transaction may write. Nothing was written."""


class WrittenTwice(TransactionError):
    """Two tasks of a shared transaction write the same cell, or one writes two values to it.

    Which of the two should win depends on chance, so the transaction cannot be committed.
    """

    def __init__(self, message: str, *, cell: CellAddress | None = None, where: str = "") -> None:
        super().__init__(message, where=where)
        self.cell = cell


class InvalidArgument(PercolatorError):
    """A field of a request is missing, malformed or outside its limits. Nothing was written.

    The field `request` or `response` means that the whole message is too large.
    """

    def __init__(self, field: str, reason: str, *, where: str = "") -> None:
        super().__init__(f"{field}: {reason}", where=where)
        self.field = field
        self.reason = reason


class UsageError(PercolatorError):
    """The program uses the library in a way that cannot work."""


def not_picklable(what: str) -> UsageError:
    """The error for pickling a database, or what is of one. Spark shows it if a function captures
    such a thing."""
    return UsageError(
        f"{what} belongs to the connection of one process and cannot be pickled: in a function "
        "that Spark runs on executors, call percolator.spark.database() instead of using the "
        "driver's database; in any other process, call percolator.connect()"
    )


class UniqueViolation(TransactionError):
    """Two rows would have the same values in a unique index. Nothing was committed."""

    def __init__(
        self, message: str, *, index: str = "", rows: tuple[bytes, ...] = (), where: str = ""
    ) -> None:
        super().__init__(message, where=where)
        self.index = index
        """The name of the index."""
        self.rows = rows
        """The row that was written, and the row that has the values."""


class SchemaError(PercolatorError):
    """An unknown table or column, or a value that does not fit its column."""

    was_dropped = False
    """True if the table was dropped while a transaction or snapshot used it. A new one uses the
    next table of that name, or is told that there is none."""

    def __init__(
        self, message: str, *, table: str = "", table_id: int = 0, where: str = ""
    ) -> None:
        super().__init__(message, where=where)
        self.table = table
        """The table that is unknown, by name or by id, if that is the problem."""
        self.table_id = table_id


class Unauthenticated(PercolatorError):
    """The call carried no token, or none that the cluster knows. Nothing was executed."""


class PermissionDenied(PercolatorError):
    """The caller is known, but its role does not permit the call. Nothing was executed."""


class NotExecuted(PercolatorError):
    """The request was definitely not executed: sending it again is safe."""

    retry = Retry.SAFE


class Overloaded(NotExecuted):
    """More than can be done in time. Wait `retry_after_seconds` before asking again."""

    def __init__(self, message: str, *, retry_after_seconds: float, where: str = "") -> None:
        super().__init__(message, where=where)
        self.retry_after_seconds = retry_after_seconds


class NotReady(NotExecuted):
    """The server is starting, draining, or has lost what it needs to answer truthfully."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_seconds: float = 0.0,
        leaving: str = "",
        where: str = "",
    ) -> None:
        super().__init__(message, where=where)
        self.retry_after_seconds = retry_after_seconds
        self.leaving = leaving
        """The service that is shutting down, and will not be ready again. Empty otherwise."""


class UnknownServer(NotReady):
    """A gateway was to forward the call to a server that is not, or no longer, in the cluster."""

    def __init__(self, message: str, *, server: str, where: str = "") -> None:
        super().__init__(message, where=where)
        self.server = server


@dataclass(frozen=True)
class TabletLocation:
    """Where rows are served, as far as the server that refused the call knows."""

    table_id: int
    tablet_id: int
    epoch: int
    start: bytes
    end: bytes
    address: str


class TabletMoved(NotExecuted):
    """This server does not serve this tablet at this epoch."""

    def __init__(
        self,
        message: str,
        *,
        tablet_id: int,
        epoch: int,
        highest_epoch: int = 0,
        locations: tuple[TabletLocation, ...] = (),
        where: str = "",
    ) -> None:
        """`highest_epoch` is the highest epoch that the server knows of; 0 if it knows none."""
        super().__init__(message, where=where)
        self.tablet_id = tablet_id
        self.epoch = epoch
        self.highest_epoch = highest_epoch
        self.locations = locations


class SchemaChanged(NotExecuted):
    """The request was made under an older version of the table's schema."""

    def __init__(
        self, message: str, *, table_id: int, schema_version: int, where: str = ""
    ) -> None:
        super().__init__(message, where=where)
        self.table_id = table_id
        self.schema_version = schema_version


class StoreFault(Enum):
    """A defect of a store."""

    DISK_FULL = "disk full"
    INPUT_OUTPUT = "input/output error"
    DAMAGED = "damaged"
    READ_ONLY = "not writable"


class StoreUnusable(NotExecuted):
    """The disk is full or failing, or the stored data is damaged. Nothing was executed."""

    def __init__(self, message: str, *, fault: StoreFault, where: str = "") -> None:
        super().__init__(message, where=where)
        self.fault = fault


class ExecutionUnknown(PercolatorError):
    """The request may or may not have been executed."""

    retry = Retry.UNKNOWN


class Unavailable(ExecutionUnknown):
    """Nothing answered at the address, or the connection broke."""


class DeadlineExceeded(ExecutionUnknown):
    """No answer came in time."""


class SessionExpired(PercolatorError):
    """The session ended, or was not renewed in time. Its id is never valid again."""

    def __init__(self, message: str, *, session_id: bytes, where: str = "") -> None:
        super().__init__(message, where=where)
        self.session_id = session_id


class WrongCluster(PercolatorError):
    """The two sides belong to different clusters, or to incompatible versions."""

    def __init__(self, message: str, *, expected: str, found: str, where: str = "") -> None:
        super().__init__(message, where=where)
        self.expected = expected
        self.found = found


class TimestampRegression(PercolatorError):
    """A timestamp was not larger than an earlier one. An outage is better than corruption."""


class InvariantViolation(PercolatorError):
    """A rule that must always hold is broken: a bug, or damaged data. Please report it."""


def harmless(error: PercolatorError) -> PercolatorError:
    """The error of a call that has asked for a timestamp and nothing else: it can safely be
    repeated. To be raised as it is: with `from error`, it might be its own cause."""
    if error.retry is not Retry.UNKNOWN:
        return error
    found = copy(error)  # others may wait for the same timestamp
    found.retry = Retry.SAFE
    found.__cause__ = error
    return found
