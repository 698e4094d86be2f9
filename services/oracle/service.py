"""`percolator serve oracle`: an oracle on the store that its settings name.

A simulation runs `oracle_service` on a store of its own, without the process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from percolator.services.chassis.coordinator.times import CoordinatorTimes
from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.serving.rpc import Exposed
from percolator.services.chassis.settings.loading import load
from percolator.services.chassis.store_kinds.cluster_store import ClusterStore
from percolator.services.chassis.store_kinds.opening import opened
from percolator.services.oracle.candidate import Candidate, Site
from percolator.services.oracle.handler import OracleHandler
from percolator.services.oracle.metrics import OracleMetrics
from percolator.services.oracle.other_clocks import OtherClocks
from percolator.services.oracle.probe import Probe
from percolator.services.oracle.settings import OracleSettings
from percolator.v1 import oracle_pb2
from percolator.v1.cluster_pb2 import ServiceKind

_ELECTION_SECONDS = 1.0
_PATIENCE_SECONDS = 2.0
"""How much longer than a leader's silence an oracle without --standby tries to lead."""


@asynccontextmanager
async def oracle_service(
    host: Host[OracleSettings],
    store: ClusterStore,
    *,
    poll_seconds: float = CoordinatorTimes.poll_seconds,
) -> AsyncIterator[list[Exposed]]:
    """An oracle that leads or, as a standby, waits and looks every `poll_seconds`."""
    settings, clock = host.settings, host.world.clock
    silence = settings.leader_silence_seconds
    coordinator = store.coordinator(
        CoordinatorTimes(grace_seconds=silence, poll_seconds=poll_seconds)
    )
    rows = store.rows()
    site = Site(
        clock,
        store.name,
        host.announced.address,
        host.cluster_id,
        settings.limits(),
        rows.epoch_milliseconds if rows is not None else 0,
    )
    probe = Probe(host.world, settings.masters, grace_seconds=silence)
    clocks = OtherClocks(host.world, settings.masters, site.address)
    candidate = Candidate(site, coordinator, probe if settings.standby else None, clocks)
    store.watch(host)
    try:
        if not settings.standby:
            await candidate.lead_within(silence + _PATIENCE_SECONDS)
        leading = host.background("lead", candidate.run())
        await candidate.candidacy.until_decided(_ELECTION_SECONDS)
        host.metrics_registry.register(OracleMetrics(candidate, host.files))
        service = oracle_pb2.DESCRIPTOR.services_by_name["OracleService"]
        try:
            yield [Exposed(service, OracleHandler(candidate.candidacy.serving))]
        finally:
            leading.cancel()
    finally:
        await coordinator.close()


@asynccontextmanager
async def build(host: Host[OracleSettings]) -> AsyncIterator[list[Exposed]]:
    """An oracle on the store that its settings name."""
    async with opened(host) as store:
        await store.refuse_other_cluster(host.cluster_id)
        async with oracle_service(host, store) as exposed:
            yield exposed


def main(arguments: Sequence[str]) -> int:
    """`percolator serve oracle`: returns the exit code."""
    return run(load(OracleSettings, arguments), ServiceKind.SERVICE_KIND_ORACLE, build)
