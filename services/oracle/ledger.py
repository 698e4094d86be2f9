"""The durable mark: a value of the role "oracle", which only the oracle that leads can write.

Invariants:
- `write` returns only when the mark is durable and this oracle still led afterwards.
- The mark is read from the directory that this leader took over: whoever led before can write no
  more, so that nothing is handed out below a mark that was read too early.
- A mark that cannot be read, or is missing where one was, is never replaced by a guess.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from percolator.errors import InvariantViolation, StoreFault, StoreUnusable, WrongCluster
from services.chassis.coordinator.interface import Leadership
from services.chassis.files import Files
from services.oracle import former_store
from services.oracle.mark import Mark

ROLE = "oracle"
MARK = "mark"
SERVED = "served"
"""Written once, after the first mark of a store: from then on a missing mark is a loss."""


class Ledger:
    """The mark, as the leading oracle keeps it. Made by `open`."""

    def __init__(self, leadership: Leadership, mark: Mark, *, has_served: bool) -> None:
        self._leadership = leadership
        self._mark = mark
        self._has_served = has_served

    @classmethod
    async def open(
        cls, leadership: Leadership, files: Files, store: Path, *, cluster_id: str
    ) -> Self:
        """What the leader before left; for the leader alone."""
        has_served = await leadership.get(SERVED) is not None
        mark = await _read(leadership, cluster_id)
        if mark is None and has_served:
            raise StoreUnusable(
                f"the value {MARK!r} of the role {ROLE!r} is missing, though an oracle has served "
                "from it; see docs/formats.md",
                fault=StoreFault.DAMAGED,
            )
        ledger = cls(leadership, mark or Mark(0, cluster_id), has_served=has_served)
        async with former_store.adopted(files, store) as former:
            if former is not None:
                _refuse_other_cluster(former, cluster_id)
                await ledger.write(max(former.milliseconds, ledger.mark_milliseconds))
        return ledger

    @property
    def mark_milliseconds(self) -> int:
        """Above the physical part of every timestamp that was ever handed out. 0 at first."""
        return self._mark.milliseconds

    def is_still_ours(self) -> bool:
        """Whether no later oracle had read the mark when this was asked: one `stat`."""
        return self._leadership.stands()

    async def write(self, milliseconds: int) -> None:
        """Returns when the mark is durable; `NotReady` when another oracle leads by now.

        `StoreUnusable` means that a successor may find this mark or the one before: a higher one,
        to be written next, is right in both cases.
        """
        if milliseconds < self._mark.milliseconds:
            raise InvariantViolation(
                f"the mark would go back from {self._mark.milliseconds} to {milliseconds} ms"
            )
        mark = Mark(milliseconds, self._mark.cluster_id)
        await self._leadership.put(MARK, mark.encode())
        self._mark = mark
        if not self._has_served:
            await self._leadership.put(SERVED, b"")
            self._has_served = True


async def _read(leadership: Leadership, cluster_id: str) -> Mark | None:
    """None where no oracle has ever served."""
    data = await leadership.get(MARK)
    if data is None:
        return None
    mark = Mark.decode(data, f"the value {MARK!r} of the role {ROLE!r}")
    _refuse_other_cluster(mark, cluster_id)
    return Mark(mark.milliseconds, mark.cluster_id or cluster_id)


def _refuse_other_cluster(mark: Mark, cluster_id: str) -> None:
    if cluster_id and mark.cluster_id and mark.cluster_id != cluster_id:
        raise WrongCluster(
            f"the oracle's mark belongs to cluster {mark.cluster_id}, not to {cluster_id}",
            expected=cluster_id,
            found=mark.cluster_id,
        )
