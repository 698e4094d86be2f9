"""Scans for those who walk over whole tables: each answer has a limit of time, the scan has none.

A call may be lost, and so may any part of its answer. Whoever gives a whole scan one time-out has
to choose it so long that a lost message costs that long. Here a scan that is silent is begun again
where it was. But silence may also mean that nothing is selected in a long part of the table. A
store says then how far it has come, now and then; not every store does, and none does so often. So
the scan is more patient each time; and once it has come further, as patient as that has taught it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from percolator.errors import DeadlineExceeded, PercolatorError
from percolator.limits import Limits
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import RowStore, Selection, StoredRow
from percolator.world import World

_SILENCE_SECONDS_MAX: Final = 30.0
"""The longest time without progress. Also for how long errors are outlasted."""
_SCAN_SECONDS: Final = 3_600.0
"""The time-out of the call itself. It ends only what nobody waits for any more."""


async def steady_scan(
    store: RowStore,
    table_id: int,
    selections: Sequence[Selection],
    world: World,
    limits: Limits,
    *,
    first: bytes = b"",
    rows_max: int = 0,
) -> AsyncGenerator[StoredRow, None]:
    """As `RowStore.scan`, forwards and to the end of the table. Rows are read at different moments.
    Raises `DeadlineExceeded` if it makes no progress for too long."""
    clock, left = world.clock, rows_max
    silence, is_last_try = limits.silence_seconds, False

    def patient() -> Patience:
        return Patience(world, limits, clock.monotonic_seconds() + _SILENCE_SECONDS_MAX)

    patience = patient()
    while True:
        stream = store.scan(
            table_id,
            first,
            b"",
            selections,
            rows_max=left,
            reverse=False,
            timeout_seconds=_SCAN_SECONDS,
            marks=True,
        )
        try:
            async with aclosing(stream) as rows:
                asked = clock.monotonic_seconds()
                while (row := await _next(rows, first, silence)) is not None:
                    waited = clock.monotonic_seconds() - asked
                    if row.cells:
                        yield row
                        first, left = row.key + b"\0", max(left - 1, 0)
                        if rows_max and not left:
                            return
                    else:
                        first = row.key
                    silence = min(max(2 * waited, limits.silence_seconds), _SILENCE_SECONDS_MAX)
                    is_last_try, patience = False, patient()
                    asked = clock.monotonic_seconds()
                return
        except TimeoutError:
            if is_last_try:
                raise DeadlineExceeded(
                    f"a scan of table {table_id} has come no further than {first!r} for "
                    f"{silence:g} s"
                ) from None
            silence = min(2 * silence, _SILENCE_SECONDS_MAX)
            is_last_try, patience = silence == _SILENCE_SECONDS_MAX, patient()
        except PercolatorError as error:
            await patience.outlast(error, is_read=True)


async def _next(
    rows: AsyncGenerator[StoredRow, None], first: bytes, seconds: float
) -> StoredRow | None:
    """The next row, or the next mark behind `first`: one that says nothing new is no progress."""
    async with asyncio.timeout(seconds):
        async for row in rows:
            if row.cells or row.key > first:
                return row
    return None
