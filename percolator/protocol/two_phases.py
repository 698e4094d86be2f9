"""What a transaction needs for two phases. Most commit in one round, and never make it."""

from __future__ import annotations

from typing import NamedTuple

from percolator.protocol.announcing import Announcement
from percolator.protocol.commit_point import CommitPoint
from percolator.protocol.environment import Environment
from percolator.protocol.prewriting import Prewriting
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.statistics import Statistics
from percolator.protocol.write_steps import WriteSteps


class TwoPhases(NamedTuple):
    """The two phases of one transaction."""

    point: CommitPoint
    prewriting: Prewriting

    @classmethod
    def of(
        cls,
        env: Environment,
        cleanup: Cleanup,
        write: WriteSteps,
        started_seconds: float,
        statistics: Statistics,
    ) -> TwoPhases:
        """Those of a transaction whose start timestamp was received then."""
        store = env.announcing
        announcement = None if store is None else Announcement(env, store, write)
        point = CommitPoint(env, write, started_seconds, statistics, announcement)
        return cls(point, Prewriting(env, cleanup, write, point, statistics))
