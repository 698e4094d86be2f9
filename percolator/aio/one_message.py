"""The first message of a transaction's commit, which is nearly always the only one."""

from __future__ import annotations

from collections.abc import Awaitable

from percolator.aio.writing import Writing
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
        if self._start:
            first.set_result(self._start)
        else:
            first.ask()
        return first.answer

    def _begin_at_once(self, start: int) -> int:
        # A read that goes on beside the commit may have fetched another one before. If the commit
        # has ended meanwhile, this raises.
        if self._finished or not self._start:
            self.statistics.round_trips += 1
            self._set_start(start)
        self._require_older_tables()
        return self._start
