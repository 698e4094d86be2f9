"""A service that is a client of its own cluster, as a gateway and a worker are."""

from __future__ import annotations

from percolator.aio.connecting import connect_to
from percolator.aio.database import Database
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from services.chassis.host import Host, SettingsT

_CONNECT_SECONDS = 600.0
"""Services start in any order, and the chassis ends a start that is waited for no longer."""


async def connected(host: Host[SettingsT]) -> Database:
    """Whoever asks closes it. Limits are those of the release: all gateways have to store values in
    the same way, or two that commit one transaction would each rely on the other."""
    return await connect_to(
        host.world,
        host.settings.masters,
        Limits(),
        RetryPolicy(),
        description=f"{host.settings.service} {host.announced.address}",
        timeout_seconds=_CONNECT_SECONDS,
    )
