"""A whole tablet in memory, given requests: whatever they hold, it judges or refuses them.

The first byte of an input says which request follows. A tablet lives for many inputs, so that one
request meets what others have written.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import structlog
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status

from percolator import codecs
from percolator.bigtable.place import Place
from percolator.errors import (
    CellAddress,
    ConflictError,
    InvariantViolation,
    PercolatorError,
    TabletMoved,
)
from percolator.formats.records import (
    LockRecord,
    RecordKind,
    WriteRecord,
    acknowledgement_column,
    observed_column,
)
from percolator.protocol import steps
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.rowstore.layout import LOCKS, WRITES
from percolator.services.chassis.cluster_store import RowClusterStore
from percolator.services.gateway.row_store_handler import RowStoreHandler
from percolator.services.master.handlers import RowMasterHandler
from percolator.services.master.map_store import KEY, CatalogueStore, decoded_catalogue
from percolator.services.master.row_term import RowLoads
from percolator.tablet import cells
from percolator.tablet.state import TabletIdentity, TabletLimits, TimestampGuard
from percolator.tablet.tablet import Tablet
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.memory_storage import DurableMemory, MemoryOwnership, MemoryStorage
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import bigtable_pb2 as bigtable
from percolator.v1 import cells_pb2
from percolator.v1 import master_pb2 as master
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cluster_pb2 import DescribeResponse, RowStorePlace
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire.addresses import parse_host_port
from percolator.wire.status import from_detail, status_code, to_detail, to_trailer
from percolator.world import MachineClock, Random, World

_LIFE_INPUTS = 2_000
_TARGET = pb.TabletTarget(tablet_id=1, epoch=2, schema_version=3)
_START, _COMMIT = 7 << 18, 8 << 18
_ROW, _COLUMN = b"row", b"column"


class Lost(Exception):
    """A tablet says of itself that a rule was broken, only because of what it was sent."""


class Judging:
    """Gives one request after another to a tablet."""

    def __init__(self) -> None:
        self._loop = asyncio.get_event_loop()
        self._inputs = 0
        self._newest = 0
        self._tablet: Tablet | None = None

    def __call__(self, data: bytes) -> None:
        if not data:
            return
        request, answer = _REQUESTS[data[0] % len(_REQUESTS)]
        try:
            message: Any = request.FromString(data[1:])
        except DecodeError:
            return
        if hasattr(message, "target"):
            # The guard of epochs and schemas is one comparison: most inputs should get past it.
            message.target.CopyFrom(_TARGET)
        self._loop.run_until_complete(self._answered(answer, message))

    async def _answered(
        self, answer: Callable[[Tablet, Any], Awaitable[list[Message]]], message: Message
    ) -> None:
        tablet = await self._living()
        try:
            answers = await answer(tablet, message)
        except InvariantViolation as violation:
            raise Lost(str(violation)) from violation
        except PercolatorError:
            return
        for one in answers:
            one.SerializeToString()

    async def _take_timestamps(self, count: int) -> int:
        """As the oracle would, by this machine's clock."""
        now = MachineClock().wall_milliseconds() << SEQUENCE_BITS
        first = max(now, self._newest + 1)
        self._newest = first + count - 1
        return first

    async def _living(self) -> Tablet:
        self._inputs += 1
        if self._tablet is None or self._inputs % _LIFE_INPUTS == 0:
            if self._tablet is not None:
                await self._tablet.close()
            clock = MachineClock()
            self._tablet = Tablet(
                TabletIdentity(table_id=7, tablet_id=1, epoch=2, start=b"", end=b""),
                schema_version=3,
                storage=MemoryStorage(DurableMemory()),
                clock=clock,
                ownership=MemoryOwnership(lambda: True),
                on_closed=_never,
                guard=TimestampGuard.by_own_clock(clock),
                limits=TabletLimits(),
                timestamps=self._take_timestamps,
            )
            await self._tablet.open()
        return self._tablet


def judging() -> Callable[[bytes], None]:
    return Judging()


def _never(error: PercolatorError) -> None:
    raise Lost(f"the tablet closed itself: {error}")


async def _mutate(tablet: Tablet, batch: pb.MutationBatch) -> list[Message]:
    deadline = MachineClock.monotonic_seconds() + 60.0
    return [await tablet.mutate(batch, deadline_seconds=deadline)]


async def _commit(tablet: Tablet, batch: pb.TransactionBatch) -> list[Message]:
    deadline = MachineClock.monotonic_seconds() + 60.0
    return [await tablet.commit(batch, deadline_seconds=deadline)]


async def _read(tablet: Tablet, batch: pb.ReadBatch) -> list[Message]:
    return [await tablet.read(batch)]


async def _pages(pages: AsyncIterator[Message]) -> list[Message]:
    return [page async for page in pages]


async def _scan(tablet: Tablet, request: pb.ScanRequest) -> list[Message]:
    return await _pages(tablet.scan(request))


async def _scan_cells(tablet: Tablet, request: pb.ScanCellsRequest) -> list[Message]:
    return await _pages(tablet.scan_cells(request))


async def _notifications(tablet: Tablet, scan: pb.NotificationScan) -> list[Message]:
    return [await tablet.scan_notifications(scan)]


async def _fence(tablet: Tablet, request: pb.FenceRequest) -> list[Message]:
    return [await tablet.fence(request)]


async def _load(tablet: Tablet, request: pb.LoadRequest) -> list[Message]:
    return [await tablet.load(request)]


async def _parts(tablet: Tablet, request: pb.ProposePartsRequest) -> list[Message]:
    return [await tablet.propose_parts(request)]


_REQUESTS: tuple[tuple[type[Message], Callable[[Tablet, Any], Awaitable[list[Message]]]], ...] = (
    (pb.MutationBatch, _mutate),
    (pb.TransactionBatch, _commit),
    (pb.ReadBatch, _read),
    (pb.ScanRequest, _scan),
    (pb.ScanCellsRequest, _scan_cells),
    (pb.NotificationScan, _notifications),
    (pb.FenceRequest, _fence),
    (pb.LoadRequest, _load),
    (pb.ProposePartsRequest, _parts),
)


def seeds() -> list[bytes]:
    """The steps of the protocol, and the reads that find what they leave."""
    primary = CellAddress(7, _ROW, _COLUMN)
    lock = LockRecord(_START, _START, 5_000, RecordKind.PUT, b"", primary, b"value").encode()
    record = WriteRecord(_START, RecordKind.PUT, b"value").encode()
    observers = (b"observer",)
    mutations = [
        steps.prewrite(_ROW, _COLUMN, _START, lock, None),
        steps.prewrite(_ROW, _COLUMN, _START, lock, b"long"),
        steps.replace_lock(_ROW, _COLUMN, lock[:20], lock),
        steps.commit_primary(_ROW, _COLUMN, _START, _START, _COMMIT, record, observers),
        steps.commit_secondary(_ROW, _COLUMN, _START, _COMMIT, record, observers),
        steps.roll_back(_ROW, _COLUMN, _START),
        steps.roll_back_expired(_ROW, _COLUMN, _START, lock[:20]),
        steps.status(_ROW, _COLUMN, _START),
        steps.notify(_ROW, _COLUMN, _COMMIT, observers),
    ]
    whole = cells_pb2.RowRange()
    fence = pb.LoadFence(name="load", run=_START, range=cells_pb2.RowRange(start=b"x"))
    valid: list[tuple[int, Message]] = [
        *((0, pb.MutationBatch(target=_TARGET, mutations=[one])) for one in mutations),
        (
            2,
            pb.ReadBatch(
                target=_TARGET, reads=[pb.RowRead(row=_ROW, all_columns=True, timestamp=_COMMIT)]
            ),
        ),
        (3, pb.ScanRequest(target=_TARGET, range=whole, all_columns=True, timestamp=_COMMIT)),
        (4, pb.ScanCellsRequest(target=_TARGET, space=cells_pb2.SPACE_WRITE, range=whole)),
        (
            5,
            pb.NotificationScan(
                target=_TARGET, range=whole, locked_columns=[_COLUMN], locks_before=_COMMIT
            ),
        ),
        (6, pb.FenceRequest(target=_TARGET, action=pb.FenceRequest.ACTION_RAISE, fence=fence)),
        (
            7,
            pb.LoadRequest(
                target=_TARGET,
                name="load",
                start_timestamp=_START,
                commit_timestamp=_COMMIT,
                rows=[b"xy"],
                columns=[_COLUMN],
                values=[b"v"],
            ),
        ),
        (8, pb.ProposePartsRequest(target=_TARGET, range=whole, part_bytes=1_000)),
    ]
    return [bytes([place]) + message.SerializeToString() for place, message in valid]


# A master's tables and a gateway on a row store in memory, given requests.
#
# Whatever these hold, they are answered or refused with an error that has a name; the catalogue can
# be read again as it was written; and nothing reaches the tables of the instance that are not for
# clients. The first byte of an input says which request follows. One cluster lives for many inputs,
# so that one request meets what others have made.

PLACE = Place("bigtable:443", "fuzzed", "instance")
_OTHERS = (PLACE.table(0), f"{PLACE.parent}/tables/customers")
"""Tables that no call may change, or read."""
_ON_ROWS_LIFE_INPUTS = 500
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
    """Stands for the cluster that is asked."""

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
            await _ask(self, _ON_ROWS_REQUESTS[number], SEEDS[number])

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
        asked = _ON_ROWS_REQUESTS[data[0] % len(_ON_ROWS_REQUESTS)]
        try:
            message = asked.request.FromString(data[1:])
        except DecodeError:
            return
        if self._cluster is None or self._inputs % _ON_ROWS_LIFE_INPUTS == 0:
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


_ON_ROWS_REQUESTS = (
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


def seeds_of_on_rows() -> list[bytes]:
    return [bytes([place]) + one.SerializeToString() for place, one in enumerate(SEEDS)]


async def accepted() -> set[str]:
    """Gives all seeds to one cluster. Returns the methods that have accepted one."""
    cluster = _Cluster()
    await cluster.begin()
    for asked, message in zip(_ON_ROWS_REQUESTS, SEEDS, strict=True):
        await _ask(cluster, asked, message)
        cluster.require_kept()
    return {asked.name for asked in _ON_ROWS_REQUESTS}


# Everything that decodes bytes which somebody else has written: records, keys, errors, pages.

_VALUES: tuple[codecs.Codec[Any], ...] = (
    codecs.integer,
    codecs.boolean,
    codecs.text,
    codecs.float,
    codecs.json,
    codecs.raw,
)


class Differs(Exception):
    """A decoded value is encoded as something else, or decoded differently a second time."""


def decode(data: bytes) -> None:
    """The first byte says by what the others are decoded."""
    if data:
        _DECODERS[data[0] % len(_DECODERS)](data[1:])


def _lock(data: bytes) -> None:
    try:
        found = LockRecord.decode(data)
    except InvariantViolation:
        return
    if found.encode() != data and LockRecord.decode(found.encode()) != found:
        raise Differs(f"a lock: {data.hex()}")


def _write(data: bytes) -> None:
    try:
        found = WriteRecord.decode(data)
    except InvariantViolation:
        return
    if WriteRecord.decode(found.encode()) != found:
        raise Differs(f"a write record: {data.hex()}")


def _key(data: bytes) -> None:
    try:
        found = cells.decode(data)
    except InvariantViolation:
        return
    again = cells.encode(found.space, found.row, found.column, found.timestamp, found.qualifier)
    if again != data:
        raise Differs(f"a key: {data.hex()} is encoded as {again.hex()}")


def _hidden(data: bytes) -> None:
    observed_column(data)


def _error(data: bytes) -> None:
    try:
        detail = ErrorDetail.FromString(data)
    except DecodeError:
        return
    error = from_detail(detail)
    if not isinstance(error, PercolatorError):
        raise Differs(f"an error: {data.hex()}")
    text, code = str(error), status_code(error)
    Status.FromString(to_trailer(code, text, to_detail(error)))


def _address(data: bytes) -> None:
    try:
        found = parse_host_port(data.decode("utf-8", "replace"), "address")
    except PercolatorError:
        return
    if parse_host_port(str(found), "address") != found:
        raise Differs(f"an address: {found}")


def _value(data: bytes) -> None:
    """A codec may refuse to write a value that it reads: it reads more of JSON than it writes."""
    for codec in _VALUES:
        with suppress(PercolatorError):
            codec.encode(codec.decode(data))


_DECODERS = (_lock, _write, _key, _hidden, _error, _address, _value)


def seeds_of_decoding() -> list[bytes]:
    """A valid input for each decoder."""
    primary = CellAddress(7, b"row", b"column")
    lock = LockRecord(_START, _COMMIT, 5_000, RecordKind.PUT, bytes(16), primary, b"value").encode()
    write = WriteRecord(_START, RecordKind.LOCK_ONLY, last_change=_COMMIT).encode()
    key = cells.encode(cells.WRITE, b"r\0ow", b"column", _COMMIT)
    moved = TabletMoved("moved", tablet_id=1, epoch=2)
    conflict = ConflictError("lost", cell=primary, start_timestamp=_START)
    errors = [to_detail(error).SerializeToString() for error in (moved, conflict)]
    valid = [
        (0, [lock]),
        (1, [write, WriteRecord(_START, RecordKind.PUT, b"value").encode()]),
        (2, [key]),
        (3, [acknowledgement_column(b"observer", b"column")]),
        (4, errors),
        (5, [b"localhost:7100", b"[::1]:0"]),
        (6, [bytes(8), b"text", json.dumps({"a": [1, None]}).encode()]),
    ]
    return [bytes([place]) + one for place, inputs in valid for one in inputs]
