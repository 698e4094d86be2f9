"""An oracle on the store it is given, without its process: what a simulation runs too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from percolator.v1 import oracle_pb2
from services.chassis.coordinator.directory import CoordinatorTimes, DirectoryCoordinator
from services.chassis.host import Host
from services.chassis.rpc import Exposed
from services.oracle.candidate import Candidate, Site
from services.oracle.handler import OracleHandler
from services.oracle.metrics import OracleMetrics
from services.oracle.probe import Probe
from services.oracle.settings import OracleSettings

_ELECTION_SECONDS = 1.0
_PATIENCE_SECONDS = 2.0
"""Beyond the silence of a leader, for one that refuses to be the second."""


@asynccontextmanager
async def oracle_service(
    host: Host[OracleSettings], store: Path, *, poll_seconds: float = CoordinatorTimes.poll_seconds
) -> AsyncIterator[list[Exposed]]:
    """An oracle that leads or, as a standby, waits for it and looks so often."""
    settings, clock = host.settings, host.world.clock
    silence = settings.leader_silence_seconds
    coordinator = DirectoryCoordinator(
        host.files,
        clock,
        store,
        CoordinatorTimes(grace_seconds=silence, poll_seconds=poll_seconds),
    )
    site = Site(
        clock, host.files, store, host.announced.address, host.cluster_id, settings.limits()
    )
    probe = Probe(host.world, settings.masters, grace_seconds=silence)
    candidate = Candidate(site, coordinator, probe if settings.standby else None)
    try:
        if not settings.standby:
            await candidate.lead_within(silence + _PATIENCE_SECONDS)
        leading = host.background("lead", candidate.run())
        await candidate.until_decided(_ELECTION_SECONDS)
        host.metrics_registry.register(OracleMetrics(candidate, host.files))
        service = oracle_pb2.DESCRIPTOR.services_by_name["OracleService"]
        try:
            yield [Exposed(service, OracleHandler(candidate.serving))]
        finally:
            leading.cancel()
    finally:
        await coordinator.close()
