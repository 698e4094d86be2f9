"""Connects a client to the row store that has the cells of its cluster."""

from __future__ import annotations

import os

from percolator.aio.engine import Rows
from percolator.bigtable.connection import Connection
from percolator.bigtable.place import EMULATOR_VARIABLE, parse_place
from percolator.errors import PercolatorError, SchemaError, UsageError
from percolator.rowstore.identity import require_cluster
from percolator.rowstore.times import Times
from percolator.v1.cluster_pb2 import DescribeResponse


class ClusterRows:
    """The rows of one cluster. Belongs to one event loop."""

    def __init__(self, cluster: DescribeResponse) -> None:
        """The cluster says where they are. If they are in an emulator, the environment may name the
        address that it has for this process, which need not be the one that masters use."""
        where = cluster.row_store
        self._emulator = where.emulator and (os.environ.get(EMULATOR_VARIABLE) or where.emulator)
        environment = {EMULATOR_VARIABLE: self._emulator} if self._emulator else {}
        self._cluster_id = cluster.cluster_id
        self._address = where.address
        try:
            place = parse_place(where.address, field="row_store", environment=environment)
            self._connection = Connection(place)
        except PercolatorError as error:
            raise self._unusable(error) from error
        self.rows = Rows(self._connection.store, Times(where.epoch_milliseconds))

    async def require(self, timeout_seconds: float) -> None:
        """Raises unless the store can be read from here, and belongs to the cluster."""
        store = self._connection.store
        try:
            await require_cluster(store, self._cluster_id, timeout_seconds)
        except SchemaError as error:
            raise self._unusable(UsageError(error.message)) from error
        except PercolatorError as error:
            raise self._unusable(error) from error

    async def close(self) -> None:
        await self._connection.close()

    def _unusable(self, error: PercolatorError) -> PercolatorError:
        """The error, with what to do about it."""
        store, otherwise = self._address, ""
        if self._emulator:
            store += f", in the emulator at {self._emulator}"
            otherwise = f"if that has another address here, name it in {EMULATOR_VARIABLE}; "
        error.message = (
            f"the cells of this cluster are in {store}, which cannot be used from here: "
            f"{error.message}; {otherwise}a program without access to it calls a gateway "
            "(docs/gateway.md)"
        )
        return error
