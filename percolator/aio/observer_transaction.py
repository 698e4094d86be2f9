"""The transaction of an observer's run: it also knows how long it has waited for the cluster, and
which of its calls the observer has not awaited.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from percolator.aio.engine import Engine
from percolator.aio.transaction import Transaction
from percolator.errors import CellAddress, UsageError
from percolator.observers.run_time import ClusterWaits
from percolator.observers.work import Work
from percolator.schema import Column, Row
from percolator.timestamps import Timestamp

R = TypeVar("R")

Call = Coroutine[Any, Any, R]


class ObserverTransaction(Transaction):
    """Like any transaction, for the observer. Each of its calls is timed, and must be awaited.

    A call without `await` only makes a coroutine. If the run committed nevertheless, the change
    would count as handled, and what the observer meant to write would be lost.
    """

    def __init__(self, engine: Engine, work: Work | None = None) -> None:
        super().__init__(engine, None)
        self._work = work
        self.waits = ClusterWaits(engine.now, engine.limits.silence_seconds)
        self._not_awaited: dict[object, tuple[str, Call[Any]]] = {}
        """The calls that were made and have not begun, with the names of their methods."""

    async def timestamp(self) -> Timestamp:
        with self.waits.call():
            return await super().timestamp()

    # Passed on unseen: the base class's signatures and overloads check them.

    def get(self, *arguments: Any, **keywords: Any) -> Call[Any]:  # noqa: ANN401 - see above
        return self._made("get", super().get, *arguments, **keywords)

    def get_many(self, *arguments: Any, **keywords: Any) -> Call[Any]:  # noqa: ANN401 - see above
        return self._made("get_many", super().get_many, *arguments, **keywords)

    async def scan_pages(
        self,
        *arguments: Any,  # noqa: ANN401 - passed on unseen
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

    def set(self, row: object, column: Any, value: Any = ...) -> Call[None]:  # noqa: ANN401 - see above
        return self._made("set", super().set, row, column, value)

    def increment(self, *arguments: Any, **keywords: Any) -> Call[int]:  # noqa: ANN401 - see above
        return self._made("increment", super().increment, *arguments, **keywords)

    def delete(self, row: object, column: Column[Any]) -> Call[None]:
        return self._made("delete", super().delete, row, column)

    def delete_row(self, *arguments: Any, **keywords: Any) -> Call[None]:  # noqa: ANN401 - see above
        return self._made("delete_row", super().delete_row, *arguments, **keywords)

    def lock(self, row: object, column: Column[Any], *, shared: bool = False) -> Call[None]:
        return self._made("lock", super().lock, row, column, shared=shared)

    def notify(self, row: object, column: Column[Any]) -> Call[None]:
        return self._made("notify", super().notify, row, column)

    async def _write_together(
        self,
        puts: Sequence[tuple[object, Column[Any], Any]],
        deletes: Sequence[tuple[object, Column[Any]]],
    ) -> None:
        with self.waits.call():
            await super()._write_together(puts, deletes)

    async def commit(self, *, timeout: float | None = None) -> Timestamp | None:
        if self._not_awaited:
            name, _ = next(iter(self._not_awaited.values()))
            self.rollback()
            raise UsageError(
                f"the observer has called tx.{name} without await, so it has done nothing: "
                f"write await tx.{name}(...)"
            )
        with self.waits.call():
            return await super().commit(timeout=timeout)

    def rollback(self) -> None:
        # Closed, they are not reported once more, as coroutines that were never awaited.
        for _, call in self._not_awaited.values():
            call.close()
        self._not_awaited.clear()
        super().rollback()

    def _whose(self) -> str:
        if (work := self._work) is None:
            return ""
        cell = CellAddress(work.watched.table_id, work.row, work.column)
        return f", observer {work.watched.observer.name!r} for {self._env.described(cell)}"

    # ------------------------------------------------------------------ calls

    def _made(
        self,
        name: str,
        method: Callable[..., Call[R]],
        *arguments: Any,  # noqa: ANN401 - the method's
        **keywords: Any,  # noqa: ANN401 - the method's
    ) -> Call[R]:
        me = object()
        call = self._timed(me, method, arguments, keywords)
        self._not_awaited[me] = name, call
        return call

    async def _timed(
        self,
        me: object,
        method: Callable[..., Call[R]],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> R:
        del self._not_awaited[me]
        with self.waits.call():
            return await method(*arguments, **keywords)
