"""A snapshot, for programs without asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, TypeVar, overload

from percolator import aio
from percolator.aio.reader import Columns
from percolator.arguments import listed, listed_cells, require_table
from percolator.blocking.loop_thread import LoopCalls
from percolator.errors import not_picklable
from percolator.protocol.environment import Statistics
from percolator.schema import Readable, Row, Table
from percolator.timestamps import Timestamp

T = TypeVar("T")
D = TypeVar("D")
K = TypeVar("K")
R = TypeVar("R")


class BlockingReads:
    """The reads of `Snapshot` and `Transaction`: each is a call to the event loop's thread."""

    def __init__(self, loop_thread: LoopCalls, reading: aio.Snapshot | aio.Transaction) -> None:
        self._loop_thread = loop_thread
        self._reading = reading

    def __reduce__(self) -> NoReturn:
        raise not_picklable("a snapshot or transaction")

    @property
    def statistics(self) -> Statistics:
        """The cost so far: round trips, retries, and the locks waited for, with their owners."""
        return self._reading.statistics

    @overload
    def get(self, row: K, column: Readable[T, K], *, timeout: float | None = None) -> T | None: ...
    @overload
    def get(
        self, row: K, column: Readable[T, K], default: D, *, timeout: float | None = None
    ) -> T | D: ...
    def get(
        self, row: K, column: Readable[T, K], default: Any = None, *, timeout: float | None = None
    ) -> Any:
        """The value of one cell, or `default` if it has none.

        >>> tx.get("bob", balance, default=0)
        """
        self._check()
        call = partial(self._reading.get, row, column, default, timeout=timeout)
        return self._loop_thread.call(call)

    @overload
    def get_many(
        self, table: Iterable[tuple[object, Readable[T]]], /, *, timeout: float | None = None
    ) -> list[T | None]: ...
    @overload
    def get_many(
        self, table: Iterable[tuple[object, Readable[Any]]], /, *, timeout: float | None = None
    ) -> list[Any]: ...
    @overload
    def get_many(
        self,
        table: Table[K],
        rows: Iterable[K],
        columns: Columns | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Row[K]]: ...
    def get_many(
        self,
        table: Table[Any] | Iterable[tuple[object, Readable[Any]]],
        rows: Iterable[Any] | None = None,
        columns: Columns | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Reads many rows of a table in one round trip: one `Row` for each key, in the same order.

        Without `columns`, it reads all columns; a row that does not exist is empty, and false. With
        an empty list, it reads none, and all rows are empty. Given pairs of a row and a column
        instead, of any tables, it returns their values, in the same order; None if there is none.

        >>> bob, joe = tx.get_many(accounts, ["bob", "joe"], [balance])
        >>> left, state = tx.get_many([("bob", balance), (17, order_state)])
        """
        self._check()
        most = self._reading._reader.cells_max
        # Consumed in this thread: a generator may call the database itself.
        if rows is None and columns is None and not isinstance(table, Table):
            cells = listed_cells(table, most)
            return self._loop_thread.call(partial(self._reading.get_many, cells, timeout=timeout))
        require_table(table)
        keys = listed(rows, "rows", most)
        call = partial(self._reading.get_many, table, keys, columns, timeout=timeout)
        return self._loop_thread.call(call)

    def scan(
        self,
        table: Table[K],
        *,
        start: K | None = None,
        end: K | None = None,
        prefix: K | None = None,
        columns: Columns | None = None,
        reverse: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[Row[K]]:
        """Yields the rows from `start` (inclusive) to `end` (exclusive), in order or in reverse.

        With a `prefix`, only rows whose keys begin with it: `start` says where to continue in them.
        The time-out applies to each page. Rows without a value in `columns` are left out.

        >>> for row in snapshot.scan(accounts, prefix="b", columns=[balance]):
        ...     print(row.key, row[balance])
        """
        self._check()
        pages = self._reading.scan_pages(
            table,
            start=start,
            end=end,
            prefix=prefix,
            columns=columns,
            reverse=reverse,
            limit=limit,
            timeout=timeout,
        )

        found = self._loop_thread.iterate(pages, ahead=self._prefetches, check=self._check)
        with closing(found):
            for page in found:
                for row in page:
                    # Rows that were read ahead must not be used after the end.
                    self._reading.require_not_ended()
                    yield row

    def timestamp(self) -> Timestamp:
        """The timestamp at which it reads. It is fetched now if nothing was read yet."""
        self._check()
        return self._loop_thread.call(self._reading.timestamp)

    def call_inside(
        self,
        body: Callable[..., Awaitable[R]],
        *arguments: Any,  # noqa: ANN401 - the body's
        **keywords: Any,  # noqa: ANN401 - the body's
    ) -> R:
        """Runs a coroutine function with the asynchronous namesake of this, in one trip to the
        loop. For other parts of the library: the body must not block."""
        self._check()
        return self._loop_thread.call(partial(body, self._reading, *arguments, **keywords))

    def _check(self) -> None:
        """Checks a call before it is made: some never reach the event loop and its checks."""
        self._loop_thread.require_usable()
        self._reading.require_not_ended()

    def _prefetches(self) -> bool:
        """Whether the next page of a scan is fetched while this one is used."""
        return True


class Snapshot(BlockingReads):
    """Shows the store as it was at one timestamp, whatever is written meanwhile: that of its first
    read, or the one it was given. Entering the block reads nothing; `timestamp` counts as a read.

    >>> with db.snapshot() as snapshot:
    ...     print(snapshot.get("bob", balance))
    """

    def __init__(self, loop_thread: LoopCalls, snapshot: aio.Snapshot) -> None:
        super().__init__(loop_thread, snapshot)
        self._snapshot = snapshot

    def close(self) -> None:
        """Ends the snapshot: from now on, the history that it needed may be collected."""
        self._loop_thread.call(self._snapshot.close)

    def __enter__(self) -> Snapshot:
        self._check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
