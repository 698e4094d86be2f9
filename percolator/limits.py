"""What a client accepts at most, and how long it waits. Everything has a limit."""

from __future__ import annotations

from dataclasses import dataclass, fields

from percolator.errors import InvalidArgument

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE


@dataclass(frozen=True)
class Limits:
    """The limits of one `Database`. Units are in the names.

    >>> percolator.connect("localhost:7100", limits=Limits(call_seconds=2.0))
    """

    row_bytes_max: int = 4 * KIBIBYTE
    column_bytes_max: int = 255
    value_bytes_max: int = 4 * MEBIBYTE
    transaction_cells_max: int = 100_000
    transaction_bytes_max: int = 64 * MEBIBYTE
    """Rows, columns and values that one transaction writes, together."""
    value_inline_bytes_max: int = KIBIBYTE
    """Longer values are stored apart from their write record, which keeps history scans quick."""
    get_many_cells_max: int = 100_000

    page_rows_max: int = 1_000
    page_bytes_max: int = 1 * MEBIBYTE

    call_seconds: float = 10.0
    """How long one call may take, unless the call says otherwise."""
    lock_ttl_seconds: float = 3.0
    """How long others wait for a silent owner. Must exceed what the oracle hands out in advance."""
    heartbeat_seconds: float = 1.0
    lock_wait_seconds: float = 5.0
    """How long a commit waits for the lock of an older transaction before it is a conflict."""
    push_after_seconds: float = 0.05
    """A reader pushes the commit of a living writer above itself after having waited so long."""
    backoff_seconds_min: float = 0.002
    backoff_seconds_max: float = 0.2
    slow_transaction_seconds: float = 1.0
    """A transaction that takes longer is worth a line in the log."""

    background_tasks_max: int = 1_024
    """Transactions whose other cells are still being committed or rolled back; above it, whoever
    commits does that work before going on."""
    background_seconds: float = 30.0
    """How long that work is tried before it is left to whoever meets the locks."""
    verdicts_max: int = 16_384
    """Fates of transactions that are remembered."""

    server_rows_max: int = 4_096
    """Queued for or being served by one tablet server; above it, callers wait."""
    server_bytes_max: int = 8 * MEBIBYTE
    server_calls_max: int = 4
    batch_rows_max: int = 256
    batch_bytes_max: int = 1 * MEBIBYTE
    silence_seconds: float = 1.0
    """A tablet server that leaves a call without an answer for so long may be gone: a master is
    asked whether its tablets are served elsewhere. If not, it is waited for."""
    attempt_seconds_max: float = 5.0
    """A silent tablet server is given up after this; what it was sent may be done or not."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise InvalidArgument(field.name, f"expected a positive number, got {value!r}")
        if self.server_calls_max < 2:
            raise InvalidArgument("server_calls_max", "must be at least 2: reads and mutations")
        if self.heartbeat_seconds * 2 > self.lock_ttl_seconds:
            raise InvalidArgument(
                "heartbeat_seconds", "must be at most half of lock_ttl_seconds: one may be lost"
            )
        if self.backoff_seconds_min > self.backoff_seconds_max:
            raise InvalidArgument("backoff_seconds_min", "must not exceed backoff_seconds_max")
