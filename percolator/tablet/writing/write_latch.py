"""Who may write to a tablet: a batch of the group commit, or what writes between two batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from percolator.tablet.memory.held_cells import HeldCells


class WriteLatch:
    """`async with latch`: no batch is in progress, no cell held, and what was judged is answered.

    While it is held or waited for, no further transaction may hold cells: it would have been judged
    under what is about to change (a version of the schema, a fence, a safe point), and be written
    after the change. Batches take only `writing`: cells may be held while they write.
    """

    def __init__(self, held: HeldCells, free_again: Callable[[], None]) -> None:
        """`free_again` is called when transactions may hold cells again."""
        self._held = held
        self._free_again = free_again
        self._wanted = 0
        self.writing = asyncio.Lock()
        """Held by a batch from judging to answering, and by every other write: only one is in
        flight at a time."""

    @property
    def is_wanted(self) -> bool:
        return self._wanted > 0

    async def __aenter__(self) -> None:
        self._wanted += 1
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
        if not self._wanted:
            self._free_again()
