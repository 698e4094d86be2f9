"""Does a series level off, or does it grow?

The first third is warm-up: caches fill, the interpreter's heap finds its size. A series *grows* if
all of this holds for the rest:

1. It is higher: the median of the last third is above that of the middle third by more than a
   tolerance, which is a share of the latter and never less than a floor.
2. It rises steadily: the middle and last thirds are cut into eight parts, and in the 28 pairs of
   their medians the later one is the higher one in at least 18 more pairs than it is the lower one.
   Of series without a trend, one in sixty does that (Mann and Kendall's test).
3. It still rises: within the last third, the median of the second half is above that of the first
   by more than a quarter of the whole rise. For steady growth it would be a half.

Otherwise it levels off. Medians make single peaks harmless, parts are long compared with the teeth
of a garbage collector or of compactions, and a single step, or a rise that slows down, is no leak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

POINTS_MIN = 36
"""With fewer, parts would be too short to have a meaningful median."""

_PARTS = 8
_MORE_PAIRS_MIN = 18
_LATE_SHARE = 0.25


@dataclass(frozen=True)
class Tolerance:
    """By how much a series may be higher in the last third than in the middle third."""

    share: float
    floor: float

    def of(self, level: float) -> float:
        return max(self.floor, self.share * abs(level))


@dataclass(frozen=True)
class Judgement:
    """What was found; values in the unit of the series."""

    points: int
    middle: float = 0.0
    """The median of the middle third."""
    last: float = 0.0
    """The median of the last third."""
    tolerated: float = 0.0
    more_pairs: int = 0
    """In how many more pairs of parts the later one is higher than in how many it is lower."""
    late_rise: float = 0.0
    """The rise from the first half of the last third to the second one."""

    @property
    def is_judged(self) -> bool:
        return self.points >= POINTS_MIN

    @property
    def grows(self) -> bool:
        rise = self.last - self.middle
        return (
            self.is_judged
            and rise > self.tolerated
            and self.more_pairs >= _MORE_PAIRS_MIN
            and self.late_rise > _LATE_SHARE * rise
        )


def judge(values: Sequence[float], tolerance: Tolerance) -> Judgement:
    """Judges samples that were taken at equal intervals."""
    count = len(values)
    if count < POINTS_MIN:
        return Judgement(count)
    rest = values[count // 3 :]
    middle, last = _parts(rest, 2)
    level = median(middle)
    medians = [median(part) for part in _parts(rest, _PARTS)]
    pairs = list(combinations(medians, 2))
    ups = sum(later > earlier for earlier, later in pairs)
    downs = sum(later < earlier for earlier, later in pairs)
    first_half, second_half = _parts(last, 2)
    return Judgement(
        count,
        level,
        median(last),
        tolerance.of(level),
        ups - downs,
        median(second_half) - median(first_half),
    )


def _parts(values: Sequence[float], count: int) -> list[Sequence[float]]:
    bounds = [len(values) * number // count for number in range(count + 1)]
    return [values[start:end] for start, end in pairwise(bounds)]
