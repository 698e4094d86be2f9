"""A pin: what was readable at a timestamp stays readable, for as long as its holder lives.

It is a session that names a timestamp. The master looks at the sessions after it has written down
how far history may be collected, and the maker of a pin looks there after its session is known: in
whatever order the two happen, one of them sees the other. A pin that would come too late is let go
of again, and refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

from percolator.aio.engine import Engine
from percolator.aio.snapshot import as_timestamp
from percolator.arguments import require_seconds, require_table
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
"""The longest that lock services allow, unless they are set to less: so long a pin outlives a
holder that has died, and a lock service that is away."""


class Pin:
    """Holds history, from the beginning of its block to its end.

    >>> async with db.pin(at=yesterday) as pin:
    ...     async with db.snapshot(at=pin.at) as snapshot: ...
    """

    def __init__(
        self,
        engine: Engine,
        at: Timestamp | datetime | None,
        tables: Sequence[Table[Any]],
        description: str,
        ttl_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._engine = engine
        self._wanted = None if at is None else as_timestamp(at)
        for table in tables:
            require_table(table)
        self._tables = {table.name for table in tables}
        self._description = description
        require_seconds(ttl_seconds)
        self._ttl_seconds = ttl_seconds
        self._timeout_seconds = timeout_seconds
        self._at: Timestamp | None = None
        self._session: Sessions | None = None
        self._lost = False
        self._lost_session = b""

    @property
    def at(self) -> Timestamp:
        """From here on nothing is collected."""
        if self._at is None:
            raise UsageError("the pin has not been set yet: it is inside of its block")
        return self._at

    @property
    def session_id(self) -> bytes:
        """Of its session, as the lock service lists it. Raises `SessionExpired`, as `check`."""
        self.check()
        found = None if self._session is None else self._session.session_id
        if found is None:
            raise SessionExpired(
                f"the pin at {self.at.describe()} could not be renewed in time", session_id=b""
            )
        return found

    @property
    def is_lost(self) -> bool:
        """Whether somebody has released it, or it was not renewed in time."""
        return self._lost

    def check(self) -> None:
        """Raises `SessionExpired` once somebody has released it, or it was not renewed in time.

        What is read afterwards may be gone; if it is, that is said there, by `SnapshotTooOld`.
        """
        if self._lost:
            raise SessionExpired(
                f"the pin at {self.at.describe()} has been released, or was lost",
                session_id=self._lost_session,
            )

    async def set(self) -> Pin:
        """Returns when it holds. Raises `InvalidArgument` for the future, `SnapshotTooOld` for what
        may be gone, `SchemaError` for a table that is not there, and what keeps the lock service or
        the master from answering."""
        engine = self._engine
        engine.require_usable()
        if self._session is not None:
            raise UsageError("the pin is set already")
        deadline = engine.now() + self._timeout_seconds
        now = Timestamp(await engine.around.timestamps.get(timeout_seconds=self._timeout_seconds))
        at = now if self._wanted is None else self._wanted
        if at > now:
            raise InvalidArgument(
                "at", f"{at.describe()} lies in the future: the oracle is at {now.describe()}"
            )
        owners = engine.around.owners
        if not isinstance(owners, Sessions):
            raise UsageError("this client has no sessions: it cannot hold history")
        self._at = at
        self._session = owners.pin(
            at, self._description, ttl_seconds=self._ttl_seconds, on_lost=self._on_lost
        )
        try:
            await self._require_session(self._session)
            await self._require_still_there(at, deadline)
            self.check()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Lets go of history. Twice is harmless."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _require_session(self, session: Sessions) -> None:
        if await session.current() is not None:
            return
        error = session.last_error or Unavailable("no lock service answers")
        if isinstance(error, InvalidArgument) and error.field == "info.ttl_milliseconds":
            raise InvalidArgument("ttl", error.reason)
        raise error

    async def _require_still_there(self, at: Timestamp, deadline: float) -> None:
        """Our session is known by now: what has not been given up by now, will not be."""
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
        _log.warning("the pin at %s is lost: history may be collected", self.at.describe())

    async def __aenter__(self) -> Pin:
        return await self.set()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
