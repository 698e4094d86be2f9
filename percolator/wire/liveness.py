"""Asking whether the owners of locks are alive.

Invariants:
- An answer is never older than its lookup: one that begins while a call is in flight goes into the
  next call. (The owner may have died since that call was answered.) Nothing is cached.
- No answer means *undecided*, never dead.
- A session is dead only if every lock service says so: each knows only its own, and not all clients
  need be with the same one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import IntEnum

from percolator.errors import InvalidArgument, PercolatorError
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire.lock_service import LockServiceCalls

SESSION_ID_BYTES = 16
_IDS_PER_CALL_MAX = 1_000


class Liveness(IntEnum):
    """State of a session, numbered as on the wire."""

    ALIVE = pb.LIVENESS_ALIVE
    DEAD = pb.LIVENESS_DEAD
    UNDECIDED = pb.LIVENESS_UNDECIDED


_BY_VALUE: dict[int, Liveness] = {known.value: known for known in Liveness}


class _Lookup:
    """The sessions that the next calls ask about, for all callers that wait for the answers."""

    def __init__(self) -> None:
        self.session_ids: set[bytes] = set()
        self.answers: asyncio.Future[dict[bytes, Liveness]] = (
            asyncio.get_running_loop().create_future()
        )


class LivenessLookups:
    """Coalesces lookups: while one call is in flight, new lookups collect for the next."""

    def __init__(self, calls: LockServiceCalls, *, timeout_seconds: float) -> None:
        self._calls = calls
        self._timeout_seconds = timeout_seconds
        self._next: _Lookup | None = None
        self._asking: asyncio.Task[None] | None = None

    async def ask(self, session_ids: Sequence[bytes]) -> list[Liveness]:
        """Returns answers in the order of the ids. What cannot be the id of a session is undecided:
        the time to live of its lock decides."""
        for index, session_id in enumerate(session_ids):
            if not isinstance(session_id, bytes):
                # It would break the call that all callers share.
                raise InvalidArgument(f"session_ids[{index}]", f"is not bytes: {session_id!r}")
        lookup = self._next or _Lookup()
        self._next = lookup
        lookup.session_ids.update(i for i in session_ids if len(i) == SESSION_ID_BYTES)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        # Shielded, because others wait for the answer too: one cancelled caller must not end it.
        answers = await asyncio.shield(lookup.answers)
        return [answers.get(session_id, Liveness.UNDECIDED) for session_id in session_ids]

    async def close(self) -> None:
        """Stops asking; callers that still wait are answered with "undecided"."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        if self._next is not None:
            self._next.answers.set_result({})
            self._next = None

    async def _ask_all(self) -> None:
        while self._next is not None:
            lookup, self._next = self._next, None
            answers: dict[bytes, Liveness] = {}
            try:
                await self._answer(lookup, answers)
            finally:
                lookup.answers.set_result(answers)

    async def _answer(self, lookup: _Lookup, answers: dict[bytes, Liveness]) -> None:
        session_ids = sorted(lookup.session_ids)
        for start in range(0, len(session_ids), _IDS_PER_CALL_MAX):
            asked = session_ids[start : start + _IDS_PER_CALL_MAX]
            try:
                answers.update(await self._known(asked))
            except PercolatorError:
                # Whatever the error was, it says nothing about these sessions, so their locks'
                # time to live decides.
                return

    async def _known(self, asked: Sequence[bytes]) -> dict[bytes, Liveness]:
        """Answers of the current lock service, and of the others about sessions that it takes for
        dead."""
        current = self._calls.current()
        found = await self._told_by(current, asked)
        for address in [one for one in self._calls.addresses if one != current]:
            gone = [one for one, known in found.items() if known is Liveness.DEAD]
            if not gone:
                break
            try:
                told = await self._told_by(address, gone)
            except PercolatorError:
                told = {}
            found.update({one: told.get(one, Liveness.UNDECIDED) for one in gone})
        return found

    async def _told_by(self, address: str, asked: Sequence[bytes]) -> dict[bytes, Liveness]:
        """Answers of one lock service about these sessions."""
        request = pb.CheckSessionsRequest(session_ids=asked)
        response = await self._calls.call_at(
            address, lambda stub: stub.check_sessions, request, self._timeout_seconds
        )
        return {
            one: _BY_VALUE.get(value, Liveness.UNDECIDED)  # a newer version may have other values
            for one, value in zip(asked, response.liveness, strict=False)
        }
