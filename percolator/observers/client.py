"""What a worker stands on: everything that it needs of the client, as narrow as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from percolator.errors import CellAddress
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.surroundings import Statistics, Surroundings
from percolator.protocol.write_set import WriteSet
from percolator.timestamps import Timestamp
from percolator.v1 import master_pb2
from percolator.wire.catalog import Catalog
from percolator.wire.questions import FoundCell
from percolator.wire.tablet_map import TabletMap
from percolator.world import World

if TYPE_CHECKING:
    from percolator.observers.work import Work


class RunTransaction(Protocol):
    """The transaction of a run: `percolator.aio.Transaction`."""

    writes: WriteSet
    statistics: Statistics

    @property
    def ended(self) -> bool: ...

    @property
    def commit_timestamp(self) -> Timestamp | None: ...

    async def timestamp(self) -> Timestamp: ...

    def remember(self, address: CellAddress, found: FoundCell | None) -> None:
        """What a cell is at its timestamp: reading it needs no round trip any more."""
        ...

    async def commit(self) -> Timestamp | None: ...

    def rollback(self) -> None: ...


class RowLocking(Protocol):
    """Who works on what: `percolator.wire.advisory_locks.AdvisoryLocks`."""

    async def try_lock(self, names: Sequence[bytes]) -> list[bool]: ...

    async def renew(self, names: Sequence[bytes]) -> list[bool]: ...

    async def unlock(self, names: Sequence[bytes]) -> None: ...


@dataclass(frozen=True)
class Client:
    """One connection to a cluster."""

    world: World
    around: Surroundings
    cleanup: Cleanup
    catalog: Catalog
    tablets: TabletMap
    locks: RowLocking
    begin: Callable[[Work | None], RunTransaction]
    """A transaction for a run of this work; None for the worker's own purposes."""
    as_blocking: Callable[[RunTransaction], Any]
    """The same for a blocking function, in the thread in which this is called."""

    def now(self) -> float:
        return self.world.clock.monotonic_seconds()

    def deadline(self) -> float:
        """Of a call that begins now."""
        return self.now() + self.around.limits.call_seconds

    async def describe(self, table: str) -> master_pb2.Table:
        """The table with its observers, as it is now."""
        return await self.catalog.describe(table, self.deadline())
