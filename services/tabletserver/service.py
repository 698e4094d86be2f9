"""`percolator serve tabletserver`: a tablet server on its store root.

A simulation runs `tablet_server` on a store of its own, without the process.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

from structlog.stdlib import BoundLogger

from percolator.errors import InvalidArgument, NotReady, PercolatorError, Unavailable
from percolator.services.chassis import process
from percolator.services.chassis.cluster_store import (
    FILE_NAME,
    check_identity,
    opened_bucket,
    read_identity,
)
from percolator.services.chassis.files import (
    DiskThreads,
    Files,
    RealFiles,
    make_durable_directory,
    refuse_network,
)
from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.rpc import Exposed
from percolator.services.chassis.settings import load
from percolator.services.tabletserver import dump
from percolator.services.tabletserver.bucket_store import BucketTabletStore, LogSettings
from percolator.services.tabletserver.history_collector import HistoryCollector
from percolator.services.tabletserver.leveldb_cache import LevelDBCaches, boot_id
from percolator.services.tabletserver.locks_in_the_way import LocksInTheWay, described_by
from percolator.services.tabletserver.metrics import TabletServerMetrics
from percolator.services.tabletserver.own_steps import OwnSteps
from percolator.services.tabletserver.primaries_elsewhere import PrimariesElsewhere
from percolator.services.tabletserver.rights import RowRights, refused
from percolator.services.tabletserver.settings import TabletServerSettings
from percolator.services.tabletserver.storage import (
    Budget,
    DiskSpace,
    SharedDirectoryStore,
    TabletStore,
)
from percolator.services.tabletserver.tablets import Tablets, TabletServerHandler
from percolator.tablet.state import TimestampGuard
from percolator.v1 import tabletserver_pb2
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.v1.master_pb2 import DrainServerRequest
from percolator.wire.methods import DRAIN_SERVER
from percolator.wire.timestamp_source import OracleOfCluster
from percolator.world import Network

# At shutdown, the master moves this server's tablets, so that no client waits for a lease.
#
# If anything goes wrong here, the only cost is a pause: the tablets are closed anyway, and their
# next owners find everything.

_PART_OF_DRAIN = 0.75
"""The rest of the time is for closing tablets that could not be moved."""


async def hand_over(
    network: Network,
    masters: tuple[str, ...],
    server_id: str,
    log: BoundLogger,
    *,
    drain_seconds: float,
) -> None:
    """Returns when the tablets are served elsewhere, or when that is not possible."""
    request = DrainServerRequest(server=server_id)
    for address in masters:
        try:
            await network.unary(address, DRAIN_SERVER)(request, drain_seconds * _PART_OF_DRAIN)
        except (NotReady, Unavailable) as error:
            # A standby, or no master at all: the next address may be the leader's.
            log.info("not handed over by this master", master=address, reason=str(error))
        except PercolatorError as error:
            log.info("tablets are closed instead of moved", reason=str(error))
            return
        else:
            log.info("all tablets are served elsewhere")
            return


# The store root as a tablet server finds it at start: usable, coherent, of the right cluster.


async def open_store_root(
    files: Files, settings: TabletServerSettings, cluster_id: str, log: BoundLogger
) -> Path:
    """The path of the store root; `InvalidArgument` names what is wrong with it."""
    root = settings.store_root
    await refuse_network(files, root, settings, log)
    try:
        status = await files.stat(root)
    except FileNotFoundError:
        raise InvalidArgument("store", f"{root} does not exist") from None
    if not status.is_directory:
        raise InvalidArgument("store", f"{root} is not a directory")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidArgument("store", f"{root} is not writable")
    if settings.masters:
        await check_identity(files, root, cluster_id)
    else:
        if FILE_NAME in await files.list(root):
            await read_identity(files, root)  # refuses a format that this release does not know
        log.warning("standalone: no masters are configured, tablets are opened by hand")
    return root


@asynccontextmanager
async def cache_directory(files: Files, path: str) -> AsyncIterator[Path]:
    """The directory for caches, which this process has alone until the end."""
    if not path:
        with tempfile.TemporaryDirectory(prefix="percolator-cache-") as temporary:
            yield Path(temporary)
        return
    root = await asyncio.to_thread(Path(path).absolute)
    caches = root / _CACHES
    try:
        for directory in (root, caches):
            await make_durable_directory(files, directory)
        lock = await files.lock(root / _LOCK)
    except BlockingIOError:
        raise InvalidArgument("cache", f"another process uses {root}") from None
    except OSError as error:
        raise InvalidArgument("cache", f"{root} cannot be used: {error}") from None
    try:
        yield caches
    finally:
        lock.release()


_LOCK = "lock"
_CACHES = "caches"
SLOW_THREADS_MAX = 32
"""Databases that are opened, flushed or compacted at once, when others are stuck."""


@asynccontextmanager
async def tablet_server(
    host: Host[TabletServerSettings], store: TabletStore, root: Path
) -> AsyncIterator[list[Exposed]]:
    """Starts without tablets, and closes all at the end. `root` is where it needs disk space."""
    settings, clock, log = host.settings, host.world.clock, host.log
    free_bytes = partial(host.files.free_bytes, root)
    disk = DiskSpace(
        free_bytes,
        clock,
        log,
        reserve_bytes=settings.disk_reserve_bytes,
        store_trouble=host.store_trouble,
    )
    await disk.check()
    host.background("disk space", disk.watch())
    oracle = OracleOfCluster(host.world, settings.masters)
    # A server that runs alone has no oracle to ask.
    alone = not settings.masters
    primaries = PrimariesElsewhere(host.world, settings.masters)
    tablets = Tablets(
        store,
        clock,
        host.world.random,
        settings.limits(),
        host.background,
        log,
        guard=TimestampGuard.by_own_clock(clock) if alone else TimestampGuard(oracle.take, clock),
        timestamps=None if alone else oracle.take,
        commits=None if alone else primaries.commits,
        tablets_warn=settings.tablets_warn,
    )
    locks_in_the_way = LocksInTheWay(host)
    describe = described_by(host.world, settings.masters)
    rights = RowRights(refused if alone else describe)
    limits = settings.request_limits()
    collector = HistoryCollector(tablets, host.background, log)
    handler = TabletServerHandler(
        tablets,
        collector.raise_all,
        disk,
        clock,
        log,
        limits,
        server_id=host.server_id,
        watches=host.quotas.of("watches", "watches_max", settings.watches_max),
        rights=rights,
        own_steps=OwnSteps(rights, oracle.handed_out),
        resolve_locks=None if alone else locks_in_the_way.resolve,
    )
    host.metrics_registry.register(TabletServerMetrics(tablets, collector, disk, handler.counts))
    seconds = settings.drain_seconds

    async def drain() -> None:
        try:
            await hand_over(
                host.world.network, settings.masters, host.server_id, log, drain_seconds=seconds
            )
        finally:
            # Nothing else ends them, and the process would wait for them.
            tablets.watch.close()

    host.on_drain(drain)
    service = tabletserver_pb2.DESCRIPTOR.services_by_name["TabletServerService"]
    try:
        yield [Exposed(service, handler)]
    finally:
        await tablets.close_all()
        await primaries.close()
        await oracle.close()
        await locks_in_the_way.close()


@asynccontextmanager
async def build(host: Host[TabletServerSettings]) -> AsyncIterator[list[Exposed]]:
    """A tablet server on its store, without any tablets yet."""
    settings = host.settings
    budget = Budget(
        settings.write_buffers_bytes, settings.block_caches_bytes, process.raise_descriptor_limit()
    )
    number = settings.write_threads
    # Each with threads of its own, so that a call that is stuck holds up nothing else. Several for
    # takeovers: the tablets of a dead server are taken over concurrently, each in order.
    with (
        closing(RealFiles("takeovers", threads=number)) as files,
        closing(RealFiles("owned")) as owned,
        DiskThreads(number, "slow", threads_max=SLOW_THREADS_MAX, share_max=1) as slow,
        DiskThreads(number, "leveldb") as threads,
    ):
        if settings.bucket is not None:
            store = opened_bucket(host)
            if not settings.masters:
                raise InvalidArgument("masters", f"expected some: {store.name} is a cluster's")
            await store.refuse_other_cluster(host.cluster_id)
            async with cache_directory(host.files, settings.cache) as root:
                caches = LevelDBCaches(
                    root, threads, host.world.random, slow=slow, budget=budget, boot=boot_id()
                )
                in_bucket = BucketTabletStore(
                    store.large,
                    caches,
                    host.world.clock,
                    host.world.random,
                    host.log,
                    LogSettings(lease_seconds=settings.lease_seconds),
                )
                store.watch(host)
                async with tablet_server(host, in_bucket, root) as exposed:
                    yield exposed
            return
        root = await open_store_root(host.files, settings, host.cluster_id, host.log)
        host.watch_store(root)
        shared = SharedDirectoryStore(files, root, threads, owned=owned, slow=slow, budget=budget)
        async with tablet_server(host, shared, root) as exposed:
            yield exposed


def main(arguments: Sequence[str]) -> int:
    """`percolator serve tabletserver`: returns the exit code."""
    if arguments[:1] == ["dump"]:
        return dump.main(arguments[1:])
    return run(load(TabletServerSettings, arguments), ServiceKind.SERVICE_KIND_TABLET_SERVER, build)
