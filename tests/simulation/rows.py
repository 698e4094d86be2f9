"""The row store of a simulation: a service that others run, in place of the tablet servers.

It never loses what it has answered. It may be silent, slow, or gone for a while, as all processes
may, and calls may be lost, late or doubled on their way, as all messages may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

from google.protobuf.descriptor import ServiceDescriptor

from percolator.aio.engine import Rows
from percolator.bigtable.methods import CHECK_AND_MUTATE_ROW, CREATE_TABLE, READ_ROWS
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.bigtable.tables import create_table
from percolator.formats.records import START_TIMESTAMP_BYTES
from percolator.rowstore.contents import stored_cells
from percolator.rowstore.times import Times
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.simulator.simulated_process import Incarnation
from percolator.testing.simulator.virtual_time import WALL_MILLISECONDS
from percolator.testing.store_audit.audit import StoredTable
from percolator.v1 import bigtable_pb2 as wire
from percolator.world import Network

ROW_STORE = "bigtable:443"
ON_ROWS = "run on a row store"
_PLACE = Place(ROW_STORE, "simulated", "simulated")
_TIMES = Times(WALL_MILLISECONDS - 60_000)
_CHUNK_BYTES = 40
"""Far less than Bigtable's, so that most records come in several parts."""
_SECONDS = 10.0


class _Method(NamedTuple):
    name: str


@dataclass(frozen=True)
class _Service:
    """What the simulated wire needs to know of a service: of Google's, we have only messages."""

    full_name: str
    methods: list[_Method]
    handler: object

    @property
    def descriptor(self) -> ServiceDescriptor:
        return cast("ServiceDescriptor", self)


class RowStoreProgram:
    """The store, and what survives every crash of its process."""

    def __init__(self) -> None:
        self._model = BigtableInMemory(chunk_bytes=_CHUNK_BYTES)

    async def serve(self, incarnation: Incarnation) -> None:
        services: dict[str, list[_Method]] = {}
        for method in (CHECK_AND_MUTATE_ROW, READ_ROWS, CREATE_TABLE):
            _, service, name = method.path.split("/")
            services.setdefault(service, []).append(_Method(name))
        incarnation.listen(
            _Service(service, names, self._model) for service, names in services.items()
        )
        await incarnation.wire.loop.create_future()

    def directly(self) -> Network:
        """A way to it on which nothing goes wrong, for those who look at a run from outside."""
        return InProcessNetwork({ROW_STORE: self._model})

    async def create(self, table_id: int) -> None:
        await create_table(self.directly(), _PLACE, table_id, _SECONDS)

    async def stored(self, table_id: int, name: str) -> StoredTable:
        """Everything that a table holds."""
        store = BigtableStore(self.directly(), _PLACE)
        cells = [cell async for cell in stored_cells(store, table_id, _TIMES, _SECONDS)]
        return StoredTable(table_id, name, cells)


def rows_over(network: Network) -> Rows:
    """The store as a client reaches it."""
    return Rows(BigtableStore(network, _PLACE), _TIMES)


def row_step(payload: bytes) -> str:
    """The step of the protocol that a call to the store makes, as tests/simulation/ambush.py names
    it."""
    request = wire.BigtableCheckAndMutateRowRequest.FromString(payload)
    changed = {
        change.set_cell.family_name
        for change in (*request.true_mutations, *request.false_mutations)
        if change.HasField("set_cell")
    }
    if "r" in changed:
        return "rollback"
    if changed & {"w", "o"}:
        return "commit of the primary" if _sees_min_commit(request) else "commit of others"
    return "prewrite" if request.false_mutations else "heartbeat or push"


def _sees_min_commit(request: wire.BigtableCheckAndMutateRowRequest) -> bool:
    """Whether the lock has to be as it was seen: only the commit point asks for more than whose it
    is."""
    return any(
        len(one.value_range_filter.start_value_closed) > START_TIMESTAMP_BYTES
        for one in request.predicate_filter.chain.filters
    )
