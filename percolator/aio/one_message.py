"""The first message of a transaction's commit, which is nearly always the only one."""

from __future__ import annotations

from collections.abc import Awaitable

from percolator.aio.writing import Writing
from percolator.errors import ConflictError, SnapshotTooOld
from percolator.protocol.commit import Commit
from percolator.protocol.commit_message import fits_one_message
from percolator.protocol.first_message import FirstMessage
from percolator.routing.cells import CommitAnswer
from percolator.wire.timestamp_source import TimestampSource


class OneMessage(Writing):
    """Commits with one message, if that is possible."""

    _alone = True
    """No other process can commit this transaction."""
    _only_two_phases = False
    """Do not try to commit in one round."""
    _early = 0
    """The timestamp at which it begins to commit, if that was fetched before (early_starts.py). It
    is not that of a snapshot: a read that goes on beside the commit fetches its own."""
    _early_seconds = 0.0
    """When that was received, on the monotonic clock."""
    _begins_early = True
    """It may commit like that."""
    _commit: Commit | None = None

    def _resume(self, start: int, started_seconds: float) -> None:
        self._set_start(start)
        self._started_seconds = started_seconds
        self._alone = False

    def _first_message(self, deadline: float) -> FirstMessage | None:
        """The message that may be all that it takes; None if it cannot be one."""
        engine, writes = self._engine, self._writes
        env, oracle, weak = engine.env, engine.timestamps, self._weak or ()
        if (
            not writes.cells
            or not isinstance(oracle, TimestampSource)  # in a row store, it takes two phases
            or self._only_two_phases
            or not fits_one_message(writes.cells, weak, env.limits)
        ):
            return None
        return FirstMessage(
            env,
            oracle,
            writes,
            sorted(weak) if weak else (),
            self._bound_tables,
            self._begin_at_once,
            deadline,
            engine.loop.create_future(),
            is_followed=self._attempts is not None and self._attempts.is_followed,
        )

    def _answer_to(self, first: FirstMessage) -> Awaitable[CommitAnswer]:
        """Sends the message now, or as soon as its start timestamp comes. The caller holds the
        message before this begins, so it can tell whether the message was sent, even after Ctrl-C.
        """
        early_starts = self._engine.early_starts
        if self._start:
            first.set_result(self._start)
        elif early_starts is not None and self._begins_early:
            early_starts.begin(first)
        else:
            first.ask()
        return first.answer

    def _began_too_early(self, error: ConflictError | SnapshotTooOld) -> bool:
        """Whether what has stopped it need not be in the way of a start that is fetched now."""
        if isinstance(error, ConflictError) and not error.other_commit_timestamp:
            # An older lock was waited for, for as long as commits wait: not once more.
            return self._early > 0 and not 0 < error.other_start_timestamp < self._early
        return self._early > 0

    def _begin_anew(self) -> None:
        """After an obstacle that ruled out for good that it commits at its early start."""
        early_starts = self._engine.early_starts
        if early_starts is not None:
            early_starts.met_obstacle(self._early)
        self._early, self._begins_early = 0, False
        self._commit = None

    @property
    def _name(self) -> int:
        """The timestamp by which its commit is told from those of others; 0 if it has none yet."""
        return self._early or self._start

    def _begin_at_once(self, start: int, early_seconds: float | None) -> int:
        if early_seconds is not None:
            self._early, self._early_seconds = start, early_seconds
            return start
        # A read that goes on beside the commit may have fetched another one before. If the commit
        # has ended meanwhile, this raises.
        if self._finished or not self._start:
            self.statistics.round_trips += 1
            self._set_start(start)
        self._require_older_tables()
        return self._start
