"""The first message of a transaction's commit, which is nearly always the only one."""

from __future__ import annotations

from percolator.aio.weak_notifications import WeakNotifications
from percolator.protocol.commit_message import fits_one_message
from percolator.protocol.first_message import FirstMessage
from percolator.wire.timestamp_source import TimestampSource


class OneMessage(WeakNotifications):
    """Commits with one message, if that is possible."""

    _alone = True
    """No other process can commit this transaction."""
    _two_phases = False
    """Do not try to commit in one round."""

    def _resume(self, start: int, started_seconds: float) -> None:
        self._set_start(start)
        self._started_seconds = started_seconds
        self._alone = False

    def _first_message(self, deadline: float) -> FirstMessage | None:
        """The message that may be all that it takes, on its way; None if it cannot be one."""
        engine, writes = self._engine, self._writes
        env, oracle, weak = engine.env, engine.timestamps, self._weak or ()
        if (
            not writes.cells
            or not isinstance(oracle, TimestampSource)  # in a row store, it takes two phases
            or self._two_phases
            or not fits_one_message(writes.cells, weak, env.limits)
        ):
            return None
        first = FirstMessage(
            env,
            writes,
            sorted(weak) if weak else (),
            self._bound_tables,
            self._begin_at_once,
            deadline,
            is_followed=self._attempts is not None and self._attempts.is_followed,
        )
        if self._start:
            first.set_result(self._start)
        else:
            self.statistics.round_trips += 1
            oracle.give(first, 1, max(deadline - engine.now(), 0.001))
        return first

    def _begin_at_once(self, start: int) -> None:
        if not self._start:
            self._set_start(start)
        self._require_older_tables()
