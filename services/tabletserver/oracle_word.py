"""What the tablets of a server ask the oracle for.

Transactions that commit in one round need commit timestamps, all the time. The `TimestampGuard`
asks what time it is, rarely: when this server has just started, or when time has jumped. Calls at
the same moment share a request, as for all users of a `TimestampSource`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import copy

from percolator.errors import DeadlineExceeded, NotReady, PercolatorError
from percolator.tasks import Tasks
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.cluster import addresses_of, describe
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import World

ANSWER_SECONDS_MAX = 1.0
"""The call that needs the timestamp waits meanwhile, and its caller has a deadline too."""


class OracleWord:
    """Belongs to one event loop."""

    def __init__(self, world: World, masters: Sequence[str]) -> None:
        self._world = world
        self._masters = masters
        self._addresses: list[str] = []
        """Where oracles were last known to be. The source asks whatever is listed here."""
        self._source: TimestampSource | None = None
        self._looking: asyncio.Task[PercolatorError | None] | None = None
        """The one attempt to find oracles, which all callers share."""
        self._tasks = Tasks()

    async def __call__(self) -> int:
        """A timestamp that was handed out after the call. Raises `PercolatorError`."""
        return await self.take(1)

    async def take(self, count: int) -> int:
        """The first of that many timestamps, which were handed out after the call. Raises
        `PercolatorError`, after `ANSWER_SECONDS_MAX` at the latest."""
        source = self._source
        if source is not None:
            return await source.get(count, ANSWER_SECONDS_MAX)
        now = self._world.clock.monotonic_seconds
        deadline = now() + ANSWER_SECONDS_MAX
        source = await self._first_source(ANSWER_SECONDS_MAX)
        return await source.get(count, max(deadline - now(), 0.0))

    async def close(self) -> None:
        if self._source is not None:
            await self._source.close()
        await self._tasks.cancel()

    async def _first_source(self, timeout_seconds: float) -> TimestampSource:
        looking = self._look()
        await asyncio.wait((looking,), timeout=timeout_seconds)
        if self._source is not None:
            return self._source
        if not looking.done():
            raise DeadlineExceeded("no master said in time where the oracle is")
        problem = None if looking.cancelled() else looking.result()
        raise copy(problem) if problem is not None else NotReady("the server is closing")

    def _look(self) -> asyncio.Task[PercolatorError | None]:
        """Asks the masters for the oracles, unless such a request is in flight."""
        if self._looking is None:
            self._looking = self._tasks.start(self._find())
        return self._looking

    async def _find(self) -> PercolatorError | None:
        """Returns why no oracle was found. The known ones are kept: they may answer again."""
        try:
            cluster = await describe(self._world.network, self._masters, ANSWER_SECONDS_MAX)
        except PercolatorError as problem:
            return problem
        finally:
            self._looking = None
        found = addresses_of(cluster, ServiceKind.SERVICE_KIND_ORACLE)
        if not found and not self._addresses:
            return NotReady("no oracle is registered")
        self._addresses[:] = found or self._addresses
        if self._source is None:
            self._source = TimestampSource(
                self._world, self._addresses, on_trouble=self._on_trouble
            )
        return None

    def _on_trouble(self) -> None:
        """The oracle did not answer: another one may lead. Until it is found, the known ones are
        still asked: they may answer again, and commits must not queue behind silent masters."""
        self._look()
