"""Connects a client to the row store that has the cells of its cluster.

A client that was told to go through gateways calls the store through them, too, with their account.
"""

from __future__ import annotations

import os

from percolator.aio.engine import Rows
from percolator.bigtable.connection import Connection, RelayedNetwork
from percolator.bigtable.place import EMULATOR_VARIABLE, Place, parse_place
from percolator.bigtable.store import BigtableStore
from percolator.errors import PercolatorError, SchemaError, UsageError
from percolator.rowstore.identity import require_cluster
from percolator.rowstore.layout import Times
from percolator.v1.cluster_pb2 import DescribeResponse
from percolator.wire.through import ThroughNetwork
from percolator.world import Network


class ClusterRows:
    """The rows of one cluster. Belongs to one event loop."""

    def __init__(self, cluster: DescribeResponse, network: Network) -> None:
        """The cluster says where they are; `network` reaches its servers."""
        where = cluster.row_store
        self._cluster_id = cluster.cluster_id
        self._address = where.address
        self._emulator = _emulator(cluster)
        self._through = isinstance(network, ThroughNetwork)
        self._connection: Connection | None = None
        try:
            if isinstance(network, ThroughNetwork):
                store = BigtableStore(RelayedNetwork(network), _place(cluster, where.emulator))
            else:
                self._connection = connection_to(cluster)
                store = self._connection.store
        except PercolatorError as error:
            raise self._unusable(error) from error
        self.rows = Rows(store, Times(where.epoch_milliseconds))

    async def require(self, timeout_seconds: float) -> None:
        """Raises unless the store can be read from here, and belongs to the cluster."""
        try:
            await require_cluster(self.rows.store, self._cluster_id, timeout_seconds)
        except SchemaError as error:
            raise self._unusable(UsageError(error.message)) from error
        except PercolatorError as error:
            raise self._unusable(error) from error

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    def _unusable(self, error: PercolatorError) -> PercolatorError:
        """The error, with what to do about it."""
        store, otherwise = self._address, ""
        if self._through:
            error.message = (
                f"the cells of this cluster are in {store}, which cannot be used through the "
                f"gateway: {error.message}"
            )
            return error
        if self._emulator:
            store += f", in the emulator at {self._emulator}"
            otherwise = f"if that has another address here, name it in {EMULATOR_VARIABLE}; "
        error.message = (
            f"the cells of this cluster are in {store}, which cannot be used from here: "
            f"{error.message}; {otherwise}a program without access to it connects to a "
            "gateway (docs/gateway.md)"
        )
        return error


def connection_to(cluster: DescribeResponse) -> Connection:
    """A connection of this process's own to the store that the cluster describes."""
    return Connection(_place(cluster, _emulator(cluster)))


def _emulator(cluster: DescribeResponse) -> str:
    """If the cells are in an emulator, the environment may name the address that it has for this
    process, which need not be the one that masters use."""
    emulator = cluster.row_store.emulator
    return emulator and (os.environ.get(EMULATOR_VARIABLE) or emulator)


def _place(cluster: DescribeResponse, emulator: str) -> Place:
    environment = {EMULATOR_VARIABLE: emulator} if emulator else {}
    return parse_place(cluster.row_store.address, field="row_store", environment=environment)
