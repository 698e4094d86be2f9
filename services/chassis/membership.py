"""Belonging to a cluster: finding its master, keeping its id, announcing this process.

A process belongs to one cluster for its whole life. The id is learned from the first master that
answers, before anything is announced; another id, at any time, is refused.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from percolator.errors import PercolatorError, WrongCluster
from percolator.services.chassis.coordinator import Trouble
from percolator.v1 import cluster_pb2 as cluster
from percolator.wire.methods import DESCRIBE, REGISTER
from percolator.world import World

_CALL_SECONDS = 2.0
_WAIT_SECONDS = 0.25
"""The pause between two attempts while no master answers."""
_REPEAT_LOG_SECONDS = 5.0
_LEAVE_SECONDS = 0.5
_INTERVAL_SECONDS_MIN = 0.1
_INTERVAL_SECONDS_MAX = 10.0

_log = structlog.get_logger("percolator.membership")


class Membership:
    """This process's place in its cluster."""

    def __init__(self, world: World, masters: tuple[str, ...]) -> None:
        self._world = world
        self._masters = masters
        self.cluster_id = ""
        """Empty until a master has named it."""

    async def find_cluster(self) -> None:
        """Returns when a master has named the cluster's id; until then, logs what it waits for."""
        if not self._masters:
            return
        clock = self._world.clock
        started = said = clock.monotonic_seconds()
        for attempt in itertools.count():
            address = self._masters[attempt % len(self._masters)]
            try:
                described = await self._world.network.unary(address, DESCRIBE)(
                    cluster.DescribeRequest(), _CALL_SECONDS
                )
                self._keep(described.cluster_id, address)
            except WrongCluster:
                raise
            except PercolatorError as error:
                now = clock.monotonic_seconds()
                if attempt == 0 or now - said >= _REPEAT_LOG_SECONDS:
                    said = now
                    _log.info(
                        "waiting for a master",
                        masters=",".join(self._masters),
                        waited_seconds=round(now - started, 1),
                        last_error=str(error),
                    )
                await clock.sleep(_WAIT_SECONDS)
            else:
                _log.info("found the cluster", cluster_id=self.cluster_id, master=address)
                return

    async def register(self, server: cluster.Server) -> float:
        """Announces this process to the first master that answers; returns seconds to the next."""
        started = self._world.clock.monotonic_seconds()
        last: PercolatorError | None = None
        for address in self._masters:
            request = cluster.RegisterRequest(
                cluster_id=self.cluster_id,
                server=server,
                wall_milliseconds=self._world.clock.wall_milliseconds(),
            )
            try:
                answer = await self._world.network.unary(address, REGISTER)(request, _CALL_SECONDS)
            except WrongCluster:
                raise
            except PercolatorError as error:
                last = error
                continue
            self._keep(answer.cluster_id, address)
            # From now on ask this one first: the others may be down.
            self._masters = (address, *(other for other in self._masters if other != address))
            spent = self._world.clock.monotonic_seconds() - started
            wanted = answer.interval_milliseconds / 1000 - spent
            return min(max(wanted, _INTERVAL_SECONDS_MIN), _INTERVAL_SECONDS_MAX)
        if last is not None:
            raise last
        return _INTERVAL_SECONDS_MAX

    def _keep(self, cluster_id: str, address: str) -> None:
        if self.cluster_id and cluster_id != self.cluster_id:
            raise WrongCluster(
                f"the master at {address} belongs to cluster {cluster_id!r}, this process to "
                f"{self.cluster_id!r}",
                expected=self.cluster_id,
                found=cluster_id,
            )
        self.cluster_id = cluster_id


class Registration:
    """Keeps this process registered with the masters."""

    def __init__(
        self,
        world: World,
        membership: Membership,
        server: cluster.Server,
        belonging: Callable[[WrongCluster | None], Awaitable[None]],
    ) -> None:
        """`belonging` is called when the masters turn out to be another cluster's, and when they
        no longer are."""
        self._clock = world.clock
        self._membership = membership
        self._server = server
        self._belonging = belonging
        self._started = world.clock.monotonic_seconds()
        self._interval_seconds = _WAIT_SECONDS
        self._trouble = Trouble(_log, "not registered", "registered again")
        self._refused = False

    async def until_accepted(self) -> None:
        """Returns when a master has accepted this process; `WrongCluster` if it refuses."""
        while not await self._once():
            await self._clock.sleep(_WAIT_SECONDS)

    async def keep(self) -> None:
        """Registers again and again, and refuses to serve another cluster. Never returns."""
        while True:
            await self._clock.sleep(self._interval_seconds)
            try:
                registered = await self._once()
            except WrongCluster as error:
                # A master on another store, perhaps by mistake. Mixing two clusters would be worse
                # than an outage, which ends as soon as the right master is back.
                self._trouble.lasts(f"refusing to serve: {error}")
                self._refused = True
                await self._belonging(error)
                continue
            if registered and self._refused:
                self._refused = False
                await self._belonging(None)

    async def leave(self) -> None:
        """Says that this process is being stopped on purpose, so that nobody misses it."""
        self._server.leaving = True
        with suppress(TimeoutError, WrongCluster):  # it is missed for a while, and that is all
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._once()

    async def _once(self) -> bool:
        uptime_seconds = self._clock.monotonic_seconds() - self._started
        self._server.uptime_milliseconds = int(uptime_seconds * 1000)
        try:
            self._interval_seconds = await self._membership.register(self._server)
        except WrongCluster:
            raise
        except PercolatorError as error:
            self._interval_seconds = _WAIT_SECONDS
            self._trouble.lasts(f"no master accepts the registration: {error}")
            return False
        self._trouble.is_over()
        return True
