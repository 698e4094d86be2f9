"""How soon processes notice that another one is gone."""

from __future__ import annotations

from dataclasses import dataclass

BEAT_SECONDS = 0.5
GRACE_SECONDS_MIN = 2 * BEAT_SECONDS
"""With one interval, a leader whose sign of life is a little late would be taken for dead."""


@dataclass(frozen=True)
class CoordinatorTimes:
    """How soon other processes notice a loss."""

    beat_seconds: float = BEAT_SECONDS
    """The interval between two signs of life."""
    grace_seconds: float = 3.0
    """A leader or session without a sign of life for this long is taken for dead."""
    poll_seconds: float = 0.1
    """The interval between two checks by a candidate or a watcher."""


USUAL_TIMES = CoordinatorTimes()
