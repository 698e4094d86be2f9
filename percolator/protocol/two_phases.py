"""What a transaction needs for two phases. Most commit in one round, and never make it."""

from __future__ import annotations

from typing import NamedTuple

from percolator.protocol.announcing import Announcement
from percolator.protocol.commit_point import CommitPoint
from percolator.protocol.environment import Environment
from percolator.protocol.one_round import OneRound
from percolator.protocol.prewriting import Prewriting
from percolator.protocol.write_steps import WriteSteps


class TwoPhases(NamedTuple):
    """The two phases of one transaction."""

    point: CommitPoint
    prewriting: Prewriting

    @classmethod
    def after(
        cls, known: OneRound, env: Environment, write: WriteSteps, started_seconds: float
    ) -> TwoPhases:
        """Those of a transaction that was, or could have been, tried in one round."""
        announcing = env.announcing
        point = CommitPoint(
            env,
            write,
            known.weak_notifications,
            started_seconds,
            known.statistics,
            known.tables,
            None if announcing is None else Announcement(env, announcing, write),
        )
        return cls(point, Prewriting(env, known.cleanup, write, point, known.statistics))
