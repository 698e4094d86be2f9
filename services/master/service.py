"""`percolator serve master`: a master on the store that its settings name.

A simulation runs `master_service` on a store of its own, without the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import Field, field_validator, model_validator

from percolator.services.chassis.cluster_store import (
    BucketClusterStore,
    ClusterStore,
    DirectoryStore,
    RowClusterStore,
    opened,
)
from percolator.services.chassis.coordinator import (
    GRACE_SECONDS_MIN,
    Coordinator,
    CoordinatorTimes,
    LivedTime,
)
from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.rpc import Exposed
from percolator.services.chassis.settings import DialAddress, ListenAddress, StoreSettings, load
from percolator.services.master.collection import CollectionTimes, OracleTime
from percolator.services.master.handlers import (
    ClusterHandler,
    MasterHandler,
    RowMasterHandler,
    TableHandler,
)
from percolator.services.master.leader import Leader, MasterTimes, begin_tablet_term
from percolator.services.master.map_store import decoded, decoded_catalogue
from percolator.services.master.master import Master
from percolator.services.master.registry import Registry
from percolator.services.master.row_term import begin_row_term
from percolator.services.master.server_watch import WatchTimes
from percolator.services.master.tablet_changes import BalanceLimits
from percolator.services.master.tablet_data import BucketTablets, DirectoryTablets, TabletData
from percolator.services.master.term import Term
from percolator.timestamps import seconds_between
from percolator.v1 import cluster_pb2, master_pb2
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.cluster_clock import majority

_SPLIT_BYTES_IN_BUCKET = 256 << 20


class MasterSettings(StoreSettings):
    """The settings of the master."""

    service: ClassVar[str] = "master"

    listen: ListenAddress = "127.0.0.1:7100"
    """host:port to serve on; port 0 is any free one."""

    store: Annotated[str, Field(min_length=1)]
    """The store root, a directory that all servers of the cluster share. Or a row store, which
    then keeps everything, including all cells: bigtable://PROJECT/INSTANCE?profile=NAME."""

    request_bytes_total_max: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 64 << 20
    """The memory for requests that arrive or are being answered. One connection may use a quarter
    of it, one client half; administrators and servers have as much of their own."""

    server_silence_seconds: Annotated[float, Field(ge=2.0, le=3_600)] = 5.0
    """A server that has not reported for this long is no longer listed."""

    servers_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Servers registered at once."""

    tablets_max: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """Tablets in all tables together."""

    lease_seconds: Annotated[float, Field(ge=0.5, le=3_600)] = 3.0
    """A tablet server that is silent for this long loses its tablets. A killed one loses them at
    once. Nothing that a server does after it has lost a tablet is acknowledged."""

    gather_seconds: Annotated[float, Field(ge=0, le=60)] = 1.0
    """How long tablets wait for more servers after the first one has registered."""

    balance_seconds: Annotated[float, Field(ge=0.1, le=86_400)] = 5.0
    """The pause between rounds of measuring, splitting and moving tablets."""

    quiet_seconds: Annotated[float, Field(ge=0, le=86_400)] = 10.0
    """After a server came or went, no tablet is moved for balance for this long."""

    split_bytes: Annotated[int, Field(ge=64 << 10, le=1 << 50)] = 1 << 30
    """A larger tablet is split, unless its table has its own value. In a bucket 256 MiB by default:
    who opens a tablet downloads it, at 100 MB/s in less than 3 s."""

    collection_seconds: Annotated[float, Field(ge=0.1, le=86_400)] = 60.0
    """The pause between rounds of collecting old versions."""

    retention_seconds: Annotated[float, Field(ge=1, le=100 * 365 * 86_400)] = 3600.0
    """How long old versions are kept in tables without a value of their own."""

    retention_min_seconds: Annotated[float, Field(ge=1, le=86_400)] = 60.0
    """No table may keep old versions for less. Set it longer than any transaction takes."""

    client_held_seconds_max: Annotated[float, Field(ge=1, le=100 * 365 * 86_400)] = 3 * 86_400.0
    """How much older than the longest retention of a table the history is that a session or pin of
    a client, or a session of a server, may hold back. An older pin ends, and an older transaction
    or snapshot fails."""

    admin_held_seconds_max: Annotated[float, Field(ge=0, le=100 * 365 * 86_400)] = 0.0
    """As `client_held_seconds_max`, for sessions and pins of administrators; 0 means no limit.
    Without TLS, and with any_certificate_is_admin, all programs are administrators."""

    sweep_seconds: Annotated[float, Field(ge=1, le=7 * 86_400)] = 3600.0
    """In a bucket: the pause between sweeps, which delete what tablets need no more. Each reads the
    end of every tablet's log. What one finds is deleted by a later one, an hour later at least."""

    leader_silence_seconds: Annotated[float, Field(ge=GRACE_SECONDS_MIN, le=3_600)] | None = None
    """A leading master that is silent for this long is replaced by a standby. By default 3, and 6
    in a bucket, where a shorter time costs more calls."""

    def times(self) -> MasterTimes:
        """The times as the leader takes them."""
        return MasterTimes(
            WatchTimes(lease_seconds=self.lease_seconds),
            BalanceLimits(
                round_seconds=self.balance_seconds,
                quiet_seconds=self.quiet_seconds,
                split_bytes=self._split_bytes(),
            ),
            CollectionTimes(
                self.collection_seconds,
                self.retention_seconds,
                self.retention_min_seconds,
                self.client_held_seconds_max,
                self.admin_held_seconds_max,
            ),
            self.gather_seconds,
        )

    def _split_bytes(self) -> int:
        is_given = "split_bytes" in self.model_fields_set
        return self.split_bytes if is_given or self.bucket is None else _SPLIT_BYTES_IN_BUCKET

    @model_validator(mode="after")
    def _keeps_long_enough(self) -> Self:
        if self.retention_seconds < self.retention_min_seconds:
            raise ValueError(
                f"retention_seconds: {self.retention_seconds:g} is below retention_min_seconds, "
                f"{self.retention_min_seconds:g}"
            )
        return self

    @field_validator("masters")
    @classmethod
    def _stands_alone(cls, masters: tuple[DialAddress, ...]) -> tuple[DialAddress, ...]:
        # It would ask another master for the cluster's id, while that one asks this one.
        if masters:
            raise ValueError("must be empty for a master; masters find each other in the store")
        return masters


_KIND_PREFIX = "SERVICE_KIND_"


class MasterMetrics(Collector):
    """Collects `percolator_master_*`."""

    def __init__(
        self,
        own_address: str,
        registry: Registry,
        master: Master[Any, Any],
        store: ClusterStore,
    ) -> None:
        self._own_address = own_address
        self._registry = registry
        self._master = master
        self._store = store

    def collect(self) -> Iterator[Metric]:
        servers = GaugeMetricFamily(
            "percolator_master_servers", "Servers that reported recently.", labels=["kind"]
        )
        for kind, count in sorted(Counter(self._registry.kinds()).items()):
            name = ServiceKind.Name(kind).removeprefix(_KIND_PREFIX).lower()
            servers.add_metric([name], count)
        yield servers
        dangers = self._store.dangers if isinstance(self._store, BucketClusterStore) else ()
        yield GaugeMetricFamily(
            "percolator_master_store_dangers",
            "Rules by which the bucket removes or archives objects of the cluster.",
            len(dangers),
        )
        yield from self._leader_metrics()

    def _leader_metrics(self) -> Iterator[Metric]:
        leader = self._master.leader
        yield GaugeMetricFamily(
            "percolator_master_leading", "1 while this master leads.", int(leader is not None)
        )
        if leader is None:
            return
        tables = leader.stored.current.tables
        yield GaugeMetricFamily("percolator_master_tables", "Tables.", len(tables))
        yield CounterMetricFamily(
            "percolator_master_map_changes",
            "Durable changes of the map.",
            leader.stored.changes,
        )
        yield from _clock_metrics(self._own_address, self._registry, leader.oracle_time)
        if isinstance(leader, Leader):
            tablets = leader.store.current.tablets
            served = sum(map(leader.assignment.is_served, tablets.values()))
            yield GaugeMetricFamily("percolator_master_tablets", "Tablets.", len(tablets))
            yield GaugeMetricFamily(
                "percolator_master_tablets_served",
                "Tablets that their servers report as served.",
                served,
            )
        yield from _collection_metrics(leader)


def _clock_metrics(
    own_address: str, registry: Registry, oracle_time: OracleTime
) -> Iterator[Metric]:
    """All compared with what most clocks say: this master's own may be the one that is wrong."""
    leads = {own_address: 0}
    for server in registry.servers():
        if server.HasField("clock_lead_milliseconds"):
            leads[server.address] = server.clock_lead_milliseconds
    agreed = majority(leads) or 0
    clocks = GaugeMetricFamily(
        "percolator_master_clock_lead_seconds",
        "How far a server's wall clock is ahead of most others; negative while it lags.",
        labels=["address"],
    )
    for address, lead in sorted(leads.items()):
        clocks.add_metric([address], (lead - agreed) / 1000)
    yield clocks
    timestamps = oracle_time.lead_milliseconds
    if timestamps is not None:
        yield GaugeMetricFamily(
            "percolator_master_timestamp_lead_seconds",
            "How far the oracle's timestamps are ahead of most clocks; negative while they lag.",
            (timestamps - agreed) / 1000,
        )


def _collection_metrics(leader: Term[Any]) -> Iterator[Metric]:
    collection, now = leader.collection, leader.now()
    yield CounterMetricFamily(
        "percolator_master_collection_rounds", "Completed rounds of collection.", collection.rounds
    )
    yield CounterMetricFamily(
        "percolator_master_collection_failures",
        "Failed rounds of collection.",
        collection.failures,
    )
    yield GaugeMetricFamily(
        "percolator_master_collection_age_seconds",
        "Since the last completed round of collection, or since this master began to lead.",
        now - (collection.finished_at or leader.began_at),
    )
    yield GaugeMetricFamily(
        "percolator_master_collection_held",
        "1 while a session or pin holds back the collection of a table's history.",
        int(collection.held),
    )
    yield GaugeMetricFamily(
        "percolator_master_collection_held_seconds",
        "How much older the history is that a session or pin needs than what tables would keep.",
        collection.held_seconds,
    )
    yield CounterMetricFamily(
        "percolator_master_old_locks_settled",
        "Locks resolved before history was collected.",
        collection.old_locks_resolved,
    )
    ages = GaugeMetricFamily(
        "percolator_master_safe_point_age_seconds",
        "How much history could be read when the last round of collection began.",
        labels=["table"],
    )
    for table in leader.stored.current.tables.values():
        safe_point = collection.known_safe_point(table.table_id)
        if safe_point:
            ages.add_metric([table.name], seconds_between(safe_point, collection.now))
    yield ages


_ELECTION_SECONDS = 1.0


@asynccontextmanager
async def master_service(
    host: Host[MasterSettings],
    store: ClusterStore,
    *,
    poll_seconds: float = CoordinatorTimes.poll_seconds,
) -> AsyncIterator[list[Exposed]]:
    """A master of the cluster that its store belongs to: the leader or, as a standby, one that
    looks every `poll_seconds`."""
    settings, world = host.settings, host.world
    identity = await store.establish_identity()
    host.log.info("serving a cluster", cluster_id=identity.cluster_id, store=store.name)
    store.watch(host)
    registry = Registry(
        world.clock,
        LivedTime(world.clock),
        silence_milliseconds=round(settings.server_silence_seconds * 1000),
        servers_max=settings.servers_max,
    )
    silence = settings.leader_silence_seconds or store.silence_seconds
    coordinator = store.coordinator(
        CoordinatorTimes(grace_seconds=silence, poll_seconds=poll_seconds)
    )
    master, handler = _made(host, store, coordinator, registry)
    cluster = ClusterHandler(world.clock, identity, host.announced, registry, master, store.rows())
    host.metrics_registry.register(MasterMetrics(host.announced.address, registry, master, store))
    tasks = [
        host.background("watch", cluster.watch_forever()),
        host.background("list this master", master.keep_listed()),
        host.background("lead", master.run()),
    ]
    await master.candidacy.until_decided(_ELECTION_SECONDS)
    try:
        yield [
            Exposed(cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"], cluster),
            Exposed(master_pb2.DESCRIPTOR.services_by_name["MasterService"], handler),
        ]
    finally:
        for task in tasks:
            task.cancel()
        await coordinator.close()


def _made(
    host: Host[MasterSettings], store: ClusterStore, coordinator: Coordinator, registry: Registry
) -> tuple[Master[Any, Any], TableHandler[Any, Any]]:
    """A master of the kind that the store asks for, and its handler: this is where they part."""
    settings, world, own = host.settings, host.world, host.announced
    times = settings.times()
    if isinstance(store, RowClusterStore):
        begin_over_rows = partial(begin_row_term, world, registry, store, times.collection)
        over_rows = Master(world, own, coordinator, registry, begin_over_rows, decoded_catalogue)
        return over_rows, RowMasterHandler(world.clock, over_rows, store.name)
    if isinstance(store, DirectoryStore):
        data: TabletData = DirectoryTablets(store.files, store.root)
    elif isinstance(store, BucketClusterStore):
        data = BucketTablets(store, world, sweep_seconds=settings.sweep_seconds)
    else:
        raise TypeError(f"no master is over {type(store).__name__}")
    begin = partial(
        begin_tablet_term,
        world,
        data,
        registry,
        times=times,
        tablets_max=settings.tablets_max,
    )
    over_tablets = Master(world, own, coordinator, registry, begin, decoded)
    return over_tablets, MasterHandler(world.clock, over_tablets)


@asynccontextmanager
async def build(host: Host[MasterSettings]) -> AsyncIterator[list[Exposed]]:
    """A master on the store that its settings name."""
    async with opened(host) as store, master_service(host, store) as exposed:
        yield exposed


def main(arguments: Sequence[str]) -> int:
    """`percolator serve master`: returns the exit code."""
    return run(load(MasterSettings, arguments), ServiceKind.SERVICE_KIND_MASTER, build)
