"""What one transaction has cost so far, for its program: `tx.statistics`."""

from __future__ import annotations

from percolator.errors import CellAddress


class LockWait:
    """A lock that a transaction waited for, and which transaction held it."""

    __slots__ = ("column", "holder_start_timestamp", "row", "seconds", "table_id")

    def __init__(
        self, table_id: int, row: bytes, column: bytes, holder: int, seconds: float
    ) -> None:
        self.table_id = table_id
        self.row = row
        self.column = column
        self.holder_start_timestamp = holder
        self.seconds = seconds

    def __repr__(self) -> str:
        return (
            f"LockWait({CellAddress(self.table_id, self.row, self.column)}, "
            f"held by {self.holder_start_timestamp}, {self.seconds:.3f} s)"
        )


class Statistics:
    """What one transaction has cost so far."""

    __slots__ = ("_lock_waits", "retries", "round_trips", "rows_read")

    def __init__(self) -> None:
        self.round_trips = 0
        """How often the transaction waited for responses; parallel requests count once."""
        self.rows_read = 0
        """How many rows were asked for or scanned."""
        self.retries = 0
        """How many of the round trips repeated a request: it had failed, or met a lock."""
        self._lock_waits: list[LockWait] | None = None

    @property
    def lock_waits(self) -> list[LockWait]:
        """The locks that the transaction waited for, and their holders."""
        if self._lock_waits is None:  # most transactions never need it
            self._lock_waits = []
        return self._lock_waits

    def __repr__(self) -> str:
        return (
            f"Statistics(round_trips={self.round_trips}, retries={self.retries}, "
            f"lock_waits={self.lock_waits})"
        )
