"""Rivals: other clients whose transactions have won recently, and the cells where they did.

Lines (hot_cells.py) exist within one client. Between clients there are only pauses, and with pauses
after conflicts alone, winners go on winning: a client that has just committed retries at once,
while all others pause longer and longer. With fifty clients on two cells, the unluckiest waited
hundreds of times as long as most. So there are two rules:

- The older a transaction, the shorter its pauses: half as long after four seconds.
- A caller that has paused at a cell pauses there before its next transaction, too, up to as long.
  It forgets half of that in two seconds, so that nothing is left soon after the others have gone.
"""

from __future__ import annotations

from collections import OrderedDict

from percolator.errors import CellAddress
from percolator.world import Random

HALF_AGE_SECONDS = 4.0
"""The age at which pauses are half as long. With one second, waits differ less, but when fifty
clients keep the machine busy, they need more attempts and commit a third less."""
HALF_LIFE_SECONDS = 2.0
"""The time in which half of a pause is forgotten."""
PAUSE_SECONDS_MIN = 0.001
"""A shorter pause is none."""
CELLS_MAX = 1_024


def conflict_pause_seconds(randomness: Random, longest_seconds: float, age_seconds: float) -> float:
    """A pause of a transaction of this age. All of it is random: two that have lost at the same
    moment would meet again otherwise."""
    return longest_seconds * randomness.random() / (1.0 + age_seconds / HALF_AGE_SECONDS)


class _Contention:
    """What is known about one cell."""

    __slots__ = ("callers", "seconds", "since")

    def __init__(self) -> None:
        self.callers: set[object] = set()
        """What has lost: functions, observers."""
        self.seconds = 0.0
        """The longest pause, as of `since`."""
        self.since = 0.0

    def seconds_at(self, now: float) -> float:
        return float(self.seconds * 0.5 ** ((now - self.since) / HALF_LIFE_SECONDS))


class Rivals:
    """Where transactions of other clients have won recently. Times are monotonic."""

    def __init__(self) -> None:
        self._contended: OrderedDict[CellAddress, _Contention] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contended)

    def __contains__(self, cell: CellAddress) -> bool:
        return cell in self._contended

    def note_loss(
        self, cell: CellAddress, caller: object, longest_seconds: float, now: float
    ) -> None:
        """Notes that this caller has lost at the cell, and pauses for `longest_seconds` at most."""
        contention = self._contended.get(cell)
        if contention is None:
            contention = self._contended[cell] = _Contention()
            if len(self._contended) > CELLS_MAX:
                self._contended.popitem(last=False)
        self._contended.move_to_end(cell)
        contention.callers.add(caller)
        contention.seconds = max(contention.seconds_at(now), longest_seconds)
        contention.since = now

    def longest_seconds(self, cell: CellAddress, caller: object, now: float) -> float:
        """The longest pause of a new transaction that reads the cell; 0.0 for none.

        A caller that has never lost there does not write the cell, and needs none.
        """
        contention = self._contended.get(cell)
        if contention is None:
            return 0.0
        seconds = contention.seconds_at(now)
        if seconds < PAUSE_SECONDS_MIN:
            del self._contended[cell]
            return 0.0
        return seconds if caller in contention.callers else 0.0
