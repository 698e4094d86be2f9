"""The transaction of an observer's run: it also knows how long it has waited for the cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from percolator.aio.engine import Engine
from percolator.aio.transaction import Transaction
from percolator.errors import CellAddress
from percolator.observers.run_time import ClusterWaits
from percolator.observers.work import Work
from percolator.schema import Row


class ObserverTransaction(Transaction):
    """Like any transaction, for the observer. Each of its calls is timed."""

    def __init__(self, engine: Engine, work: Work | None = None) -> None:
        super().__init__(engine, None)
        self._work = work
        self.waits = self._waits = ClusterWaits(engine.now, engine.limits.silence_seconds)

    async def scan_pages(
        self,
        *arguments: Any,  # noqa: ANN401 - passed on unseen: the base class's signature checks them
        **keywords: Any,  # noqa: ANN401 - passed on unseen
    ) -> AsyncGenerator[list[Row[Any]], None]:
        pages = super().scan_pages(*arguments, **keywords)
        async with aclosing(pages):
            while True:
                with self.waits.call():
                    page = await anext(pages, None)
                if page is None:
                    return
                yield page

    def _whose(self) -> str:
        if (work := self._work) is None:
            return ""
        cell = CellAddress(work.watched.table_id, work.row, work.column)
        return f", observer {work.watched.observer.name!r} for {self._env.described(cell)}"
