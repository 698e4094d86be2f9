"""The most that a client accepts, and how long it waits. Everything has a limit."""

from __future__ import annotations

from dataclasses import dataclass, fields

from percolator.arguments import WHOLE_MAX, require_seconds, require_whole
from percolator.errors import InvalidArgument
from percolator.schema import ROW_BYTES_MAX

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE


@dataclass(frozen=True)
class Limits:
    """The limits of one `Database`. The names include the units.

    >>> percolator.connect("localhost:7100", limits=Limits(call_seconds=2.0))
    """

    row_bytes_max: int = 4 * KIBIBYTE
    """At most 64 KiB. Above the limit of the tablet servers, commits are refused."""
    column_bytes_max: int = 255
    value_bytes_max: int = 4 * MEBIBYTE
    transaction_cells_max: int = 100_000
    transaction_bytes_max: int = 64 * MEBIBYTE
    """The total size of the rows, columns and values that one transaction writes."""
    value_inline_bytes_max: int = KIBIBYTE
    """Longer values are stored apart from their write records, to keep scans of history fast."""
    one_round_cells_max: int = 256
    """Transactions that write at most this many cells, all in one tablet, are committed with one
    message. 0: all are committed in two phases."""
    get_many_cells_max: int = 100_000

    page_rows_max: int = 1_000
    page_bytes_max: int = 1 * MEBIBYTE

    call_seconds: float = 10.0
    """How long one call may take, unless the call says otherwise."""
    lock_ttl_seconds: float = 3.0
    """How long others wait for a silent owner of a lock. Must be longer than the time for which the
    oracle hands out timestamps in advance."""
    heartbeat_seconds: float = 1.0
    lock_wait_seconds: float = 5.0
    """How long a commit waits for the lock of an older transaction before it gives up."""
    push_after_seconds: float = 0.05
    """After waiting this long, a reader pushes a live writer's commit above its own snapshot."""
    backoff_seconds_min: float = 0.002
    backoff_seconds_max: float = 0.2
    slow_transaction_seconds: float = 1.0
    """A transaction that takes longer is logged."""

    transactions_busy_max: int = 1_024
    """Transactions that wait for answers at the same time. Above this, others wait to begin."""
    background_tasks_max: int = 1_024
    """Transactions whose other cells are still being committed or rolled back. Above this, a commit
    does that work itself before it returns."""
    background_seconds: float = 30.0
    """How long that work is tried before it is left to the transactions that meet the locks."""
    verdicts_max: int = 16_384
    """How many outcomes of transactions are remembered."""

    server_rows_max: int = 4_096
    """Rows queued for or being served by one tablet server. Above this, callers wait."""
    server_bytes_max: int = 8 * MEBIBYTE
    server_calls_max: int = 4
    batch_rows_max: int = 256
    batch_bytes_max: int = 1 * MEBIBYTE
    silence_seconds: float = 1.0
    """If a tablet server does not answer a call for this long, it may be gone: the client asks a
    master whether its tablets are served elsewhere. If not, it keeps waiting."""
    attempt_seconds_max: float = 5.0
    """After this, the client gives up a silent tablet server, which may or may not have executed
    what it was sent."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, float):
                require_seconds(value, field.name)
            else:
                least = 0 if field.name == "one_round_cells_max" else 1
                most = ROW_BYTES_MAX if field.name == "row_bytes_max" else WHOLE_MAX
                require_whole(value, field.name, least, most)
        if self.server_calls_max < 2:
            raise InvalidArgument(
                "server_calls_max", "must be at least 2: one for reads and one for mutations"
            )
        if self.heartbeat_seconds * 2 > self.lock_ttl_seconds:
            raise InvalidArgument(
                "heartbeat_seconds",
                "must be at most half of lock_ttl_seconds, since a heartbeat may be lost",
            )
        if self.backoff_seconds_min > self.backoff_seconds_max:
            raise InvalidArgument("backoff_seconds_min", "must not exceed backoff_seconds_max")
