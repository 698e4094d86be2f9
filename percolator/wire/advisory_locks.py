"""Advisory locks held by this process's session: they keep two processes off the same work.

They are hints and nothing else. While no lock service answers, or there is no session, every lock
is reported as held: two processes may then do the same work, which its transactions sort out, and
the work does not stop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Protocol

from percolator.errors import PercolatorError
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire.lock_service import LockServiceCalls

_log = logging.getLogger(__name__)

NAMES_PER_CALL_MAX = 1_000
"""So many of the longest names are less than a lock service accepts in one request: 1 MiB."""
NAME_BYTES_MAX = 1_024
_HASH_BYTES = 16


class Session(Protocol):
    """The owner of the locks: `percolator.wire.sessions.Sessions`."""

    calls: LockServiceCalls

    @property
    def session_id(self) -> bytes | None: ...


def row_name(table_id: int, row: bytes) -> bytes:
    """The name under which every process locks a row, whatever the row's length."""
    name = table_id.to_bytes(8, "big") + row
    if len(name) <= NAME_BYTES_MAX - _HASH_BYTES:
        return name
    kept = name[: NAME_BYTES_MAX - _HASH_BYTES]
    return kept + blake2b(name, digest_size=_HASH_BYTES).digest()


_Ask = Callable[[bytes, list[bytes]], Awaitable[Sequence[bool]]]


class AdvisoryLocks:
    """Takes, extends and releases many locks at once. Names that occur twice are locked once."""

    def __init__(
        self, session: Session, *, ttl_seconds: float = 3.0, timeout_seconds: float = 1.0
    ) -> None:
        """A lock expires `ttl_seconds` after it was taken or extended, and with the session.
        `timeout_seconds` is how long to wait for an answer."""
        self._session = session
        self._ttl_milliseconds = round(ttl_seconds * 1000)
        self._timeout_seconds = timeout_seconds
        self.last_error: PercolatorError | None = None
        """Why the last call was not answered; None if it was."""

    async def try_lock(self, names: Sequence[bytes]) -> list[bool]:
        """Returns for each name whether we hold it now; never waits for a lock."""

        async def ask(session_id: bytes, part: list[bytes]) -> Sequence[bool]:
            request = pb.TryLockRequest(
                session_id=session_id, names=part, ttl_milliseconds=self._ttl_milliseconds
            )
            response = await self._session.calls.call(
                lambda stub: stub.try_lock, request, self._timeout_seconds
            )
            return response.held

        return await self._ask(names, ask)

    async def renew(self, names: Sequence[bytes]) -> list[bool]:
        """Extends locks. Returns for each whether it was still held."""

        async def ask(session_id: bytes, part: list[bytes]) -> Sequence[bool]:
            request = pb.RenewLocksRequest(
                session_id=session_id, names=part, ttl_milliseconds=self._ttl_milliseconds
            )
            response = await self._session.calls.call(
                lambda stub: stub.renew_locks, request, self._timeout_seconds
            )
            return response.held

        return await self._ask(names, ask)

    async def unlock(self, names: Sequence[bytes]) -> None:
        """Releases locks. Those for which the call fails expire by themselves."""

        async def ask(session_id: bytes, part: list[bytes]) -> Sequence[bool]:
            request = pb.UnlockRequest(session_id=session_id, names=part)
            await self._session.calls.call(lambda stub: stub.unlock, request, self._timeout_seconds)
            return [True] * len(part)

        await self._ask(names, ask)

    async def _ask(self, names: Sequence[bytes], ask: _Ask) -> list[bool]:
        distinct = iter(dict.fromkeys(names))
        held: dict[bytes, bool] = {}
        while part := list(islice(distinct, NAMES_PER_CALL_MAX)):
            session_id = self._session.session_id
            if session_id is None:
                break
            try:
                held.update(zip(part, await ask(session_id, part), strict=False))
            except PercolatorError as error:
                # The service is gone, or has forgotten the session: its locks are gone too.
                self._report(error)
                break
            self.last_error = None
        return [held.get(name, True) for name in names]

    def _report(self, error: PercolatorError) -> None:
        """Logs once per outage, not once per call."""
        if self.last_error is None:
            _log.warning("continuing without advisory locks: %s", error)
        self.last_error = error
