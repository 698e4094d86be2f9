"""The tablet server: serves tablets. `dump PATH` shows a closed one instead."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from percolator.services.chassis import descriptors
from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.serving.rpc import Exposed
from percolator.services.chassis.settings.loading import load
from percolator.services.chassis.store.disk_threads import DiskThreads
from percolator.services.chassis.store.real_files import RealFiles
from percolator.services.tabletserver import dump
from percolator.services.tabletserver.service import tablet_server
from percolator.services.tabletserver.settings import TabletServerSettings
from percolator.services.tabletserver.store_root import open_store_root
from percolator.services.tabletserver.tablet_store import Budget, SharedDirectoryStore
from percolator.v1.cluster_pb2 import ServiceKind

SLOW_THREADS_MAX = 32
"""Databases that are opened, flushed or compacted at once, when others are stuck."""


@asynccontextmanager
async def build(host: Host[TabletServerSettings]) -> AsyncIterator[list[Exposed]]:
    """A tablet server on its store root, without any tablets yet."""
    settings = host.settings
    root = await open_store_root(host.files, settings, host.cluster_id, host.log)
    budget = Budget(
        settings.write_buffers_bytes, settings.block_caches_bytes, descriptors.raise_limit()
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
        store = SharedDirectoryStore(files, root, threads, owned=owned, slow=slow, budget=budget)
        async with tablet_server(host, store) as exposed:
            yield exposed


if __name__ == "__main__":
    if sys.argv[1:2] == ["dump"]:
        sys.exit(dump.main(sys.argv[2:]))
    sys.exit(run(load(TabletServerSettings), ServiceKind.SERVICE_KIND_TABLET_SERVER, build))
