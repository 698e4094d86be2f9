"""A snapshot, for programs without asyncio."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, overload

from percolator import aio
from percolator.aio.reading import Columns, Reading
from percolator.arguments import listed
from percolator.loop_thread import LoopCalls
from percolator.protocol.surroundings import Statistics
from percolator.schema import Readable, Row, Table
from percolator.timestamps import Timestamp

T = TypeVar("T")
D = TypeVar("D")
K = TypeVar("K")


class BlockingReads:
    """The reads of `Snapshot` and `Transaction`: each is a call to the event loop's thread."""

    def __init__(self, loop_thread: LoopCalls, reading: Reading) -> None:
        self._loop_thread = loop_thread
        self._reading = reading

    @property
    def statistics(self) -> Statistics:
        """What it has cost so far: round trips, retries, locks waited for and whose."""
        return self._reading.statistics

    @overload
    def get(
        self, row: object, column: Readable[T], *, timeout: float | None = None
    ) -> T | None: ...
    @overload
    def get(
        self, row: object, column: Readable[T], default: D, *, timeout: float | None = None
    ) -> T | D: ...
    def get(
        self, row: object, column: Readable[T], default: Any = None, *, timeout: float | None = None
    ) -> Any:
        """The value of one cell, or `default` when it has none.

        >>> tx.get("bob", balance, default=0)
        """
        self._check()
        call = partial(self._reading.get, row, column, default, timeout=timeout)
        return self._loop_thread.call(call)

    def get_many(
        self,
        table: Table[K],
        rows: Iterable[K],
        columns: Columns | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Row[K]]:
        """Many rows of a table in one round trip: one `Row` for each that was asked for, in order.

        Without `columns`, all columns. A row that does not exist is empty, and false.

        >>> bob, joe = tx.get_many(accounts, ["bob", "joe"], [balance])
        """
        self._check()
        # Here: a generator may call the database itself.
        keys = listed(rows, "rows", self._reading._cells_max)
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
        """The rows of a range in order (or against it), those from `start` to before `end`.

        The time-out is that of each page. Rows without a value in `columns` are left out.

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
                    # What was read ahead must not outlive what it was read in.
                    self._reading.require_not_ended()
                    yield row

    def timestamp(self) -> Timestamp:
        """The timestamp at which it reads; fetched now, if nothing was read yet."""
        self._check()
        return self._loop_thread.call(self._reading.timestamp)

    def _check(self) -> None:
        """Before each call: what never reaches the event loop would not be checked there."""
        self._loop_thread.require_usable()
        self._reading.require_not_ended()

    def _prefetches(self) -> bool:
        """Whether the next page of a scan is fetched while this one is used."""
        return True


class Snapshot(BlockingReads):
    """Shows the store as it was at its timestamp, however much is written meanwhile.

    >>> with db.snapshot() as snapshot:
    ...     print(snapshot.get("bob", balance))
    """

    def __init__(self, loop_thread: LoopCalls, snapshot: aio.Snapshot) -> None:
        super().__init__(loop_thread, snapshot)
        self._snapshot = snapshot

    def close(self) -> None:
        """Lets go of history: from now on it may be collected."""
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
