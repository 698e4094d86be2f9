"""A directory that the servers of a cluster share: the store root."""

from __future__ import annotations

from pathlib import Path

from percolator.services.chassis.coordinator.directory import DirectoryCoordinator
from percolator.services.chassis.coordinator.times import CoordinatorTimes
from percolator.services.chassis.host import AnyHost
from percolator.services.chassis.store.cluster_identity import (
    ClusterIdentity,
    establish_identity,
    refuse_other_cluster,
)
from percolator.services.chassis.store.files import Files, make_durable_directory
from percolator.v1.cluster_pb2 import RowStorePlace
from percolator.world import World


class DirectoryStore:
    """A `percolator.services.chassis.store_kinds.cluster_store.ClusterStore`."""

    def __init__(self, files: Files, root: Path, world: World) -> None:
        self.files = files
        self.root = root
        self._world = world

    @property
    def name(self) -> str:
        return str(self.root)

    async def establish_identity(self) -> ClusterIdentity:
        return await establish_identity(self.files, self.root, self._world.random)

    async def refuse_other_cluster(self, cluster_id: str) -> None:
        await refuse_other_cluster(self.files, self.root, cluster_id)
        # An oracle without masters may have a disk of its own.
        await make_durable_directory(self.files, self.root)

    def coordinator(self, times: CoordinatorTimes) -> DirectoryCoordinator:
        return DirectoryCoordinator(self.files, self._world.clock, self.root, times)

    def watch(self, host: AnyHost) -> None:
        host.watch_store(self.root)

    def rows(self) -> RowStorePlace | None:
        return None
