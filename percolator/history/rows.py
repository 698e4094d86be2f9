"""Rounds of collection over the tables of a row store, in the only order that loses nothing.

1. Whoever leads decides how far: as far as retention allows, nothing that a session or pin needs,
   durably, as on tablets (services/master/history).
2. Resolve every lock below that, in every table.
3. Only now collect, row by row (percolator/rowstore/collecting.py); but keep deletions from the
   start of the oldest transaction on whose observers have not run (awaited.py).

Nothing is announced between 1 and 2: there is nobody to announce it to. A prewrite that arrives
after its row was scanned for locks is admitted if the row has no note. This does no harm: its
transaction takes its commit timestamp after that, above all that was decided, so that this round
deletes nothing that tells of its outcome; and the next round finds its locks. If its primary has a
note already, it can no longer commit, and its other locks are rolled back one by one
(percolator/protocol/resolving/cleanup.py).

A round that fails has deleted nothing that is needed. The next one continues in the table where it
broke off.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from percolator.errors import PercolatorError, Retry
from percolator.history.awaited import AwaitedIntents, Registered
from percolator.history.older_locks import LOCKS_AT_A_TIME, resolve_older_locks
from percolator.protocol.environment import Environment
from percolator.protocol.met_lock import MetLock
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.rowstore.collecting import Bounds
from percolator.rowstore.collector import Collected, RowCollector
from percolator.rowstore.intents import Intents
from percolator.rowstore.locks import stored_locks
from percolator.rowstore.port import RowStore
from percolator.rowstore.times import Times
from percolator.world import World


@dataclass(frozen=True)
class Decided:
    """How far history may be collected: durable before a round is told."""

    reads: Mapping[int, int] = field(default_factory=dict)
    """By table: the safe point of snapshots. All tables are named; 0 keeps everything."""
    transactions: int = 0
    """The safe point of transactions, in all tables: at or above each of `reads`, and below every
    timestamp that the oracle gives out from now on."""


@dataclass
class TableProgress:
    """How far the collection of a table has come."""

    below: int = 0
    """Everything was collected below it, in the last complete pass."""
    collected: Collected = field(default_factory=Collected)
    """All passes since this process began."""
    next_key: bytes = b""
    """Where a pass continues that was broken off."""
    begun_below: int = 0
    """The safe point at which that pass began: a later round may continue it at a higher one."""


class RowHistory:
    """Collects the tables of a row store. For whoever leads."""

    def __init__(
        self,
        env: Environment,
        store: RowStore,
        times: Times,
        world: World,
        registered: Callable[[], Awaitable[Registered]],
        *,
        share: float = 0.1,
    ) -> None:
        """`env` is that of a client of the same store, with which old locks are resolved.
        `registered` is as in `AwaitedIntents`. The collector works for `share` of the time of a
        pass."""
        self._env = env
        self._store = store
        self._times = times
        self._world = world
        intents = Intents(store, times, world, env.limits)
        self.awaited = AwaitedIntents(env, intents, registered)
        self._cleanup = Cleanup(env)
        self._collector = RowCollector(store, times, world, env.limits, share=share)
        self.tables: dict[int, TableProgress] = {}
        self.locks_resolved = 0

    async def collect(self, decided: Decided) -> None:
        """One round. Raises what prevents it; `NotReady` while a lock below the safe points cannot
        be resolved."""
        self.tables = {one: self.tables.get(one, TableProgress()) for one in decided.reads}
        if not decided.transactions:
            return
        for table_id in decided.reads:
            await self._resolve(table_id, decided.transactions)
        # Whatever was committed below has announced its cells: an intent that is not there by now
        # was handled.
        awaited_from = await self.awaited.oldest(decided.transactions)
        problem: PercolatorError | None = None
        for table_id, below in decided.reads.items():
            bounds = Bounds(below, decided.transactions, awaited_from)
            try:
                await self._collect(self.tables[table_id], table_id, bounds)
            except PercolatorError as error:
                if error.retry is not Retry.USELESS:
                    raise
                # Somebody has changed the table by hand, for instance, and no others depend on it.
                problem = problem or error
        if problem is not None:
            raise problem

    async def _collect(self, progress: TableProgress, table_id: int, bounds: Bounds) -> None:
        key: bytes | None = progress.next_key
        if not key:
            progress.begun_below = bounds.below
        while key is not None:
            progress.next_key = key
            key = await self._collector.collect(table_id, bounds, progress.collected, key)
        progress.next_key = b""
        progress.below = progress.begun_below

    async def _resolve(self, table_id: int, below: int) -> None:
        async def scan() -> list[MetLock]:
            cells = await stored_locks(
                self._store,
                table_id,
                self._times,
                self._world,
                self._env.limits,
                below=below,
                limit=LOCKS_AT_A_TIME,
            )
            return [MetLock.of(table_id, cell) for cell in cells]

        self.locks_resolved += await resolve_older_locks(
            self._env, self._cleanup, scan, below, f"table {table_id}"
        )
