"""A pin: what is readable at a timestamp stays readable, for as long as the pin's holder lives.

A pin is a session that names a timestamp. The master looks at the sessions after it has written
down how far history may be collected, and the pin's creator looks at that after its session is
known: in whichever order this happens, one of them sees the other. If a pin comes too late, it is
released and refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

from percolator.aio.engine import Engine
from percolator.arguments import as_timestamp, require_seconds, require_table, require_text
from percolator.errors import (
    InvalidArgument,
    SchemaError,
    SessionExpired,
    SnapshotTooOld,
    Unavailable,
    UsageError,
)
from percolator.schema import Table
from percolator.timestamps import Timestamp
from percolator.wire.sessions import Sessions

_log = logging.getLogger("percolator.history")

PIN_TTL_SECONDS = 60.0
"""How long a pin outlives its holder, or an outage of the lock service, unless the lock service is
configured to allow less."""


class Pin:
    """Keeps history for the duration of its block: what is readable at its timestamp stays so.

    >>> async with db.pin(at=yesterday) as pin, db.snapshot(at=pin.at) as snapshot: ...
    """

    def __init__(
        self,
        engine: Engine,
        at: Timestamp | datetime | None,
        tables: Sequence[Table[Any]],
        description: str,
        ttl_seconds: float | None,
        timeout_seconds: float,
    ) -> None:
        self._engine = engine
        self._wanted = None if at is None else as_timestamp(at, "at")
        if not isinstance(tables, Iterable):
            raise InvalidArgument(
                "tables", f"expected a list of tables, got {type(tables).__name__}"
            )
        self._tables = {_name(table) for table in tables}
        require_text(description, "description")
        self._description = description
        if ttl_seconds is not None:
            require_seconds(ttl_seconds, "ttl")
        self._ttl_seconds = ttl_seconds
        self._timeout_seconds = timeout_seconds
        self._at: Timestamp | None = None
        self._session: Sessions | None = None
        self._is_being_set = False
        self._lost = False
        self._lost_session = b""
        self.lost_because = ""
        """Why it is lost; empty while it is not."""

    @property
    def at(self) -> Timestamp:
        """The timestamp that is pinned: everything readable there stays readable."""
        if self._at is None:
            raise UsageError("the pin has not been set yet: enter its block, or await set()")
        return self._at

    @property
    def session_id(self) -> bytes:
        """The session's id, as the lock service lists it. Raises `SessionExpired`, as `check`."""
        self.check()
        found = None if self._session is None else self._session.session_id
        if found is None:
            raise SessionExpired(
                f"the pin at {self.at.describe()} could not be renewed in time", session_id=b""
            )
        return found

    @property
    def is_lost(self) -> bool:
        """True if it was released by someone else, became too old, or was not renewed in time."""
        return self._lost

    def check(self) -> None:
        """Raises `SessionExpired` if it was released by someone else, became older than the
        cluster allows, or was not renewed in time.

        After that, history may be gone; if so, reads raise `SnapshotTooOld`.
        """
        if self._lost:
            raise SessionExpired(
                f"the pin at {self.at.describe()} was released or lost: {self.lost_because}",
                session_id=self._lost_session,
            )

    async def set(self) -> Pin:
        """Returns when the pin holds.

        Raises `InvalidArgument` for a time in the future, `SnapshotTooOld` for one whose history
        may be gone, or is older than the cluster holds back for the caller's role, `SchemaError`
        for an unknown table, and the error of a lock service or master that does not answer.
        """
        engine = self._engine
        engine.require_usable()
        if self._session is not None or self._is_being_set:
            raise UsageError("the pin is already set, or is being set")
        self._is_being_set = True
        try:
            await self._set()
        finally:
            self._is_being_set = False
        return self

    async def _set(self) -> None:
        engine = self._engine
        deadline = engine.now() + self._timeout_seconds
        now = Timestamp(await engine.fresh_timestamp(self._timeout_seconds))
        at = now if self._wanted is None else self._wanted
        if at > now:
            raise InvalidArgument(
                "at", f"{at.describe()} is in the future: the oracle is at {now.describe()}"
            )
        owners = engine.env.owners
        if not isinstance(owners, Sessions):
            raise UsageError("this client has no sessions, so it cannot pin history")
        self._at = at
        self._session = owners.pin(
            at,
            self._description,
            ttl_seconds=self._ttl_seconds or PIN_TTL_SECONDS,
            ttl_may_be_shorter=self._ttl_seconds is None,
            timeout_seconds=self._timeout_seconds,
            on_lost=self._on_lost,
        )
        try:
            await self._require_session(self._session)
            await self._require_still_there(at, deadline)
            self.check()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Releases the pin. Closing twice is harmless."""
        session = self._session
        if session is not None:
            await session.close()  # if it is cancelled, the next call tries again
            if self._session is session:
                self._session = None

    async def _require_session(self, session: Sessions) -> None:
        if await session.current() is not None:
            return
        error = session.last_error or Unavailable("no lock service answers")
        if isinstance(error, InvalidArgument) and error.field == "info.ttl_milliseconds":
            raise InvalidArgument("ttl", error.reason)
        raise error

    async def _require_still_there(self, at: Timestamp, deadline: float) -> None:
        """Checks that history is still there. Call this once the session is known: whatever is not
        given up by then will be kept."""
        described = await self._engine.catalog.describe_collection(deadline)
        unknown = sorted(self._tables - {table.table for table in described.tables})
        if unknown:
            raise SchemaError(f"there is no table {unknown[0]!r}", table=unknown[0])
        for table in described.tables:
            if self._tables and table.table not in self._tables:
                continue
            if at < table.safe_point:
                safe_point = Timestamp(table.safe_point)
                raise SnapshotTooOld(
                    f"{at.describe()} is older than the history of table {table.table!r}, which "
                    f"goes back to {safe_point.describe()}",
                    timestamp=at,
                    safe_point=safe_point,
                )

    def _on_lost(self, session_id: bytes) -> None:
        self._lost, self._lost_session = True, session_id
        if self._session is not None:
            self.lost_because = self._session.lost_because
        _log.warning(
            "the pin at %s is lost, and history may be collected: %s",
            self.at.describe(),
            self.lost_because,
        )

    async def __aenter__(self) -> Pin:
        return await self.set()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _name(table: Table[Any]) -> str:
    require_table(table)
    return table.name
