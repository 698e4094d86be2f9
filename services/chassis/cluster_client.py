"""Connects a service that is a client of its own cluster, such as a gateway or a worker."""

from __future__ import annotations

from percolator.aio.connecting import connect_to
from percolator.aio.database import Database
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from services.chassis.host import Host, SettingsT

_CONNECT_SECONDS = 600.0
"""Services start in any order, and the chassis cancels a start that is no longer wanted."""


async def connected(host: Host[SettingsT]) -> Database:
    """Connects to the cluster; the caller closes the database. The limits are those of the release:
    all gateways have to store values in the same way, or two that commit the same transaction
    would each rely on the other."""
    return await connect_to(
        host.world,
        host.settings.masters,
        Limits(),
        RetryPolicy(),
        description=f"{host.settings.service} {host.announced.address}",
        timeout_seconds=_CONNECT_SECONDS,
    )
