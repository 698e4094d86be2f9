"""What masters and oracles need of the place where their cluster keeps what must last."""

from __future__ import annotations

from typing import Protocol

from percolator.services.chassis.coordinator.interface import Coordinator
from percolator.services.chassis.coordinator.times import CoordinatorTimes
from percolator.services.chassis.host import AnyHost
from percolator.services.chassis.store.cluster_identity import ClusterIdentity
from percolator.v1.cluster_pb2 import RowStorePlace


class ClusterStore(Protocol):
    """The store of one cluster, as one process reaches it."""

    @property
    def name(self) -> str:
        """As `--store` names it."""
        ...

    async def establish_identity(self) -> ClusterIdentity:
        """The identity of the store, created if the store is empty."""
        ...

    async def refuse_other_cluster(self, cluster_id: str) -> None:
        """Raises unless the store may be that of the cluster. Empty: of any cluster."""
        ...

    def coordinator(self, times: CoordinatorTimes) -> Coordinator:
        """What all processes on this store agree on."""
        ...

    def watch(self, host: AnyHost) -> None:
        """Reports that this process does not serve while the store hangs, and ends the process when
        the store is gone."""
        ...

    def rows(self) -> RowStorePlace | None:
        """How clients reach the cells, if they are in this store. None: tablet servers have them.
        Known once the identity is."""
        ...
