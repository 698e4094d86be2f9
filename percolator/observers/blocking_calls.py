"""Calls blocking observers, in the threads in which they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from percolator.observers.definition import BlockingTransactions, Observer


class BlockingCalls:
    """Calls observers with transactions of one event loop. May be used in any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread_ident: int | None) -> None:
        self._loop = loop
        self._thread_ident = thread_ident
        self._wrappers: dict[BlockingTransactions, Callable[[Any], Any]] = {}
        """Kept for reuse, because threads that share a wrapper are woken together."""

    def call(self, observer: Observer, transaction: object, arguments: list[object]) -> None:
        """Calls the observer's function with the transaction, wrapped in the blocking API."""
        make = observer.blocking_transactions
        wrap = self._wrappers.get(make)
        if wrap is None:  # two threads may make one at the same time: the first is kept
            wrap = self._wrappers.setdefault(make, make(self._loop, self._thread_ident))
        observer.call_blocking(wrap(transaction), *arguments)
