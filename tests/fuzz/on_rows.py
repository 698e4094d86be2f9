"""A master's tables and a gateway on a row store in memory, given requests.

Whatever these hold, they are answered or refused with an error that has a name; the catalogue can
be read again as it was written; and nothing reaches the tables of the instance that are not for
clients. The first byte of an input says which request follows. One cluster lives for many inputs,
so that one request meets what others have made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import structlog
from google.protobuf.message import DecodeError, Message

from percolator.bigtable.place import Place
from percolator.errors import InvariantViolation, PercolatorError
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.rowstore.layout import LOCKS, WRITES
from percolator.services.chassis.cluster_store import RowClusterStore
from percolator.services.gateway.row_store_handler import RowStoreHandler
from percolator.services.master.handlers import RowMasterHandler
from percolator.services.master.map_store import KEY, CatalogueStore, decoded_catalogue
from percolator.services.master.row_term import RowLoads
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import bigtable_pb2 as bigtable
from percolator.v1 import master_pb2 as master
from percolator.v1.cluster_pb2 import DescribeResponse, RowStorePlace
from percolator.world import MachineClock, Random, World

PLACE = Place("bigtable:443", "fuzzed", "instance")
_OTHERS = (PLACE.table(0), f"{PLACE.parent}/tables/customers")
"""Tables that no call may change, or read."""
_LIFE_INPUTS = 500
_NOW = 1 << 40
_RUN = 1 << 30
_TIME = 1_000_000


class Broken(Exception):
    """A promise that a request has broken."""


class _Leadership:
    """Leads for ever, and keeps what it is given."""

    epoch = 1

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def check(self) -> None:
        """It stands."""

    async def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    async def put(self, key: str, value: bytes) -> None:
        self.values[key] = value


class _OracleTime:
    """Timestamps above every run of the seeds."""

    lead_milliseconds = 0

    def __init__(self) -> None:
        self.newest = _NOW

    def source(self) -> _OracleTime:
        return self

    async def get(self, *, timeout_seconds: float) -> int:
        self.newest += 1
        return self.newest

    async def raise_epoch(self, deadline: float) -> None:
        """Nobody has to hear of it."""


class _Cluster:
    """What is asked."""

    def __init__(self) -> None:
        self.model = BigtableInMemory()
        network = InProcessNetwork({PLACE.address: self.model})
        clock = MachineClock()
        self._rows = RowClusterStore(network, PLACE, World(clock, network, Random("fuzzed")))
        self.leadership = _Leadership()
        self._clock = clock
        connection = SimpleNamespace(network=network, place=PLACE)
        described = DescribeResponse(row_store=RowStorePlace(address=str(PLACE)))
        servers = cast("Any", SimpleNamespace(described=described))
        self.gateway = RowStoreHandler(servers, lambda _: cast("Any", connection))

    async def begin(self) -> None:
        await self._rows.create_table(0)
        await self._rows.create_table(INTENTS_TABLE)
        self.model.tables[_OTHERS[1]] = type(self.model.tables[_OTHERS[0]])(
            _OTHERS[1], (LOCKS, WRITES)
        )
        stored = await CatalogueStore.load(cast("Any", self.leadership))
        oracle = cast("Any", _OracleTime())
        tables = RowLoads(self._clock, stored, oracle, self._rows, retention_min_seconds=60.0)
        leader = SimpleNamespace(tables=tables, stored=stored)

        @asynccontextmanager
        async def leading() -> AsyncIterator[Any]:
            yield leader

        async def current() -> Any:
            return stored.current

        elected = cast("Any", SimpleNamespace(leading=leading, current=current))
        self.master = RowMasterHandler(self._clock, elected, str(PLACE))
        self._stored = stored
        for number in (2, 0, 1):  # a table, and two loads
            await _ask(self, _REQUESTS[number], SEEDS[number])

    def require_kept(self) -> None:
        """Raises `Broken` if a request has left what it must not."""
        written = self.leadership.values.get(KEY)
        if written is not None and decoded_catalogue(written) != self._stored.current:
            raise Broken("the catalogue is not read as it was written")
        for name in _OTHERS:
            if self.model.tables[name].rows:
                raise Broken(f"{name} was changed")


class Serving:
    """Gives one request after another to a cluster."""

    def __init__(self) -> None:
        self._loop = asyncio.get_event_loop()
        self._inputs = 0
        self._cluster: _Cluster | None = None

    def __call__(self, data: bytes) -> None:
        if data:
            self._loop.run_until_complete(self._give(data))

    async def _give(self, data: bytes) -> None:
        asked = _REQUESTS[data[0] % len(_REQUESTS)]
        try:
            message = asked.request.FromString(data[1:])
        except DecodeError:
            return
        if self._cluster is None or self._inputs % _LIFE_INPUTS == 0:
            self._cluster = _Cluster()
            await self._cluster.begin()
        self._inputs += 1
        try:
            await _ask(self._cluster, asked, message)
        except InvariantViolation as violation:
            raise Broken(str(violation)) from violation
        except PercolatorError:
            pass
        self._cluster.require_kept()


def serving() -> Callable[[bytes], None]:
    # Every second request changes something, and would be logged.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    return Serving()


class _Asked(NamedTuple):
    """A method, and who answers it."""

    request: type[Any]
    name: str
    is_gateways: bool = False
    streams: bool = False


async def _ask(cluster: _Cluster, asked: _Asked, message: Message) -> list[Message]:
    method = getattr(cluster.gateway if asked.is_gateways else cluster.master, asked.name)
    answers = [one async for one in method(message)] if asked.streams else [await method(message)]
    for one in answers:
        one.SerializeToString()
    return answers


_REQUESTS = (
    _Asked(master.BeginLoadRequest, "begin_load"),
    _Asked(master.BeginLoadRequest, "begin_load"),
    _Asked(master.CreateTableRequest, "create_table"),
    _Asked(master.ListTablesRequest, "list_tables"),
    _Asked(master.DescribeTableRequest, "describe_table"),
    _Asked(master.ChangeObserversRequest, "change_observers"),
    _Asked(master.ReportBackfillRequest, "report_backfill"),
    _Asked(master.DeclareCodecsRequest, "declare_codecs"),
    _Asked(bigtable.BigtableCheckAndMutateRowRequest, "check_and_mutate_row", True),
    _Asked(bigtable.BigtableMutateRowsRequest, "mutate_rows", True, True),
    _Asked(bigtable.BigtableReadRowsRequest, "read_rows", True, True),
    _Asked(bigtable.BigtableSampleRowKeysRequest, "sample_row_keys", True, True),
    _Asked(master.PublishLoadsRequest, "publish_loads"),
    _Asked(master.AbandonLoadRequest, "abandon_load"),
    _Asked(master.DeleteTableRequest, "delete_table"),
)


def _begun(name: str) -> master.BeginLoadRequest:
    return master.BeginLoadRequest(
        table=master.CreateTableRequest(name=name), load="a load", run=_RUN
    )


def _set(family: str) -> bigtable.BigtableMutation:
    cell = bigtable.BigtableMutation.SetCell(
        family_name=family, column_qualifier=b"c", timestamp_micros=_TIME, value=b"v"
    )
    return bigtable.BigtableMutation(set_cell=cell)


def _locks() -> bigtable.BigtableRowFilter:
    return bigtable.BigtableRowFilter(
        column_range_filter=bigtable.BigtableColumnRange(family_name=LOCKS)
    )


_LOADED = master.PublishLoadsRequest.Loaded(table_id=2, run=_RUN, commit_timestamp=_RUN + 1)
SEEDS: tuple[Message, ...] = (
    _begun("loaded"),
    _begun("another"),
    master.CreateTableRequest(name="fuzzed", exist_ok=True),
    master.ListTablesRequest(),
    master.DescribeTableRequest(name="fuzzed"),
    master.ChangeObserversRequest(
        table="fuzzed", add=[master.Observer(name="watcher", columns=[b"c"], backfill=True)]
    ),
    master.ReportBackfillRequest(table_id=1, observer="watcher", version=2, row=b"r", cells=1),
    master.DeclareCodecsRequest(table_id=1),
    bigtable.BigtableCheckAndMutateRowRequest(
        table_name=PLACE.table(1),
        row_key=b"row",
        predicate_filter=_locks(),
        false_mutations=[_set(LOCKS)],
    ),
    bigtable.BigtableMutateRowsRequest(
        table_name=PLACE.table(INTENTS_TABLE),
        entries=[bigtable.BigtableMutateRowsRequest.Entry(row_key=b"k", mutations=[_set(WRITES)])],
    ),
    bigtable.BigtableReadRowsRequest(
        table_name=PLACE.table(1), rows=bigtable.BigtableRowSet(row_keys=[b"row"]), filter=_locks()
    ),
    bigtable.BigtableSampleRowKeysRequest(table_name=PLACE.table(1)),
    master.PublishLoadsRequest(loads=[_LOADED]),
    master.AbandonLoadRequest(table="another", load="a load", run=_RUN),
    master.DeleteTableRequest(name="fuzzed"),
)
"""A request for each method that is accepted if all are given in this order."""


def seeds() -> list[bytes]:
    return [bytes([place]) + one.SerializeToString() for place, one in enumerate(SEEDS)]


async def accepted() -> set[str]:
    """Gives all seeds to one cluster. Returns the methods that have accepted one."""
    cluster = _Cluster()
    await cluster.begin()
    for asked, message in zip(_REQUESTS, SEEDS, strict=True):
        await _ask(cluster, asked, message)
        cluster.require_kept()
    return {asked.name for asked in _REQUESTS}
