"""Workers that use the connection of a database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from percolator.aio.engine import Engine
from percolator.aio.transaction import Transaction
from percolator.arguments import require_drain_seconds
from percolator.errors import CellAddress, UsageError
from percolator.observers.context import BlockingCalls, Notifications, RunTransaction, WorkerContext
from percolator.observers.definition import Observer
from percolator.observers.intent_notifications import IntentNotifications
from percolator.observers.tablet_notifications import TabletContext, TabletNotifications
from percolator.observers.time_limits import ClusterWaits
from percolator.observers.watched_cell import look_back
from percolator.observers.work_queue import Work
from percolator.observers.worker import Worker, WorkerLimits
from percolator.timestamps import Timestamp


class ObserverTransaction(Transaction):
    """A transaction of an observer's run, whose calls are timed."""

    def __init__(self, engine: Engine, work: Work | None = None) -> None:
        super().__init__(engine, None)
        self.works: Sequence[Work] = () if work is None else (work,)
        self.is_in_function = False
        self.last_runs: Mapping[Work, int] = {}
        self._seen: Mapping[Work, bytes | None] | None = None
        self._looking_back: asyncio.Lock | None = None
        self._reader.is_admitted = True  # the worker knows how many runs there may be
        self.waits = self._waits = ClusterWaits(engine.now, engine.limits.silence_seconds)
        self._buffer.count_in(self.waits)

    async def commit(self, *, timeout: float | None = None) -> Timestamp | None:
        """As of any transaction; refused in the function of an observer."""
        if self.is_in_function:
            raise UsageError("a run is committed when its function returns: do not commit it there")
        return await super().commit(timeout=timeout)

    async def _last_seen(self, address: CellAddress, deadline: float) -> bytes | None:
        work = self._work_at(address)
        if self._looking_back is None:
            self._looking_back = asyncio.Lock()
        async with self._looking_back:
            if self._seen is None:  # of all rows at once
                last_runs = {one: self.last_runs[one] for one in self.works}
                self._seen = await look_back(
                    self._env, self._engine.cleanup, last_runs, deadline, self.statistics
                )
        return self._seen[work]

    def _work_at(self, address: CellAddress) -> Work:
        """The change of this cell, of which the observer knows what it has seen before."""
        table_id, row, column = address
        for work in self.works:
            watched, observer = work.watched, work.watched.observer
            if observer.weak:
                raise UsageError(
                    f"previous() in the weak observer {observer.name!r}: it does not record its "
                    "runs, so what it has seen before is not known"
                )
            if not observer.deletes:
                raise UsageError(
                    f"previous() in observer {observer.name!r}, which deletes=False does not tell "
                    "of deletions: what its cell held before may be long gone"
                )
            if (watched.table_id, work.row, work.column) == (table_id, row, column):
                return work
        raise UsageError(
            f"previous() of {self._env.described(address)}, which this run is not for: of other "
            "cells, it is not known what the observer has seen"
        )

    def _whose(self) -> str:
        if not self.works:
            return ""
        work = self.works[0]
        cell = CellAddress(work.watched.table_id, work.row, work.column)
        return f", observer {work.watched.observer.name!r} for {self._env.described(cell)}"


def new_worker(
    engine: Engine, observers: Sequence[Observer], limits: WorkerLimits | None, drain_seconds: float
) -> Worker:
    """A worker that has not been started."""
    return Worker(worker_context(engine), observers, limits, drain_seconds=drain_seconds)


def worker_context(
    engine: Engine, begin: Callable[[Work | None], RunTransaction] | None = None
) -> WorkerContext:
    """The parts of the engine that observers use."""

    def new_transaction(work: Work | None) -> ObserverTransaction:
        return ObserverTransaction(engine, work)

    return WorkerContext(
        world=engine.world,
        env=engine.env,
        cleanup=engine.cleanup,
        catalog=engine.catalog,
        notifications=_notifications(engine),
        locks=engine.locks,
        begin=begin or new_transaction,
        blocking=BlockingCalls(engine.loop, engine.thread_ident),
        running_observers=engine.activity.running_observers,
        tablet_of=engine.tablet_of,
    )


def _notifications(engine: Engine) -> Notifications:
    """How work is found in the engine's store."""
    if engine.intents is not None:
        return IntentNotifications(engine.world, engine.env, engine.cleanup, engine.intents)
    return TabletNotifications(
        TabletContext(engine.world, engine.env, engine.cleanup, engine.catalog, engine.tablets)
    )


async def stop_all(workers: Sequence[Worker], drain_seconds: float) -> float:
    """Stops workers, all at the same time. Returns how much of the time is left."""
    require_drain_seconds(drain_seconds)
    now = asyncio.get_running_loop().time
    until = now() + drain_seconds
    await asyncio.gather(*(worker.stop(drain_seconds=drain_seconds) for worker in workers))
    return max(until - now(), 0.0)
