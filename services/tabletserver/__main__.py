"""python -m services.tabletserver: serves tablets. `dump PATH` shows a closed one instead."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial

from percolator.v1.cluster_pb2 import ServiceKind
from services.chassis import descriptors
from services.chassis.files import RealFiles
from services.chassis.host import Host
from services.chassis.lifecycle import run
from services.chassis.rpc import Exposed
from services.chassis.settings import load
from services.tabletserver import dump, host_limits
from services.tabletserver.disk_threads import DiskThreads
from services.tabletserver.service import tablet_server
from services.tabletserver.settings import TabletServerSettings
from services.tabletserver.store_root import open_store_root
from services.tabletserver.tablet_store import Budget, SharedDirectoryStore


@asynccontextmanager
async def build(host: Host[TabletServerSettings]) -> AsyncIterator[list[Exposed]]:
    """A tablet server on its store root, without any tablet yet."""
    settings = host.settings
    root = await open_store_root(host.files, settings, host.cluster_id, host.log)
    budget = Budget(
        settings.write_buffers_bytes, settings.block_caches_bytes, descriptors.raise_limit()
    )
    # Of their own: the tablets of a dead server are taken over side by side, each in its order.
    files = RealFiles(threads=settings.write_threads)
    with DiskThreads(settings.write_threads, "leveldb") as threads, closing(files):
        store = SharedDirectoryStore(files, root, threads, budget=budget)
        async with tablet_server(host, store, partial(host_limits.free_bytes, root)) as exposed:
            yield exposed


if __name__ == "__main__":
    if sys.argv[1:2] == ["dump"]:
        sys.exit(dump.main(sys.argv[2:]))
    sys.exit(run(load(TabletServerSettings), ServiceKind.SERVICE_KIND_TABLET_SERVER, build))
