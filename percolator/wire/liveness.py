"""Asking whether the owners of locks are alive.

Invariants:
- An answer is never older than the question: whoever asks while a call is in flight shares the
  next one, not that one. (An owner may die between the two.) Nothing is cached.
- No answer means *undecided*, never dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import IntEnum

from percolator.errors import InvalidArgument, PercolatorError
from percolator.v1 import lockservice_pb2 as wire
from percolator.wire.lock_service import LockServiceCalls

SESSION_ID_BYTES = 16
_IDS_PER_CALL_MAX = 1_000


class Liveness(IntEnum):
    """What is known about a session, numbered as on the wire."""

    ALIVE = wire.LIVENESS_ALIVE
    DEAD = wire.LIVENESS_DEAD
    UNDECIDED = wire.LIVENESS_UNDECIDED


_BY_VALUE: dict[int, Liveness] = {known.value: known for known in Liveness}


class _Question:
    """The sessions that the next calls ask about, for everybody who waits for it."""

    def __init__(self) -> None:
        self.session_ids: set[bytes] = set()
        self.answers: asyncio.Future[dict[bytes, Liveness]] = (
            asyncio.get_running_loop().create_future()
        )


class LivenessQuestions:
    """Coalesces questions: one call is in flight, and those who came meanwhile share the next."""

    def __init__(self, calls: LockServiceCalls, *, timeout_seconds: float) -> None:
        self._calls = calls
        self._timeout_seconds = timeout_seconds
        self._next: _Question | None = None
        self._asking: asyncio.Task[None] | None = None

    async def ask(self, session_ids: Sequence[bytes]) -> list[Liveness]:
        """In the order asked. What cannot be a session's id is undecided: its lock has a TTL."""
        for index, session_id in enumerate(session_ids):
            if not isinstance(session_id, bytes):
                # It would break the call that carries everybody's questions.
                raise InvalidArgument(f"session_ids[{index}]", f"is not bytes: {session_id!r}")
        question = self._next or _Question()
        self._next = question
        question.session_ids.update(i for i in session_ids if len(i) == SESSION_ID_BYTES)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        # Shielded, because the answer is for others too: one who gives up takes it from nobody.
        answers = await asyncio.shield(question.answers)
        return [answers.get(session_id, Liveness.UNDECIDED) for session_id in session_ids]

    async def close(self) -> None:
        """Whoever still waits is told that nothing is known."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        if self._next is not None:
            self._next.answers.set_result({})
            self._next = None

    async def _ask_all(self) -> None:
        while self._next is not None:
            question, self._next = self._next, None
            answers: dict[bytes, Liveness] = {}
            try:
                await self._answer(question, answers)
            finally:
                question.answers.set_result(answers)

    async def _answer(self, question: _Question, answers: dict[bytes, Liveness]) -> None:
        session_ids = sorted(question.session_ids)
        for start in range(0, len(session_ids), _IDS_PER_CALL_MAX):
            asked = session_ids[start : start + _IDS_PER_CALL_MAX]
            request = wire.CheckSessionsRequest(session_ids=asked)
            try:
                response = await self._calls.call(
                    lambda stub: stub.check_sessions, request, self._timeout_seconds
                )
            except PercolatorError:
                # Whatever it was: it says nothing about these sessions, so their TTL decides.
                return
            answers.update(zip(asked, map(_from_wire, response.liveness), strict=False))


def _from_wire(value: int) -> Liveness:
    """A value of a newer version is one that this version cannot act upon."""
    return _BY_VALUE.get(value, Liveness.UNDECIDED)
