"""Connects a service that is a client of its own cluster, such as a gateway or a worker."""

from __future__ import annotations

from percolator.aio.connecting import connect_to
from percolator.aio.database import Database
from percolator.errors import ExecutionUnknown, NotExecuted
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.services.chassis.host import Host, SettingsT

_CONNECT_SECONDS = 600.0
"""Services start in any order, and the chassis cancels a start that is no longer wanted."""

_ATTEMPT_SECONDS = 10.0
"""The time for one attempt, which its masters share: a silent one must not take all of it."""

_AGAIN_SECONDS = 0.25


async def connected(host: Host[SettingsT]) -> Database:
    """Connects to the cluster; the caller closes the database. The limits are those of the release:
    all gateways have to store values in the same way, or two that commit the same transaction
    would each rely on the other."""
    clock, said = host.world.clock, ""
    deadline = clock.monotonic_seconds() + _CONNECT_SECONDS
    while True:
        try:
            return await _attempt(host)
        except (NotExecuted, ExecutionUnknown) as error:
            if clock.monotonic_seconds() >= deadline:
                raise
            if str(error) != said:
                said = str(error)
                host.log.info("waiting for the cluster", reason=said)
        await clock.sleep(_AGAIN_SECONDS)


async def _attempt(host: Host[SettingsT]) -> Database:
    return await connect_to(
        host.world,
        host.settings.masters,
        Limits(),
        RetryPolicy(),
        description=f"{host.settings.service} {host.announced.address}",
        timeout_seconds=_ATTEMPT_SECONDS,
    )
