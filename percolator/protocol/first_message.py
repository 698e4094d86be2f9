"""The first message of a commit in one round: nearly always all that a transaction sends.

What else the protocol needs is made when its answer is not the commit, or when its caller is
cancelled before that answer (commit.py). A transaction that has read nothing asks for its start
timestamp here, too. The message leaves as soon as that comes: its caller is woken once, by the
outcome, and the messages of all transactions that have waited for the same timestamps are made one
after the other, which takes a processor less time than all steps of one transaction, and then all
of the next.

Rules, each with the failure that it prevents:
- Before the message is handed over to be sent, this is noted. A transaction whose caller is
  cancelled after that may still be committed by it, and must not be reported as aborted.
- A caller who is cancelled before the timestamp comes has sent nothing, and nothing is sent later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from percolator.errors import CellAddress, PercolatorError, harmless
from percolator.protocol.commit_message import commit_message
from percolator.protocol.environment import Environment
from percolator.protocol.same_codecs import require_same_codecs
from percolator.protocol.write_set import WriteSet
from percolator.routing.cells import CommitAnswer, NotSent
from percolator.routing.table_info import TableInfo
from percolator.wire.timestamp_source import TimestampSource


class FirstMessage:
    """Waits for the start timestamp like a future of it, and sends the message when it comes."""

    __slots__ = (
        "_begun",
        "_deadline",
        "_env",
        "_is_followed",
        "_oracle",
        "_tables",
        "_weak",
        "_writes",
        "answer",
        "is_sent",
    )

    def __init__(
        self,
        env: Environment,
        oracle: TimestampSource,
        writes: WriteSet,
        weak: Sequence[CellAddress],
        tables: Mapping[str, TableInfo],
        begun: Callable[[int], int],
        deadline: float,
        answer: asyncio.Future[CommitAnswer],
        *,
        is_followed: bool,
    ) -> None:
        """`begun` is called with the start timestamp, and returns the one that counts. If it
        raises, the caller receives the error, and nothing is sent."""
        self._env = env
        self._oracle = oracle
        self._writes = writes
        self._weak = weak
        self._tables = tables
        self._begun = begun
        self._deadline = deadline
        self._is_followed = is_followed
        self.answer = answer
        """An exception means that nothing was sent, unless `is_sent`."""
        self.is_sent = False
        """From here on it may be executed, even if the caller is cancelled."""

    def send(self, start: int) -> None:
        """Sends the message of the transaction that began then."""
        env = self._env
        writes = self._writes.stored(start)
        cells = sorted(writes) if len(writes) > 1 else list(writes)
        schema = env.schemas.get(cells[0][0])
        if schema is None:
            self.answer.set_result(NotSent("the schema of its table is not known"))
            return
        require_same_codecs(writes, self._tables, env.schemas)
        message = commit_message(
            start,
            cells,
            writes,
            env.limits.value_inline_bytes_max,
            schema,
            self._weak,
            is_followed=self._is_followed,
        )
        self.is_sent = True
        env.cells.commit(message, self._deadline, self.answer)

    # ------------------------------------------------------------------ the timestamp comes

    def ask(self) -> None:
        """Asks for the start timestamp. The message leaves when that comes."""
        if self.answer.done():
            return  # its caller no longer waits
        try:
            self._oracle.give(self, 1, max(self._deadline - self._env.now(), 0.001))
        except PercolatorError as error:  # for its caller only: others ask in the same turn
            self.answer.set_exception(error)

    def done(self) -> bool:
        """Whether it has left, or the caller no longer waits. With another timestamp it would be
        another transaction, and both might commit."""
        return self.is_sent or self.answer.done()

    def set_result(self, start: int) -> None:
        """Sends the message at the start timestamp that was asked for.

        Raises nothing: whatever goes wrong, only the caller of this commit should hear of it,
        together with whether the message may have left."""
        try:
            self.send(self._begun(start))
        except Exception as error:  # noqa: BLE001 - raised for the caller by its future
            if not self.answer.done():
                self.answer.set_exception(error)
            else:  # a bug that would otherwise go unreported
                context = {"message": "after the answer to a commit", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

    def set_exception(self, error: PercolatorError) -> None:
        self.answer.set_exception(harmless(error))
