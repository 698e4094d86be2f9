"""Rounds of collection over the tables of a row store, in the only order that loses nothing.

1. Whoever leads decides how far: as far as retention allows, nothing that a session or pin needs,
   durably, as on tablets (services/master/collection.py).
2. Resolve every lock below that, in every table.
3. Only now collect, row by row (percolator/rowstore/collection.py); but keep deletions from the
   start of the oldest transaction on whose observers have not run (`AwaitedIntents`).

Nothing is announced between 1 and 2: there is nobody to announce it to. A prewrite that arrives
after its row was scanned for locks is admitted if the row has no note. This does no harm: its
transaction takes its commit timestamp after that, above all that was decided, so that this round
deletes nothing that tells of its outcome; and the next round finds its locks. If its primary has a
note already, it can no longer commit, and its other locks are rolled back one by one
(percolator/protocol/cleanup.py).

A round that fails has deleted nothing that is needed. The next one continues in the table where it
broke off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from percolator.errors import NotReady, PercolatorError, Retry
from percolator.history.fates import Fates
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import Environment
from percolator.routing.catalog import TableSchema
from percolator.rowstore.collection import Bounds, Collected, RowCollector
from percolator.rowstore.intents import BUCKETS, Intent, Intents, key_from
from percolator.rowstore.layout import Times
from percolator.rowstore.patience import stored_locks
from percolator.rowstore.port import RowStore
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


LOCKS_AT_A_TIME: Final = 1_000
_SETTLE_SECONDS = 30.0
_ROUNDS_MAX = 1_000


async def resolve_older_locks(
    env: Environment,
    cleanup: Cleanup,
    scan: Callable[[], Awaitable[list[MetLock]]],
    below: int,
    where: str,
) -> int:
    """Returns how many locks were resolved, once `scan` finds none that is older than `below`.

    `scan` returns up to `LOCKS_AT_A_TIME` of them; `where` says what it scans. Raises `NotReady` if
    a primary does not answer, and the errors of the store.

    The cells that show the outcome of a lock's transaction may be among those that are collected. A
    lock that was left would then be rolled back by the next reader, although its transaction
    committed.

    Owners are not asked whether they are alive: a session that needs history holds the safe point
    back. An owner that is alive, but has said nothing of the transaction, or has used it for too
    long, could otherwise stop the collection of the whole cluster for as long as it likes. Its
    primary decides, as always: either it has committed, or it gets a marker and never will.
    """
    resolved = 0
    for _ in range(_ROUNDS_MAX):
        found = await scan()
        if not found:
            return resolved
        await cleanup.resolve(
            found,
            deadline=env.now() + _SETTLE_SECONDS,
            known_now=await env.timestamps.get(),
            waited_seconds=0.0,
            ended_below=below,
        )
        left = {(lock.address, lock.lock.start_timestamp) for lock in await scan()}
        gone = sum((one.address, one.lock.start_timestamp) not in left for one in found)
        resolved += gone
        if not gone:
            raise NotReady(
                f"a lock of transaction {found[0].lock.start_timestamp} in {where} is still held, "
                f"below {below}"
            )
    raise NotReady(f"{where} has too many old locks to resolve in one round")


Registered = Mapping[int, TableSchema]
"""All tables that are not being dropped."""
_ALL_COLUMNS = ((b"", b""),)


class AwaitedIntents:
    """The intents of one store: from when on observers still have to see deletions.

    A transaction may announce its cells for an observer that is being removed, or in a table that
    is being dropped. Such intents may come long after the removal, and no worker looks for them. If
    they counted, deletions would never be collected again. So they do not count, and are cleared
    here.

    **Which.** Intents whose table or observer is not registered, and whose transactions began below
    the safe point. They are looked at in their order, up to the first one that somebody waits for:
    only what is in front of that one could hold up anything.

    **Why no change is lost**, even if an observer of the same name is registered again: an intent
    is cleared only if its transaction's outcome is final (fates.py), or if its table is gone for
    good, and if whoever collects has led *after* that was seen, with a catalogue in which the
    observer was not registered. So every later registration is above that transaction's commit, and
    finds the change by backfilling, if it wants it. A call that deletes may thus arrive as late as
    it likes.
    """

    def __init__(
        self,
        env: Environment,
        intents: Intents,
        registered: Callable[[], Awaitable[Registered]],
    ) -> None:
        """`registered` returns what is registered at some time after it was called, and raises
        `NotReady` unless the caller led at that time."""
        self._env = env
        self._intents = intents
        self._registered = registered
        self._fates = Fates(env)

    async def oldest(self, below: int) -> int:
        """The least timestamp of all intents below this for which somebody asks, and that are there
        from now on, of transactions that have announced their cells by now; 0 if there is none."""
        registered = await self._registered()
        found = await asyncio.gather(*(self._oldest_in(one, below, registered) for one in BUCKETS))
        return min((one for one in found if one), default=0)

    async def _oldest_in(self, bucket: int, below: int, registered: Registered) -> int:
        at, end = key_from(bucket), key_from(bucket, below)
        while at:
            found, at = await self._intents.page(at, end, _ALL_COLUMNS, self._env.deadline())
            unasked: list[Intent] = []
            for intent in found:
                if _is_asked_for(intent, registered):
                    await self._clear(unasked)
                    return intent.timestamp
                unasked.append(intent)
            await self._clear(unasked)
        return 0

    async def _clear(self, unasked: Sequence[Intent]) -> None:
        """Intents whose transactions may still be about to commit stay for the next round."""
        if not unasked:
            return
        judged = await self._fates.judge(unasked)
        await self._fates.put_markers(judged.without_trace, judged)
        registered = await self._registered()
        committed = chain.from_iterable(
            intents for by_commit in judged.committed.values() for intents in by_commit.values()
        )
        final = [one for one in committed if not _is_asked_for(one, registered)]
        final += judged.rolled_back
        final += [one for one in judged.without_table if one.table_id not in registered]
        await self._intents.delete(final, self._env.deadline())


def _is_asked_for(intent: Intent, registered: Registered) -> bool:
    schema = registered.get(intent.table_id)
    if schema is None:
        return False
    by_column = chain(schema.observers.values(), schema.weak_observers.values())
    return any(intent.observer in observers for observers in by_column)
