"""`percolator serve oracle`: an oracle on the store that its settings name.

A simulation runs `oracle_service` on a store of its own, without the process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, ClassVar

from prometheus_client.metrics_core import Metric
from pydantic import Field

from percolator.bucket.log import CLOCK_RATES_RATIO_MAX
from percolator.services.chassis.cluster_store import ClusterStore, opened
from percolator.services.chassis.coordinator import GRACE_SECONDS_MIN, CoordinatorTimes
from percolator.services.chassis.files import Files
from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.metrics import ServiceMetrics
from percolator.services.chassis.rpc import Exposed
from percolator.services.chassis.settings import FramedSettings, ListenAddress, load
from percolator.services.oracle.candidate import Candidate, OtherClocks, Probe, Site
from percolator.services.oracle.oracle import LEADING_SPEED, OracleHandler, OracleLimits
from percolator.v1 import oracle_pb2
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.timestamp_source import ATTEMPT_SECONDS_MAX

_DEFAULTS = OracleLimits()
LEASE_SECONDS_MAX = 5.0


class OracleSettings(FramedSettings):
    """The settings of the oracle."""

    service: ClassVar[str] = "oracle"

    listen: ListenAddress = "127.0.0.1:7101"
    """host:port to serve on; port 0 is any free one."""

    request_bytes_max: Annotated[int, Field(ge=1_024, le=1 << 20)] = 1 << 20
    """The size of the largest request that is accepted."""

    request_bytes_total_max: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 64 << 20
    """The memory for requests that arrive or are being answered. One connection may use a quarter
    of it, one client half; administrators and servers have as much of their own."""

    store: Annotated[str, Field(min_length=1)]
    """The store root, or bigtable://PROJECT/INSTANCE?profile=NAME: the mark is kept there, and one
    oracle at a time leads."""

    window_seconds: Annotated[float, Field(ge=0.5, lt=3.0)] = _DEFAULTS.window_seconds
    """How far ahead the mark is set. After a crash time jumps by at most this, so it has to be
    below the time to live of locks, 3 s. A shorter one costs more fsyncs: two per 0.7 windows."""

    count_max: Annotated[int, Field(ge=1, le=10_000_000)] = _DEFAULTS.count_max
    """Timestamps in one request."""

    wait_seconds_max: Annotated[float, Field(gt=0, lt=ATTEMPT_SECONDS_MAX)] = (
        _DEFAULTS.wait_seconds_max
    )
    """How long a request waits for a disk that is slow to extend the mark. The caller waits 2 s, so
    a shorter wait lets it learn the reason."""

    clock_jump_seconds_max: Annotated[float, Field(ge=1, le=86_400)] = _DEFAULTS.jump_seconds_max
    """A wall clock that jumps further forward than this is not followed: time advances steadily."""

    follow_clock_jumps: bool = _DEFAULTS.follow_jumps
    """Follow the wall clock however far it jumps forward. This cannot be undone."""

    leading_speed: Annotated[float, Field(ge=0.1, le=LEADING_SPEED)] = _DEFAULTS.leading_speed
    """How fast timestamps advance while the wall clock is behind them, relative to real time. With
    0.5 a lead of two hours is gone in four; meanwhile locks live twice as long as they say."""

    standby: bool = False
    """Wait while another oracle leads on this store, instead of refusing to start, and replace it
    when it is gone or silent."""

    leader_silence_seconds: Annotated[float, Field(ge=GRACE_SECONDS_MIN, le=3_600)] | None = None
    """A leading oracle that is silent for this long is replaced by a standby. By default 3, and 6
    in a bucket, where a shorter time costs more calls."""

    lease_seconds: Annotated[float, Field(ge=0, le=LEASE_SECONDS_MAX)] = 0.0
    """With a bucket or a row store: how long a leading oracle answers without asking the store
    whether it still leads; 0: never. If it dies, there are no timestamps for so much longer."""

    def limits(self) -> OracleLimits:
        """The bounds as the core takes them."""
        return OracleLimits(
            window_seconds=self.window_seconds,
            count_max=self.count_max,
            wait_seconds_max=self.wait_seconds_max,
            jump_seconds_max=self.clock_jump_seconds_max,
            leading_speed=self.leading_speed,
            follow_jumps=self.follow_clock_jumps,
        )


class OracleMetrics(ServiceMetrics):
    """Collects `percolator_oracle_*`."""

    prefix = "percolator_oracle_"

    def __init__(self, candidate: Candidate, files: Files) -> None:
        self._candidate = candidate
        self._files = files

    def collect(self) -> Iterator[Metric]:
        counts = self._candidate.counts
        yield self.counter("timestamps", "Timestamps handed out.", counts.timestamps)
        yield self.counter("mark_extensions", "Marks made durable.", counts.extensions)
        yield self.counter(
            "mark_extension_failures",
            "Marks that could not be made durable.",
            counts.extension_failures,
        )
        yield self.counter("fsyncs", "Waits for the disk.", self._files.fsyncs)
        yield self.counter("waits", "Requests that had to wait for an extension.", counts.waits)
        yield self.counters("refused", "Requests refused, by error.", "error", counts.refused)
        oracle = self._candidate.oracle
        yield self.gauge("leading", "1 at the oracle that leads.", oracle is not None)
        if oracle is None:
            return
        yield self.gauge(
            "wall_clock_lead_seconds",
            "How far the wall clock is ahead of the timestamps; negative while it lags.",
            oracle.wall_lead_seconds,
        )
        yield self.gauge(
            "mark_timestamp_seconds",
            "The durable mark, in seconds since 1970.",
            oracle.mark_milliseconds / 1000,
        )


_ELECTION_SECONDS = 1.0
_PATIENCE_SECONDS = 2.0
"""How much longer than a leader's silence, and its lease, an oracle without --standby tries to
lead."""


@asynccontextmanager
async def oracle_service(
    host: Host[OracleSettings],
    store: ClusterStore,
    *,
    poll_seconds: float = CoordinatorTimes.poll_seconds,
) -> AsyncIterator[list[Exposed]]:
    """An oracle that leads or, as a standby, waits and looks every `poll_seconds`."""
    settings, clock = host.settings, host.world.clock
    silence = settings.leader_silence_seconds or store.silence_seconds
    coordinator = store.coordinator(
        CoordinatorTimes(
            grace_seconds=silence,
            poll_seconds=poll_seconds,
            lease_seconds=settings.lease_seconds,
        )
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
            patience = silence + _PATIENCE_SECONDS
            if settings.directory is None:
                patience += LEASE_SECONDS_MAX * CLOCK_RATES_RATIO_MAX
            await candidate.lead_within(patience)
        leading = host.background("lead", candidate.run())
        await candidate.candidacy.until_decided(_ELECTION_SECONDS)
        host.metrics_registry.register(OracleMetrics(candidate, host.files))
        service = oracle_pb2.DESCRIPTOR.services_by_name["OracleService"]
        try:
            yield [Exposed(service, OracleHandler(candidate.candidacy))]
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
