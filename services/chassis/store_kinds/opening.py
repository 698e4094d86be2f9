"""Opens the store that a service's settings name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from percolator.bigtable.connection import Connection
from percolator.services.chassis.host import Host
from percolator.services.chassis.settings.service_settings import StoreSettings
from percolator.services.chassis.store.file_systems import refuse_network
from percolator.services.chassis.store_kinds.cluster_store import ClusterStore
from percolator.services.chassis.store_kinds.directory_store import DirectoryStore
from percolator.services.chassis.store_kinds.row_cluster_store import RowClusterStore

StoreSettingsT = TypeVar("StoreSettingsT", bound=StoreSettings)


@asynccontextmanager
async def opened(host: Host[StoreSettingsT]) -> AsyncIterator[ClusterStore]:
    """The store, which is closed at the end."""
    place = host.settings.place
    if place is None:
        root = host.settings.store_root
        await refuse_network(host.files, root, host.settings, host.log)
        yield DirectoryStore(host.files, root, host.world)
        return
    connection = Connection(place)
    try:
        yield RowClusterStore(connection.network, place, host.world)
    finally:
        await connection.close()
