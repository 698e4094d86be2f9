"""Which process can reach which: partitions of every shape, and slow links.

A link goes one way, from one process to another, both named by their addresses. A message that
arrives while its link is cut is lost silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from percolator.world import Random

Link = tuple[str, str]
"""From, to."""


class Links:
    """The state of every link; links that were never mentioned are intact and fast."""

    def __init__(self) -> None:
        self._cut: set[Link] = set()
        self._extra_seconds: dict[Link, float] = {}
        self.whole = True
        """Whether nothing is cut or slow: the fast check that every message makes."""

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cut

    def extra_seconds(self, source: str, target: str) -> float:
        return self._extra_seconds.get((source, target), 0.0)

    def cut(self, source: str, target: str) -> None:
        """Cuts one way: `target` no longer hears `source`, which still hears `target`."""
        self._cut.add((source, target))
        self.whole = False

    def mend(self, source: str, target: str) -> None:
        """Undoes `cut`. What else is cut or slow stays so."""
        self._cut.discard((source, target))
        self.whole = not (self._cut or self._extra_seconds)

    def cut_both(self, one: str, other: str) -> None:
        self.cut(one, other)
        self.cut(other, one)

    def slow(self, source: str, target: str, extra_seconds: float) -> None:
        """Makes everything from `source` to `target` take this much longer."""
        self._extra_seconds[source, target] = extra_seconds
        self.whole = False

    def isolate(self, name: str, others: Iterable[str]) -> None:
        """Cuts one process off from `others`, both ways."""
        for other in others:
            if other != name:
                self.cut_both(name, other)

    def split(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Separates two groups: no process of one reaches a process of the other."""
        others = list(other)
        for name in one:
            for far in others:
                self.cut_both(name, far)

    def split_at_random(self, names: Sequence[str], random: Random) -> None:
        """Separates two halves, chosen at random."""
        shuffled = list(names)
        random.shuffle(shuffled)
        middle = len(shuffled) // 2
        self.split(shuffled[:middle], shuffled[middle:])

    def ring(self, names: Sequence[str]) -> None:
        """Lets each reach only its two neighbours: every process sees a different part."""
        count = len(names)
        for place, name in enumerate(names):
            for distance in range(2, count - 1):
                self.cut(name, names[(place + distance) % count])

    def heal(self) -> None:
        """Lets every process reach every other one again, without extra delay."""
        self._cut.clear()
        self._extra_seconds.clear()
        self.whole = True
