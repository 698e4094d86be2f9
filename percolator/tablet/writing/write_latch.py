"""The right to write to a tablet: for a batch of the group commit, or between two batches.

There are two ways to write between two batches:

* `async with latch.between_batches()`: no batch is in progress, and what was judged in one is
  durable and answered. Transactions may hold cells (held_cells.py), and go on to take cells. This
  is enough for writes that no transaction in memory can meet: those behind the fence of a bulk
  load (bulk_load.py).
* `async with latch`: no cell is held, either. It is for what changes the rules under which
  transactions are judged (a version of the schema, a fence, a safe point), or what they are judged
  by. A transaction judged before the change would be written after it.

Nobody starves. What each rule prevents:

* While somebody waits for all cells to be let go, no more are held. Otherwise a steady stream of
  transactions would keep a load, a split or a new schema out forever.
* When one of them has finished, the transactions that have waited are judged and hold their cells
  before the next one has its turn. Otherwise writers that overlap, such as the parts of shared
  transactions beside a collection, would keep all transactions of the tablet out until the last of
  them has finished.
* Of those that write between two batches, one at a time waits for `writing`, so a batch comes
  between two of them. Otherwise each batch would wait for all loaders of the tablet in turn, and
  four of them would leave commits a quarter of what one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from types import TracebackType

from percolator.tablet.memory.held_cells import HeldCells

_LATELY_SECONDS = 1.0


class WriteLatch:
    """See the module's docstring."""

    def __init__(self, held: HeldCells, admit_waiting: Callable[[], None]) -> None:
        """`admit_waiting` judges the transactions that wait, and have them hold their cells."""
        self._held = held
        self._admit_waiting = admit_waiting
        self._wanted = 0
        self._last_batch = -inf
        self._turn = asyncio.Lock()
        """Held by the one of those that need all cells to be let go that has its turn."""
        self.between = asyncio.Lock()
        """Held by the one of those that write between two batches that has its turn. With more than
        one write to do, it holds this throughout, and `writing` for each of them."""
        self.writing = asyncio.Lock()
        """Held by a batch from judging to answering, and by every other write: only one is in
        flight at a time."""

    def note_batch(self) -> None:
        """Called at the end of each batch."""
        self._last_batch = asyncio.get_running_loop().time()

    @property
    def has_batches(self) -> bool:
        """True if there was a batch lately, so that another one may wait soon."""
        return asyncio.get_running_loop().time() - self._last_batch < _LATELY_SECONDS

    @property
    def is_wanted(self) -> bool:
        """True while transactions have to wait before they hold cells."""
        return self._wanted > 0

    @asynccontextmanager
    async def between_batches(self) -> AsyncIterator[None]:
        async with self.between, self.writing:
            yield

    async def __aenter__(self) -> None:
        self._wanted += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self._wanted -= 1
            if not self._wanted:
                self._admit_waiting()
            raise
        try:
            await self._held.none_left()
            await self.writing.acquire()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.writing.release()
        self._leave()

    def _leave(self) -> None:
        self._wanted -= 1
        try:
            self._admit_waiting()
        finally:
            self._turn.release()
