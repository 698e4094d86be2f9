"""What the protocol stands on: everything it needs from the outside, as narrow as can be."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from percolator.limits import Limits
from percolator.protocol.background import Background
from percolator.protocol.verdicts import Verdicts
from percolator.wire.backoff import Backoff
from percolator.wire.catalog import TableSchema
from percolator.wire.liveness import Liveness
from percolator.wire.questions import Cells, Mutations
from percolator.world import Clock, Random


class Timestamps(Protocol):
    """The oracle."""

    def get(self, count: int = 1, timeout_seconds: float | None = None) -> Awaitable[int]:
        """A timestamp larger than every one that was received before the call."""
        ...


class Owners(Protocol):
    """The sessions of transactions' owners: hints only."""

    @property
    def session_id(self) -> bytes | None:
        """Of this process, if it has a living one."""
        ...

    async def liveness(self, session_ids: Sequence[bytes]) -> list[Liveness]:
        """Which of these live, asked now."""
        ...


class Schemas(Protocol):
    """The schemas of all tables, as far as they are known."""

    def get(self, table_id: int) -> TableSchema | None: ...

    async def refresh(self, table_id: int, deadline: float) -> TableSchema:
        """Asks for the current one."""
        ...


class LockWait:
    """A lock that a transaction waited for, and whose it was."""

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
            f"LockWait({self.row!r}, {self.column!r} of table {self.table_id}, "
            f"held by {self.holder_start_timestamp}, {self.seconds:.3f} s)"
        )


class Statistics:
    """What one transaction has cost so far."""

    __slots__ = ("_lock_waits", "retries", "round_trips")

    def __init__(self) -> None:
        self.round_trips = 0
        """Answers waited for, one after the other."""
        self.retries = 0
        """Of these, how many asked again what was not answered, or was refused for a lock."""
        self._lock_waits: list[LockWait] | None = None

    @property
    def lock_waits(self) -> list[LockWait]:
        """The locks that were waited for, and whose they were."""
        if self._lock_waits is None:  # most transactions never need it
            self._lock_waits = []
        return self._lock_waits

    def __repr__(self) -> str:
        return (
            f"Statistics(round_trips={self.round_trips}, retries={self.retries}, "
            f"lock_waits={self.lock_waits})"
        )


@dataclass(frozen=True)
class Surroundings:
    """Shared by all transactions of one client."""

    cells: Cells
    timestamps: Timestamps
    owners: Owners
    schemas: Schemas
    clock: Clock
    random: Random
    limits: Limits
    verdicts: Verdicts
    background: Background
    deleted_tables: Mutations | None = None
    """Where primaries are asked whose table is being deleted; `SchemaError` if it is gone for good.
    Without it, their locks stay."""

    def backoff(self) -> Backoff:
        return Backoff(
            self.clock,
            self.random,
            self.limits.backoff_seconds_min,
            self.limits.backoff_seconds_max,
        )

    async def schema(self, table_id: int, deadline: float) -> TableSchema:
        known = self.schemas.get(table_id)
        return known if known is not None else await self.schemas.refresh(table_id, deadline)
