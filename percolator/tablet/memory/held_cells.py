"""Cells that transactions hold in memory while they commit in one round.

Such a transaction sets no locks. From the moment its cells are judged until its records are durable
and published, everything else that touches the cells waits here. What each rule prevents:

* Mutations of a held cell wait. Otherwise a rollback marker would be put and reported, and the
  commit would still be written.
* Reads at or above the start timestamp wait. The commit timestamp may be below theirs, and there is
  no lock to report. Once it is known to be above a read, that read goes on: it must not see it.
  The same holds for scans of changes up to a timestamp, which never come back to what they missed.
* The cells are held *before* the commit timestamp is fetched. So every timestamp that was handed
  out before is below the commit, and a read that came before has seen what it had to see.
* They are let go only after the batch was published. The storage shows a batch before its writer
  hears of it, and memory knows of it only after that.

A waiter is woken only by the transactions in its way, and its total wait is limited. Otherwise, on
busy cells it would be woken for nothing and never time out.

A server that dies loses what is held, and nothing else: the batch is in the log, or it never was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from percolator.errors import NotReady
from percolator.tablet import keys
from percolator.tablet.memory.ordered_keys import OrderedKeys

WAIT_SECONDS_MAX = 5.0
"""How long a read waits. A commit waits about a second for the oracle, and then for the disk."""
_RETRY_SECONDS = 0.1


class Holder(Protocol):
    """A transaction that holds cells."""

    @property
    def start(self) -> int: ...

    @property
    def commit(self) -> int:
        """Its commit timestamp; 0 while it is not known."""
        ...

    @property
    def cells(self) -> Sequence[bytes]:
        """`keys.cell_prefix` of each."""
        ...


class HeldCells:
    """The held cells of one tablet."""

    def __init__(self) -> None:
        self.holders: dict[bytes, Holder] = {}
        """By cell. Public for lookups on the hottest paths."""
        self._ordered = OrderedKeys()
        """The same cells."""
        self._changes: dict[Holder, asyncio.Future[None]] = {}
        """The next change of each holder that something waits for."""
        self._emptied: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self.holders)

    def hold(self, holder: Holder) -> None:
        for cell in holder.cells:
            self.holders[cell] = holder
            self._ordered.add(cell)

    def let_go(self, holders: Collection[Holder]) -> None:
        for holder in holders:
            for cell in holder.cells:
                del self.holders[cell]
                self._ordered.remove(cell)
        self.changed(holders)
        if self._emptied is not None and not self.holders:
            self._emptied.set_result(None)
            self._emptied = None

    def changed(self, holders: Iterable[Holder]) -> None:
        """Wakes what waits for them: their commit timestamps are known, or they have let go."""
        if not self._changes:
            return
        for holder in holders:
            change = self._changes.pop(holder, None)
            if change is not None:
                change.set_result(None)

    def in_the_way(self, cell: bytes, timestamp: int) -> Holder | None:
        """The transaction that may be about to commit on the cell at or below this timestamp."""
        holder = self.holders.get(cell)
        return holder if holder is not None and _is_in_the_way(holder, timestamp) else None

    def in_the_way_in_rows(self, start: bytes, end: bytes, timestamp: int) -> list[Holder]:
        """The same for the rows in [start, end), each once; an empty end means to the last row.
        Read locks change nothing that could be read."""
        found = dict.fromkeys(
            self.holders[cell]
            for cell in self._ordered.between(*keys.cell_bounds(start, end))
            if keys.locked_cell(cell) is None
        )
        return [holder for holder in found if _is_in_the_way(holder, timestamp)]

    async def let_pass(self, in_the_way: Callable[[], Collection[Holder]]) -> None:
        """Returns once this finds nothing, without an await after its last look. Raises `NotReady`
        if that takes too long in total."""
        deadline: float | None = None
        while self.holders and (holders := in_the_way()):
            loop = asyncio.get_running_loop()
            if deadline is None:
                deadline = loop.time() + WAIT_SECONDS_MAX
            changes = [self._change_of(holder) for holder in holders]
            # Not awaited directly: a caller that is cancelled must not take the others with it.
            _, pending = await asyncio.wait(changes, timeout=deadline - loop.time())
            if pending:
                raise NotReady(
                    "a commit of these cells is taking long: the oracle or the disk is slow",
                    retry_after_seconds=_RETRY_SECONDS,
                )

    async def none_left(self) -> None:
        """Returns when no cell is held."""
        while self.holders:
            if self._emptied is None:
                self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._emptied,))

    def _change_of(self, holder: Holder) -> asyncio.Future[None]:
        change = self._changes.get(holder)
        if change is None:
            change = self._changes[holder] = asyncio.get_running_loop().create_future()
        return change


def _is_in_the_way(holder: Holder, timestamp: int) -> bool:
    return holder.start <= timestamp and holder.commit <= timestamp
