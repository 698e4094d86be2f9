"""The durable mark: a value of the role "oracle", which only the leading oracle can write.

Invariants:
- `write` returns only when the mark is durable and this oracle still led afterwards.
- The mark is read from the directory that this leader has taken over, where the leader before can
  no longer write. Otherwise that one could raise the mark after it was read, and hand out
  timestamps that this one hands out again.
- A mark that cannot be read, or is missing where there was one, is never replaced by a guess.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Self

from percolator.errors import InvariantViolation, StoreFault, StoreUnusable, WrongCluster
from percolator.services.chassis.coordinator.interface import Leadership
from percolator.services.oracle.mark import Mark

ROLE = "oracle"
MARK = "mark"
SERVED = "served"
"""Written once, after the first mark of a store. From then on a missing mark is a loss."""


class Ledger:
    """The mark as the leading oracle keeps it. Made by `open`."""

    def __init__(self, leadership: Leadership, mark: Mark, *, has_served: bool) -> None:
        self._leadership = leadership
        self._mark = mark
        self._has_served = has_served
        self._writing = asyncio.Lock()
        """Each write keeps what the one before has written."""

    @classmethod
    async def open(cls, leadership: Leadership, *, cluster_id: str) -> Self:
        """Reads what the previous leader left. Only the leader may call it."""
        has_served = await leadership.get(SERVED) is not None
        mark = await _read(leadership, cluster_id)
        if mark is None and has_served:
            raise StoreUnusable(
                f"the value {MARK!r} of the role {ROLE!r} is missing, though an oracle has served "
                "from it; see docs/formats.md",
                fault=StoreFault.DAMAGED,
            )
        return cls(leadership, mark or Mark(0, cluster_id), has_served=has_served)

    @property
    def mark_milliseconds(self) -> int:
        """Above the physical part of every timestamp ever handed out. 0 at first."""
        return self._mark.milliseconds

    async def is_still_ours(self) -> bool:
        """Whether no later oracle had read the mark when this was called: one `stat`, which all
        share who ask at the same time."""
        return await self._leadership.stands()

    async def write(self, milliseconds: int) -> None:
        """Returns when the mark is durable. Raises `NotReady` if another oracle leads by now.

        After `StoreUnusable` a successor may find this mark or the previous one. Writing a higher
        one next is right in both cases.
        """
        if milliseconds < self._mark.milliseconds:
            raise InvariantViolation(
                f"the mark would go back from {self._mark.milliseconds} to {milliseconds} ms"
            )
        async with self._writing:
            await self._put(replace(self._mark, milliseconds=milliseconds))
        if not self._has_served:
            await self._leadership.put(SERVED, b"")
            self._has_served = True

    @property
    def epoch(self) -> int:
        """The catalogue's epoch, as far as it is durable."""
        return self._mark.epoch

    async def advance_epoch(self, epoch: int) -> None:
        """Returns when an epoch at least as high is durable. Raises as `write`."""
        async with self._writing:
            if epoch > self._mark.epoch:
                await self._put(replace(self._mark, epoch=epoch))

    async def _put(self, mark: Mark) -> None:
        await self._leadership.put(MARK, mark.encode())
        self._mark = mark


async def _read(leadership: Leadership, cluster_id: str) -> Mark | None:
    """None if no oracle has ever served from this store."""
    data = await leadership.get(MARK)
    if data is None:
        return None
    mark = Mark.decode(data, f"the value {MARK!r} of the role {ROLE!r}")
    if cluster_id and mark.cluster_id and mark.cluster_id != cluster_id:
        raise WrongCluster(
            f"the oracle's mark belongs to cluster {mark.cluster_id}, not to {cluster_id}",
            expected=cluster_id,
            found=mark.cluster_id,
        )
    return replace(mark, cluster_id=mark.cluster_id or cluster_id)
