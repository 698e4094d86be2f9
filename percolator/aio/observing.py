"""A worker on the connection of a database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from percolator.aio.engine import Engine
from percolator.aio.transaction import Transaction
from percolator.loop_thread import LoopCalls
from percolator.observers.client import Client, RunTransaction
from percolator.observers.definition import Observer
from percolator.observers.work import Work
from percolator.observers.worker import Worker, WorkerLimits


def new_worker(
    engine: Engine, observers: Sequence[Observer], limits: WorkerLimits | None, drain_seconds: float
) -> Worker:
    """One that was not started yet."""
    return Worker(observers_client(engine), observers, limits, drain_seconds=drain_seconds)


def observers_client(
    engine: Engine, begin: Callable[[Work | None], RunTransaction] | None = None
) -> Client:
    """The engine, as observers use it."""

    def new_transaction(work: Work | None) -> Transaction:
        return Transaction(engine, None)

    return Client(
        world=engine.world,
        around=engine.around,
        cleanup=engine.cleanup,
        catalog=engine.catalog,
        tablets=engine.tablets,
        locks=engine.locks,
        begin=begin or new_transaction,
        as_blocking=_Blocking(engine),
    )


class _Blocking:
    """Transactions as blocking observers see them."""

    def __init__(self, engine: Engine) -> None:
        self._calls = LoopCalls(engine.loop, engine.thread_ident)

    def __call__(self, transaction: Any) -> Any:  # noqa: ANN401 - of the layer above
        # Here, since most workers have no blocking observers, and that layer stands on this one.
        from percolator.transaction import Transaction as BlockingTransaction

        return BlockingTransaction(self._calls, transaction)
