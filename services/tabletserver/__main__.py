"""python -m services.tabletserver: serves tablets. `dump PATH` shows a closed one instead."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from percolator.v1 import tabletserver_pb2
from percolator.v1.cluster_pb2 import ServiceKind
from services.chassis.lifecycle import Host, run
from services.chassis.rpc import Exposed
from services.chassis.settings import load
from services.tabletserver import dump, host_limits
from services.tabletserver.collector import collect_seldom
from services.tabletserver.disk_space import DiskSpace
from services.tabletserver.disk_threads import DiskThreads
from services.tabletserver.handler import TabletServerHandler
from services.tabletserver.metrics import TabletServerMetrics
from services.tabletserver.settings import TabletServerSettings
from services.tabletserver.store_root import open_store_root
from services.tabletserver.tablet_store import Budget, SharedDirectoryStore
from services.tabletserver.tablets import Tablets


@asynccontextmanager
async def build(host: Host[TabletServerSettings]) -> AsyncIterator[list[Exposed]]:
    """A tablet server on its store root, without any tablet yet."""
    settings, clock = host.settings, host.world.clock
    collect_seldom()
    root = await open_store_root(host.files, settings, host.cluster_id, host.log)
    disk = DiskSpace(
        partial(host_limits.free_bytes, root),
        clock,
        host.log,
        reserve_bytes=settings.disk_reserve_bytes,
    )
    disk.check()
    host.background("disk space", disk.watch())
    with DiskThreads(settings.write_threads, "leveldb") as threads:
        budget = Budget(settings.block_caches_bytes, host_limits.raise_descriptor_limit())
        store = SharedDirectoryStore(host.files, root, threads, budget=budget)
        tablets = Tablets(
            store,
            clock,
            settings.limits(),
            host.background,
            host.log,
            tablets_warn=settings.tablets_warn,
        )
        handler = TabletServerHandler(
            tablets,
            disk,
            clock,
            host.log,
            settings.request_limits(),
            server_id=host.server_id,
        )
        host.metrics_registry.register(TabletServerMetrics(tablets, disk, handler.counts))
        service = tabletserver_pb2.DESCRIPTOR.services_by_name["TabletServerService"]
        try:
            yield [Exposed(service, handler)]
        finally:
            await tablets.close_all()


if __name__ == "__main__":
    if sys.argv[1:2] == ["dump"]:
        sys.exit(dump.main(sys.argv[2:]))
    sys.exit(run(load(TabletServerSettings), ServiceKind.SERVICE_KIND_TABLET_SERVER, build))
