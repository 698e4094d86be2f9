"""Who may write: a batch of the group commit, or what writes between two batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from percolator.tablet.memory.held_cells import HeldCells


class Turn:
    """`async with turn`: no batch is in progress, no cell is held, and what was judged is answered.

    While anyone has it or waits for it, no further transaction may hold cells: it would have been
    judged under what is about to change (a version of the schema, a fence, a safe point), and land
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
