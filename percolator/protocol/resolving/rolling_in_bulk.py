"""Having tablets roll the locks of committed transactions forward, many at a time.

A client that rolls a lock forward has read it, and sends all of it back in another form. Where it
meets many, it tells their tablet of the commit, once, and the tablet does the rest. The driver of a
shared transaction tells all tablets right after its commit. Nothing depends on it: readers take the
values from the locks meanwhile, and whoever needs a cell now rolls it forward by itself. Only long
scans wait a moment, so that the tablet gets ahead of them.

Only a verdict is told, that is, a commit that was seen on the primary.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from percolator.errors import PercolatorError, SchemaChanged
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import ROLLED_BACK, Environment
from percolator.routing.cells import RollForward

_log = logging.getLogger(__name__)

MANY = 32
"""From so many locks in one answer on, the tablet is told: there are probably more."""
WHOLE_PAGE = 512
"""Who meets so many is on a long way through the table, and waits for the tablet to get ahead:
reading values from locks costs several times as much as reading commits."""
AHEAD = 16
"""How far ahead, in times of what was met."""


class BulkRolling:
    """What one client tells tablets about the locks that it meets."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._being_told: set[int] = set()
        """Tables to one of whose tablets a message is on its way."""

    async def leave(self, met: Sequence[MetLock]) -> Sequence[MetLock]:
        """Tells tablets of these locks, where there are many of committed transactions. Returns
        those that are left to the caller."""
        if len(met) < MANY or self._env.rolls_forward is None:
            return met
        by_table: defaultdict[int, list[MetLock]] = defaultdict(list)
        for one in met:
            by_table[one.address.table_id].append(one)
        left: list[MetLock] = []
        for table_id, locks in by_table.items():
            if len(locks) < MANY:
                left += locks
            elif len(locks) >= WHOLE_PAGE:
                left += await self._have_it_get_ahead(table_id, locks)
            elif table_id not in self._being_told:
                self._being_told.add(table_id)
                self._env.background.start(self._tell(table_id, locks))
        return left

    async def _have_it_get_ahead(self, table_id: int, met: Sequence[MetLock]) -> Sequence[MetLock]:
        try:
            await self._order(table_id, met, AHEAD * len(met))
        except PercolatorError as problem:
            _log.info("a tablet was not told of commits: %s", problem)
            return met
        return ()

    async def _tell(self, table_id: int, met: Sequence[MetLock]) -> None:
        try:
            await self._order(table_id, met, 0)
        finally:
            self._being_told.discard(table_id)

    async def _order(self, table_id: int, met: Sequence[MetLock], await_cells: int) -> None:
        env = self._env
        starts = {one.lock.start_timestamp for one in met}
        verdicts = {start: env.verdicts.get(start) for start in starts}
        commits = {
            start: at for start, at in verdicts.items() if at is not None and at != ROLLED_BACK
        }
        row = min(one.address.row for one in met)
        deadline = env.now() + env.limits.background_seconds
        await tell_of_commits(env, table_id, commits, deadline, row, await_cells)


async def tell_of_commits(
    env: Environment,
    table_id: int,
    commits: Mapping[int, int],
    deadline: float,
    row: bytes | None = None,
    await_cells: int = 0,
) -> None:
    """Tells the tablet of this row, or all tablets of the table, which transactions have committed,
    and when; may wait until it is so many cells ahead."""
    if env.rolls_forward is None or not commits:
        return
    schema = await env.schema(table_id, deadline)
    order = RollForward(table_id, commits, schema.version, schema.observers, row, await_cells)
    try:
        await env.rolls_forward.roll_forward(order, deadline)
    except SchemaChanged:
        schema = await env.schemas.refresh(table_id, deadline)
        order = order._replace(schema_version=schema.version, observers=schema.observers)
        await env.rolls_forward.roll_forward(order, deadline)
