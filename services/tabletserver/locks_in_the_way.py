"""Resolves locks for callers with rights to some tables only, as a client of the cluster.

Such a caller could not do so itself: it takes steps at primaries in tables that it may not touch.
Nothing that it says about a transaction is believed: the locks were seen in a tablet, and their
primaries are asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from percolator.aio import Database
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotReady,
    PercolatorError,
)
from percolator.protocol.conflicts import MetLock
from percolator.routing.catalog import Masters
from percolator.services.chassis.cluster_client import connected
from percolator.services.chassis.host import Host, SettingsT
from percolator.services.tabletserver.rights import Describe
from percolator.tasks import Tasks, outlasting
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell
from percolator.v1.master_pb2 import DescribeTableRequest, Table
from percolator.wire.methods import DESCRIBE_TABLE
from percolator.world import World

_MASTER_SECONDS = 5.0
_RETRY_SECONDS = 0.1


def described_by(world: World, masters: Sequence[str]) -> Describe:
    """Asks these masters."""
    asked, now = Masters(world, masters), world.clock.monotonic_seconds

    async def describe(table_id: int) -> Table:
        request = DescribeTableRequest(table_id=table_id, knows_indexes=True)
        try:
            return (await asked.call(DESCRIBE_TABLE, request, now() + _MASTER_SECONDS)).table
        except ExecutionUnknown as error:
            # What the caller has sent was not executed.
            raise NotReady(
                f"no master says which table this is: {error.message}",
                retry_after_seconds=_RETRY_SECONDS,
            ) from error

    return describe


class LocksInTheWay:
    """Resolves locks for callers that may not do so themselves: asks the primaries, and acts on
    what they say, as every client does. Belongs to one event loop."""

    def __init__(self, host: Host[SettingsT]) -> None:
        """It connects to the cluster when there is the first such lock."""
        self._connect = partial(connected, host)
        self._now = host.world.clock.monotonic_seconds
        self._log = host.log
        self._database: Database | None = None
        self._tasks = Tasks()
        self._connecting: asyncio.Future[Database] | None = None

    async def resolve(
        self,
        table_id: int,
        seen: Sequence[Cell],
        request: pb.ResolveLocksRequest,
        deadline: float,
    ) -> pb.ResolveLocksResponse:
        """See `percolator.services.tabletserver.rights.ResolveLocks`. What goes wrong elsewhere is
        not told: it may be about rows that the caller may not know."""
        response = pb.ResolveLocksResponse()
        if not seen:  # they are gone
            return response
        try:
            met = [MetLock.of(table_id, cell) for cell in seen]
            database = self._database or await self._connected(deadline)
            engine = database.internal.engine
            cleanup, verdicts = engine.cleanup, engine.env.verdicts
            passable = await cleanup.resolve(
                met,
                deadline=deadline,
                # The caller's word would be believed for the time that it is.
                known_now=0,
                waited_seconds=request.waited_milliseconds / 1000,
                read_at=request.read_at,
            )
            if request.remove:
                await cleanup.resolve_passable(
                    [one for one in met if one.lock.start_timestamp in passable],
                    read_at=request.read_at,
                    deadline=deadline,
                )
        except PercolatorError as error:
            self._log.info("locks in the way of a caller were not resolved", reason=str(error))
            raise _told(error) from error
        response.passable.extend(sorted(passable))
        for start in dict.fromkeys(one.lock.start_timestamp for one in met):
            verdict = verdicts.get(start)
            if verdict is not None:
                response.start_timestamps.append(start)
                response.commit_timestamps.append(verdict)
        return response

    async def close(self) -> None:
        await self._tasks.cancel()
        if self._database is not None:
            await self._database.close(drain_seconds=0.0)

    async def _connected(self, deadline: float) -> Database:
        if self._connecting is None:
            self._connecting = self._tasks.start(self._connect_once())
        try:
            async with asyncio.timeout(max(deadline - self._now(), 0.0)):
                return await outlasting(self._connecting)
        except TimeoutError:
            raise DeadlineExceeded("the server is not connected to its cluster yet") from None

    async def _connect_once(self) -> Database:
        try:
            self._database = await self._connect()
            return self._database
        finally:
            self._connecting = None


def _told(error: PercolatorError) -> PercolatorError:
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded("the primaries of the locks in the way did not answer in time")
    return NotReady(
        "the primaries of the locks in the way do not answer", retry_after_seconds=_RETRY_SECONDS
    )
