"""The parts of the client that a worker needs, as narrow as possible."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from percolator.observers.blocking_calls import BlockingCalls
from percolator.observers.port import Notifications
from percolator.observers.run_time import ClusterWaits
from percolator.protocol.environment import Environment
from percolator.protocol.known_row import KnownRow
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.statistics import Statistics
from percolator.protocol.write_set import WriteSet
from percolator.routing.catalog import Catalog
from percolator.timestamps import Timestamp
from percolator.v1 import master_pb2
from percolator.world import World

if TYPE_CHECKING:
    from percolator.observers.work import Work


class RunInternals(Protocol):
    """`percolator.aio.Transaction.internal`."""

    writes: WriteSet

    def bind(self, table: str, table_id: int) -> None:
        """Fixes which table the name means in this transaction, before it is used."""
        ...

    def know(self, row: KnownRow) -> None:
        """Cells as they are at the transaction's timestamp: no need to read them again."""
        ...


class RunTransaction(Protocol):
    """The transaction of a run: `percolator.aio.observing.ObserverTransaction`."""

    waits: ClusterWaits
    """The calls in which it waits for the cluster."""

    @property
    def statistics(self) -> Statistics: ...

    @property
    def internal(self) -> RunInternals: ...

    @property
    def ended(self) -> bool: ...

    @property
    def commit_timestamp(self) -> Timestamp | None: ...

    async def timestamp(self) -> Timestamp: ...

    async def commit(self) -> Timestamp | None: ...

    def rollback(self) -> None: ...


class RowLocking(Protocol):
    """Locks that say who works on what: `percolator.wire.advisory_locks.AdvisoryLocks`."""

    async def try_lock(self, names: Sequence[bytes]) -> list[bool]: ...

    async def renew(self, names: Sequence[bytes]) -> list[bool]: ...

    async def unlock(self, names: Sequence[bytes]) -> None: ...


@dataclass(frozen=True)
class WorkerContext:
    """What a worker uses of one connection to a cluster; what backfills or waits uses it, too."""

    world: World
    env: Environment
    cleanup: Cleanup
    catalog: Catalog
    notifications: Notifications
    locks: RowLocking
    begin: Callable[[Work | None], RunTransaction]
    """Begins a transaction for a run of this work; with None, for the worker's own purposes."""
    blocking: BlockingCalls
    """Calls blocking observers with such a transaction."""
    running_observers: Callable[[], Awaitable[Collection[tuple[str, str]] | None]]
    """Asks which observers, by table and name, run in any process; None if some process may run
    others."""

    def now(self) -> float:
        return self.world.clock.monotonic_seconds()

    def deadline(self) -> float:
        """The deadline of a call that begins now."""
        return self.now() + self.env.limits.call_seconds

    async def describe(self, table: str) -> master_pb2.Table:
        """The table with its observers, as it is now."""
        return await self.catalog.describe(table, self.deadline())
