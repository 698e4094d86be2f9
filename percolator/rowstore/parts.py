"""Scans for those who walk over a range part by part, and need each part before the next.

A call may end, at its time-out, before it has found anything: in a long stretch of the table,
nothing may be selected. A store says now and then how far it has come. So a part ends where its
call broke off, and the next one goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple

from percolator.errors import PercolatorError, Retry
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import RowStore, Selection, StoredRow


class Part(NamedTuple):
    """The first part of a range."""

    rows: list[StoredRow]
    rest: bytes
    """The key from which on there may be more; empty if there is not."""


async def scanned_part(
    store: RowStore,
    table_id: int,
    first: bytes,
    end: bytes,
    selections: Sequence[Selection],
    rows_max: int,
    patience: Patience,
) -> Part:
    """At most so many of the rows with first <= key < end (empty: to the last) in which something
    is selected, in order; perhaps none, although there are more behind."""
    while True:
        rows: list[StoredRow] = []
        rest = first
        stream = store.scan(
            table_id,
            first,
            end,
            selections,
            rows_max=rows_max,
            reverse=False,
            timeout_seconds=patience.attempt_seconds,
            marks=True,
        )
        try:
            async with aclosing(stream) as found:
                async for row in found:
                    if row.cells:
                        rows.append(row)
                        rest = row.key + b"\0"
                    else:
                        rest = row.key
        except PercolatorError as error:
            if rest <= first or error.retry is Retry.USELESS:
                await patience.outlast(error, is_read=True)
                continue
            await patience.keep_pause(error.retry_after_seconds)
            return Part(rows, rest)
        return Part(rows, rest if len(rows) == rows_max else b"")
