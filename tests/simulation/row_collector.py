"""Whoever collects the history of a row store, beside all workloads: like the master, a process
that is killed, paused and cut off as any other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from percolator.aio import Database
from percolator.errors import NotReady, PercolatorError
from percolator.history.rows import Decided, RowHistory
from percolator.routing.table_info import TableSchema
from percolator.services.master.collection import history_needs
from percolator.timestamps import SEQUENCE_BITS
from percolator.world import World
from tests.simulation.process import Incarnation
from tests.simulation.programs import LOCK_SERVICE
from tests.simulation.rows import rows_over

COLLECTOR = "collector:1"
COLLECTED_FROM_ROWS = "history collected from rows"


@dataclass(frozen=True)
class CollectorTimes:
    """How much history is kept."""

    round_seconds: float = 0.7
    retention_seconds: float = 1.5


_COLLECTION = CollectorTimes()


class RowCollectorProgram:
    """The collector, and what it has decided: that outlives it."""

    def __init__(
        self,
        connected: Callable[[World], Awaitable[Database]],
        table_ids: Callable[[], Iterable[int]],
        *,
        keeps_snapshots: bool,
    ) -> None:
        """With `keeps_snapshots`, only evidence of ended transactions is collected, and the history
        around it stays."""
        self._connected = connected
        self._table_ids = table_ids
        self._keeps_snapshots = keeps_snapshots
        self.decided = Decided()

    async def serve(self, incarnation: Incarnation) -> None:
        """The program."""
        incarnation.listen([])
        world = incarnation.world
        database = await self._connected(world)
        rows, env = rows_over(world.network), database.internal.engine.env

        async def registered() -> dict[int, TableSchema]:
            deadline = env.now() + env.limits.call_seconds
            return {one: await env.schemas.refresh(one, deadline) for one in self._table_ids()}

        history = RowHistory(env, rows.store, rows.times, world, registered, share=0.5)
        while True:
            await world.clock.sleep(_COLLECTION.round_seconds)
            try:
                await history.collect(await self._decide(world, database))
            except PercolatorError:
                continue  # the next round tries again

    async def _decide(self, world: World, database: Database) -> Decided:
        """As the master does: written down, and then the sessions are looked at again."""
        needs = await history_needs(world.network, [LOCK_SERVICE])
        now = await database.internal.engine.env.timestamps.get()
        wanted = now - (int(_COLLECTION.retention_seconds * 1000) << SEQUENCE_BITS)
        wanted = max(min(wanted, needs.oldest or now), self.decided.transactions)
        reads = 0 if self._keeps_snapshots else wanted
        self.decided = Decided(dict.fromkeys(self._table_ids(), reads), wanted)
        again = await history_needs(world.network, [LOCK_SERVICE])
        if 0 < again.oldest < wanted:
            raise NotReady("a session that began meanwhile needs history")
        return self.decided
