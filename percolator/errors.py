"""Everything that can go wrong, in one vocabulary.

    PercolatorError
    ├── TransactionError
    │   ├── ConflictError          somebody else wrote first; run the transaction again
    │   ├── OutcomeUnknown         committed or not: ask before doing anything again
    │   ├── SnapshotTooOld         older than what the store still keeps
    │   └── TransactionTooLarge
    ├── InvalidArgument            a field is wrong; nothing was written
    ├── UsageError                 the program uses the library in a way that cannot work
    ├── SchemaError                unknown table or column, or a type that does not fit
    ├── Unauthenticated            the cluster does not know who is calling
    ├── PermissionDenied           it does, and he may not
    ├── NotExecuted                definitely not done: sending it again is safe
    │   ├── Overloaded             a queue is full; says when to come back
    │   ├── NotReady               starting, draining, or without what it needs to be truthful
    │   │   └── UnknownServer      a gateway was to pass it on to a server that is not there
    │   ├── TabletMoved            another server, or another epoch, serves these rows
    │   ├── SchemaChanged          made under an older schema
    │   └── StoreUnusable          disk full, failing or damaged
    ├── ExecutionUnknown           may or may not have been done
    │   ├── Unavailable            nobody answered at the address, or the connection broke
    │   └── DeadlineExceeded       no answer in time
    ├── SessionExpired             never revived: open another session
    ├── WrongCluster               two clusters, or versions that do not mix
    ├── TimestampRegression        the oracle went back: nothing may go on
    └── InvariantViolation         a rule that must always hold is broken: a bug, or damaged data

Every error says what happened, where, and through `retry` whether the same call may be sent again.
`percolator/wire/status.py` maps them to gRPC and back, in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Retry(Enum):
    """Whether the very same call may be sent again."""

    SAFE = "safe"
    USELESS = "useless"
    UNKNOWN = "unknown"


class PercolatorError(Exception):
    """The base of every error that this library raises on purpose."""

    retry: Retry = Retry.USELESS
    """Of the kind of error, unless more is known about this one."""

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        """The service and what it was working on; empty in the caller's own process."""

    def __str__(self) -> str:
        return f"{self.message} [{self.where}]" if self.where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with all its attributes: errors travel from Spark's executors to the driver."""
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(
    kind: type[PercolatorError], args: tuple[object, ...], state: dict[str, object]
) -> PercolatorError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class CellAddress(NamedTuple):
    """A cell anywhere in the cluster. Ordered as primaries are chosen: table, row, column."""

    table_id: int
    row: bytes
    column: bytes

    def __str__(self) -> str:
        return f"{self.row!r}, {self.column!r} of table {self.table_id}"


class TransactionError(PercolatorError):
    """A transaction did not commit, or nobody knows whether it did."""


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
        """Where the two met."""
        self.start_timestamp = start_timestamp
        """Of the transaction that lost."""
        self.other_start_timestamp = other_start_timestamp
        """Of the one that it met; 0 when it is not known."""
        self.other_commit_timestamp = other_commit_timestamp
        """0 when the other one had not committed."""


class OutcomeUnknown(TransactionError):
    """The commit was sent and its fate could not be learned in time.

    Never run the transaction again blindly: it may be committed. The transaction's `resolve()`, or
    the database's with this error, finds out.
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
        """The cell that decides."""


class SnapshotTooOld(TransactionError):
    """The snapshot lies below the safe point, where older versions may be collected already."""

    def __init__(
        self, message: str, *, timestamp: int = 0, safe_point: int = 0, where: str = ""
    ) -> None:
        super().__init__(message, where=where)
        self.timestamp = timestamp
        self.safe_point = safe_point


class TransactionTooLarge(TransactionError):
    """More cells or bytes than one transaction may write. Nothing was written."""


class InvalidArgument(PercolatorError):
    """A field of a request is missing, malformed or outside its limits. Nothing was written."""

    def __init__(self, field: str, reason: str, *, where: str = "") -> None:
        super().__init__(f"{field}: {reason}", where=where)
        self.field = field
        self.reason = reason


class UsageError(PercolatorError):
    """The program uses the library in a way that cannot work."""


class SchemaError(PercolatorError):
    """An unknown table or column, or a value that does not fit its column."""

    def __init__(
        self, message: str, *, table: str = "", table_id: int = 0, where: str = ""
    ) -> None:
        super().__init__(message, where=where)
        self.table = table
        """The table that is unknown, if it is one; by name or by id."""
        self.table_id = table_id


class Unauthenticated(PercolatorError):
    """The call carried no token, or none that the cluster knows. Nothing was executed."""


class PermissionDenied(PercolatorError):
    """The caller is known, and his role does not reach so far. Nothing was executed."""


class NotExecuted(PercolatorError):
    """The request was definitely not executed: sending it again is safe."""

    retry = Retry.SAFE


class Overloaded(NotExecuted):
    """A queue is full. Wait `retry_after_seconds` before asking again."""

    def __init__(self, message: str, *, retry_after_seconds: float, where: str = "") -> None:
        super().__init__(message, where=where)
        self.retry_after_seconds = retry_after_seconds


class NotReady(NotExecuted):
    """The server is starting, draining, or has lost what it needs to answer truthfully."""

    def __init__(self, message: str, *, retry_after_seconds: float = 0.0, where: str = "") -> None:
        super().__init__(message, where=where)
        self.retry_after_seconds = retry_after_seconds


class UnknownServer(NotReady):
    """A gateway was to pass the call on to a server that is not in the cluster, or not any more."""

    def __init__(self, message: str, *, server: str, where: str = "") -> None:
        super().__init__(message, where=where)
        self.server = server


@dataclass(frozen=True)
class TabletLocation:
    """Where rows are served: as much as the server that refused knows."""

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
        locations: tuple[TabletLocation, ...] = (),
        where: str = "",
    ) -> None:
        super().__init__(message, where=where)
        self.tablet_id = tablet_id
        self.epoch = epoch
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
    """What is the matter with a store."""

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
    """Nobody answered at the address, or the connection broke."""


class DeadlineExceeded(ExecutionUnknown):
    """No answer came in time."""


class SessionExpired(PercolatorError):
    """The session ended, or was not renewed in time. It is never revived under its id."""

    def __init__(self, message: str, *, session_id: bytes, where: str = "") -> None:
        super().__init__(message, where=where)
        self.session_id = session_id


class WrongCluster(PercolatorError):
    """The two sides belong to different clusters, or to versions that do not mix."""

    def __init__(self, message: str, *, expected: str, found: str, where: str = "") -> None:
        super().__init__(message, where=where)
        self.expected = expected
        self.found = found


class TimestampRegression(PercolatorError):
    """A timestamp was not larger than one received before. Corruption is worse than an outage."""


class InvariantViolation(PercolatorError):
    """A rule that must always hold was found broken: a bug, or damaged data. Report it."""
