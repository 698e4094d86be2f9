"""Announcing observed cells before a transaction can commit, where the store asks for it.

A tablet writes the notification with the record of a commit. A row store cannot: there, a
transaction first leaves an *intent* for each observed cell and observer, which workers follow.

Rules, each with the failure that it prevents:
- Before a commit is sent, all intents of its transaction are durable: `renew` sees to it. A change
  without an intent would never be found.
- They are written at the same time as the prewrites, which do not count as answered without them.
  This is only for speed and for precise errors: so `renew` hardly ever has anything left to write.
- Whoever may commit announces: a second committer of the same transaction does not rely on the
  first, whose intents may not be there yet, or may be those of an older schema.
- An intent says only that something may have happened. It is never withdrawn.
- If the catalogue's epoch, which comes with the commit timestamp, is higher than when a schema was
  asked for, it is asked for again, and observers that were registered meanwhile get their intents
  before the commit point. A registration at R raises the epoch, so every commit above R notifies
  its observer; those at or below R, a backfill finds, which reads above R. The schemas that are
  asked for then also show whether the commit has the entries of all indexes (indexes.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

from percolator.errors import CellAddress, ExecutionUnknown, PercolatorError, Retry
from percolator.protocol import steps
from percolator.protocol.environment import Announcing, Environment, Statistics
from percolator.protocol.write_set import WriteSteps
from percolator.routing.cells import Answer, CellMutation

# Writing weak notifications: those that a program asks for, without a change of the cell.
#
# They are written for the observers that the table has at the timestamp: whoever was registered
# before it has to hear of them. A client may know an older schema. A tablet compares versions, as
# it does when a cell is committed. A row store cannot, but a timestamp comes with the catalogue's
# epoch.


async def notify_weak_observers(
    env: Environment,
    cells: Sequence[CellAddress],
    timestamp: int,
    deadline: float,
    statistics: Statistics,
) -> None:
    """Notifies the weak observers of these cells, at a timestamp that this client has received.
    Tries until the deadline: what was written before is written again, and is the same."""
    backoff = env.backoff()
    await learn_schemas(env, (cell.table_id for cell in cells), deadline)
    while True:
        requests = []
        for table_id, row, column in cells:
            schema = await env.schema(table_id, deadline)
            observers = schema.weak_observers.get(column, ())
            if observers:
                step = steps.notify(row, column, timestamp, observers)
                requests.append(CellMutation(table_id, step, schema.version))
        if not requests:
            return
        statistics.round_trips += 1
        answers = await env.cells.mutate(requests, deadline)
        problem = next((one for one in answers if isinstance(one, PercolatorError)), None)
        if problem is None:
            return
        await env.refresh_schemas(requests, answers, deadline)
        if not await backoff.pause(deadline):
            raise problem


async def learn_schemas(env: Environment, table_ids: Iterable[int], deadline: float) -> None:
    """Asks for the schemas that may be older than the highest epoch of the catalogue that has come
    with a timestamp."""
    for table_id in set(table_ids):
        if not is_current(env, table_id):
            epoch = env.catalogue_epoch()
            await env.schemas.refresh(table_id, deadline)
            env.schemas_as_of[table_id] = max(epoch, env.schemas_as_of.get(table_id, 0))


def is_current(env: Environment, table_id: int) -> bool:
    """True if the schema is as young as the highest epoch that has come with a timestamp."""
    return env.schemas_as_of.get(table_id, 0) >= env.catalogue_epoch()


class Announcement:
    """The intents of one transaction."""

    __slots__ = ("_done", "_env", "_impossible", "_store", "_write")

    def __init__(self, env: Environment, store: Announcing, write: WriteSteps) -> None:
        self._env = env
        self._store = store
        self._write = write
        self._impossible: PercolatorError | None = None
        self._done: set[tuple[CellAddress, bytes]] = set()
        """The cells and observers whose intents are durable."""

    async def with_prewrites(
        self, cells: Sequence[CellAddress], prewrites: Awaitable[list[Answer]], deadline: float
    ) -> list[Answer]:
        """The answers to the prewrites of these cells, once their intents are durable. If they
        are not, none of the prewrites is answered; if they never will be, `require` says so."""
        if self._has_nothing_for(cells):
            return await prewrites
        problem, answers = await asyncio.gather(self._try(cells, deadline), prewrites)
        if problem is None:
            return answers
        if problem.retry is Retry.USELESS:
            self._impossible = problem
            return answers
        unknown = ExecutionUnknown(f"the intents were not written: {problem.message}")
        return [unknown] * len(answers)

    def _has_nothing_for(self, cells: Sequence[CellAddress]) -> bool:
        """True if it is known that nobody observes these cells, as in most transactions."""
        for cell in cells:
            schema = self._env.schemas.get(cell.table_id)
            if schema is None or self._write.observers(cell, schema):
                return False
        return True

    def require(self) -> None:
        """Raises if the transaction can never announce its cells: a table is gone."""
        if self._impossible is not None:
            raise self._impossible

    async def _try(self, cells: Sequence[CellAddress], deadline: float) -> PercolatorError | None:
        try:
            await self.announce(cells, deadline)
        except PercolatorError as error:
            return error
        return None

    async def renew(self, deadline: float) -> None:
        """Writes the intents that are missing. Call it after the commit timestamp was received, and
        before it is used."""
        await learn_schemas(self._env, (cell.table_id for cell in self._write.cells), deadline)
        await self.announce(self._write.cells, deadline)

    async def announce(self, cells: Sequence[CellAddress], deadline: float) -> None:
        """Returns when every observer of these cells, as the schemas are known, has an intent."""
        missing: list[tuple[CellAddress, bytes]] = []
        for cell in cells:
            schema = await self._env.schema(cell.table_id, deadline)
            wanted = [(cell, observer) for observer in self._write.observers(cell, schema)]
            missing += [one for one in wanted if one not in self._done]
        if missing:
            await self._store.announce(self._write.start, missing, deadline)
            self._done.update(missing)
