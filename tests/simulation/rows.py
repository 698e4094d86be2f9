"""The row store of a simulation: a service that others run, in place of the tablet servers.

It never loses what it has answered. It may be silent, slow, or gone for a while, as all processes
may, and calls may be lost, late or doubled on their way, as all messages may.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, cast

from google.protobuf.descriptor import ServiceDescriptor

from percolator.aio.engine import Rows
from percolator.bigtable.admin import create_table, delete_table, require_table
from percolator.bigtable.messages import (
    CHECK_AND_MUTATE_ROW,
    CREATE_TABLE,
    DELETE_TABLE,
    GET_TABLE,
    MUTATE_ROWS,
    READ_ROWS,
)
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.formats.records import START_TIMESTAMP_BYTES
from percolator.rowstore.contents import stored_cells
from percolator.rowstore.identity import TABLE_ID
from percolator.rowstore.intents import BUCKETS, INTENTS_TABLE, intent_of, key_from
from percolator.rowstore.layout import LOCK_ONLY, WRITES
from percolator.rowstore.port import Selection
from percolator.rowstore.times import Times
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import bigtable_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_NOTIFY, SPACE_WRITE, Cell
from percolator.world import Network
from tests.isolation.store_audit import StoredTable
from tests.simulation.process import Incarnation
from tests.simulation.virtual_time import WALL_MILLISECONDS

ROW_STORE = "bigtable:443"
ON_ROWS = "run on a row store"
WHOLLY_ON_ROWS = "run whose masters and oracles are on a row store, too"
PLACE = Place(ROW_STORE, "simulated", "simulated")
_RECORDS = PLACE.table(TABLE_ID)
"""What a cluster knows about itself: no cells of its tables."""
EPOCH_MILLISECONDS = WALL_MILLISECONDS - 60_000
_TIMES = Times(EPOCH_MILLISECONDS)
_CHUNK_BYTES = 40
"""Far less than Bigtable's, so that most records come in several parts."""
_SECONDS = 10.0


_SERVED = (CHECK_AND_MUTATE_ROW, MUTATE_ROWS, READ_ROWS, CREATE_TABLE, DELETE_TABLE, GET_TABLE)


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


class _Watched(BigtableInMemory):
    """Remembers which commit records were collected."""

    def __init__(self, collected: dict[int, int]) -> None:
        super().__init__(chunk_bytes=_CHUNK_BYTES)
        self.times = _TIMES
        self._collected = collected

    async def check_and_mutate_row(
        self, request: pb.BigtableCheckAndMutateRowRequest
    ) -> pb.BigtableCheckAndMutateRowResponse:
        table = self._table(request.table_name)
        before = table.rows.get(request.row_key, {})
        response = await super().check_and_mutate_row(request)
        if request.table_name == _RECORDS:
            return response
        for cell in before.keys() - table.rows.get(request.row_key, {}).keys():
            family, _, time = cell
            if family in (WRITES, LOCK_ONLY):
                start = int.from_bytes(before[cell][:START_TIMESTAMP_BYTES], "big")
                self._collected[start] = self.times.timestamp(time)
        return response


class RowStoreProgram:
    """The store, and what survives every crash of its process."""

    def __init__(self, collected: dict[int, int]) -> None:
        """Adds to `collected` the transactions whose commit records were collected, and their
        timestamps."""
        self._model = _Watched(collected)

    @property
    def times(self) -> Times:
        """Those of the cluster whose cells it has."""
        return self._model.times

    @times.setter
    def times(self, times: Times) -> None:
        self._model.times = times

    async def serve(self, incarnation: Incarnation) -> None:
        services: dict[str, list[_Method]] = {}
        for method in _SERVED:
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
        await create_table(self.directly(), PLACE, table_id, _SECONDS)

    async def stored(self, table_id: int, name: str) -> StoredTable:
        """Everything that a table holds."""
        store = BigtableStore(self.directly(), PLACE)
        cells = [cell async for cell in stored_cells(store, table_id, self.times, _SECONDS)]
        cells += [cell async for cell in _notifications(store, table_id, cells)]
        return StoredTable(table_id, name, cells)


async def _notifications(
    store: BigtableStore, table_id: int, cells: Sequence[Cell]
) -> AsyncGenerator[Cell, None]:
    """The intents of changes that were committed, as the notifications that a tablet has."""
    commits = {
        (cell.row, cell.column, cell.value[:START_TIMESTAMP_BYTES]): cell.timestamp
        for cell in cells
        if cell.space == SPACE_WRITE
    }
    stream = store.scan(
        INTENTS_TABLE,
        key_from(BUCKETS[0]),
        b"",
        [Selection(WRITES)],
        rows_max=0,
        reverse=False,
        timeout_seconds=_SECONDS,
    )
    async with aclosing(stream) as rows:
        async for row in rows:
            for stored in row.cells:
                intent = intent_of(row, stored.column, stored.value)
                start = intent.timestamp.to_bytes(START_TIMESTAMP_BYTES, "big")
                commit = commits.get((intent.row, intent.column, start))
                timestamp = intent.timestamp if intent.is_certain else commit
                if intent.table_id == table_id and timestamp is not None:
                    yield Cell(
                        space=SPACE_NOTIFY,
                        row=intent.row,
                        column=intent.column,
                        timestamp=timestamp,
                        qualifier=intent.observer,
                    )


def rows_over(network: Network, times: Times = _TIMES) -> Rows:
    """The store as a client reaches it."""
    return Rows(BigtableStore(network, PLACE), times)


async def make_table(network: Network, table_id: int) -> None:
    await require_table(network, PLACE, table_id, _SECONDS)


async def drop_table(network: Network, table_id: int) -> None:
    await delete_table(network, PLACE, table_id, _SECONDS)


def row_step(payload: bytes) -> str:
    """The step of the protocol that a call to the store makes, as tests/simulation/ambush.py names
    it."""
    request = pb.BigtableCheckAndMutateRowRequest.FromString(payload)
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


def _sees_min_commit(request: pb.BigtableCheckAndMutateRowRequest) -> bool:
    """Whether the lock has to be as it was seen: only the commit point asks for more than whose it
    is."""
    return any(
        len(one.value_range_filter.start_value_closed) > START_TIMESTAMP_BYTES
        for one in request.predicate_filter.chain.filters
    )
