"""`percolator.v1.RowStoreService`: calls to the row store, for clients without an account there.

The driver runs in the client, as it does in one with an account, and the gateway passes its calls
on with its own. Only these calls, and only to tables of the cluster: an instance may have others,
and the row in which an oracle keeps its mark is for oracles alone.

Callers run the protocol themselves, so a gateway cannot know whether a step is right: as a tablet
server, it takes any change of one row with any check. But it makes nothing that no step consists
of. What a step never does would harm others without a trace: a note of collection makes a row
unreadable for older snapshots; a field that we do not know may name another table.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Final, NamedTuple, TypeVar

from percolator.bigtable import messages
from percolator.bigtable.connection import Connection
from percolator.bigtable.errors import FamilyMissing, missing_family, named
from percolator.bigtable.place import Place
from percolator.errors import InvalidArgument, NotReady, PermissionDenied, Unauthenticated
from percolator.rowstore.identity import CLUSTER, TABLE_ID
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.rowstore.layout import DATA, FAMILIES, LOCK_ONLY, LOCKS, ROLLBACKS, WRITES
from percolator.rowstore.port import TIME_UNIT
from percolator.services.chassis.rpc import caller_role, remaining_seconds
from percolator.services.gateway.servers import Servers
from percolator.v1 import bigtable_pb2 as pb
from percolator.v1.cluster_pb2 import DescribeResponse
from percolator.wire.roles import Role
from percolator.world import Network, ResponseT, StreamCall, UnaryCall

_OF_THE_CLUSTER: Final = re.compile(r"percolator-(intents|[1-9][0-9]{0,9})")
"""As `Place.table_name` makes them."""
_OF_STEPS: Final = frozenset((LOCKS, WRITES, LOCK_ONLY, DATA, ROLLBACKS))
_OF_INTENTS: Final = frozenset((WRITES,))

RequestT = TypeVar(
    "RequestT",
    pb.BigtableCheckAndMutateRowRequest,
    pb.BigtableMutateRowsRequest,
    pb.BigtableReadRowsRequest,
    pb.BigtableSampleRowKeysRequest,
)


def for_store(place: Place, request: RequestT, *, reads_identity: bool = False) -> RequestT:
    """The request as a gateway at that place makes it. Raises unless the table is the cluster's."""
    parent, _, name = request.table_name.rpartition("/tables/")
    is_own = _OF_THE_CLUSTER.fullmatch(name) is not None or (
        reads_identity and name == place.table_name(TABLE_ID)
    )
    if parent != place.parent or not is_own:
        raise InvalidArgument(
            "table_name",
            f"expected a table of this cluster, {place.parent}/tables/percolator-NUMBER, found "
            f"{request.table_name[:200]!r}; of {place.table_name(TABLE_ID)}, only the row "
            f"{CLUSTER.decode()!r} can be read",
        )
    # What we do not know would be passed on as it is, such as the name of a view of another table.
    size = request.ByteSize()
    request.DiscardUnknownFields()
    if request.ByteSize() != size:
        raise InvalidArgument("request", "has fields that no client of this cluster sends")
    request.app_profile_id = place.app_profile
    return request


def require_known_families(one: pb.BigtableRowFilter, field: str) -> None:
    """Raises if a filter names a family that no table has: the store's answer would be taken for
    that of a table whose family somebody has removed."""
    match one.WhichOneof("filter"):
        case "column_range_filter":
            _require_known(one.column_range_filter.family_name, field)
        case "chain":
            for part in one.chain.filters:
                require_known_families(part, field)
        case "interleave":
            for part in one.interleave.filters:
                require_known_families(part, field)
        case _:
            pass


def _require_known(family: str, field: str) -> None:
    if family not in FAMILIES:
        raise InvalidArgument(
            field, f"names the family {family[:100]!r}; tables have {', '.join(sorted(FAMILIES))}"
        )


def require_step(request: pb.BigtableCheckAndMutateRowRequest) -> None:
    """Raises unless the changes are some that steps of transactions consist of."""
    require_known_families(request.predicate_filter, "predicate_filter")
    _require_changes(request.true_mutations, "true_mutations", _OF_STEPS)
    _require_changes(request.false_mutations, "false_mutations", _OF_STEPS)


def require_may_write(place: Place, request: pb.BigtableMutateRowsRequest, role: Role) -> None:
    """Raises unless the caller may write these rows without conditions: anybody writes intents, and
    whoever may load a table also the table's rows."""
    if request.table_name == place.table(INTENTS_TABLE):
        for number, entry in enumerate(request.entries):
            _require_changes(entry.mutations, f"entries[{number}].mutations", _OF_INTENTS)
    elif role < Role.ADMIN:
        raise PermissionDenied(
            f"the caller has the role {role.name}, but it needs ADMIN to load a table: all other "
            "changes of rows have conditions",
            where=request.table_name,
        )
    else:
        for number, entry in enumerate(request.entries):
            for change in entry.mutations:
                family = change.set_cell.family_name or change.delete_from_column.family_name
                _require_known(family, f"entries[{number}].mutations")


def _require_changes(
    changes: Iterable[pb.BigtableMutation], field: str, families: frozenset[str]
) -> None:
    """Single versions of cells are set and deleted, and nothing else."""
    for number, change in enumerate(changes):
        match change.WhichOneof("mutation"):
            case "set_cell":
                family = change.set_cell.family_name
                is_one = True
            case "delete_from_column":
                deleted = change.delete_from_column
                family, times = deleted.family_name, deleted.time_range
                start, end = times.start_timestamp_micros, times.end_timestamp_micros
                is_one = start + TIME_UNIT == end
            case _:
                family, is_one = "", False
        if not is_one or family not in families:
            raise InvalidArgument(
                f"{field}[{number}]",
                "expected one version of a cell to be set or deleted, in one of the families "
                f"{', '.join(sorted(families))}",
            )


CALL_SECONDS_MAX = 600.0
_USUAL_SECONDS = 30.0
_NOT_READY_SECONDS = 0.5


class _Store(NamedTuple):
    """The store's methods, ready to be called."""

    network: Network
    place: Place
    check_and_mutate: UnaryCall[
        pb.BigtableCheckAndMutateRowRequest, pb.BigtableCheckAndMutateRowResponse
    ]
    mutate_rows: StreamCall[pb.BigtableMutateRowsRequest, pb.BigtableMutateRowsResponse]
    read_rows: StreamCall[pb.BigtableReadRowsRequest, pb.BigtableReadRowsResponse]
    sample: StreamCall[pb.BigtableSampleRowKeysRequest, pb.BigtableSampleRowKeysResponse]

    @classmethod
    def over(cls, connection: Connection) -> _Store:
        network, address = connection.network, connection.place.address
        return cls(
            network,
            connection.place,
            network.unary(address, messages.CHECK_AND_MUTATE_ROW),
            network.stream(address, messages.MUTATE_ROWS),
            network.stream(address, messages.READ_ROWS),
            network.stream(address, messages.SAMPLE_ROW_KEYS),
        )


class RowStoreHandler:
    """Passes calls on. It connects to the store when the first one comes."""

    def __init__(self, servers: Servers, connect: Callable[[DescribeResponse], Connection]) -> None:
        self._servers = servers
        self._connect = connect
        self._connection: Connection | None = None
        self._connected: _Store | None = None

    async def check_and_mutate_row(
        self, request: pb.BigtableCheckAndMutateRowRequest
    ) -> pb.BigtableCheckAndMutateRowResponse:
        store = self._store()
        own = for_store(store.place, request)
        require_step(own)
        async with _own_account(store):
            return await store.check_and_mutate(own, _seconds())

    async def mutate_rows(
        self, request: pb.BigtableMutateRowsRequest
    ) -> AsyncIterator[pb.BigtableMutateRowsResponse]:
        store = self._store()
        own = for_store(store.place, request)
        require_may_write(store.place, own, caller_role())
        async for answer in _answers(store, store.mutate_rows, own):
            for entry in answer.entries:
                # Each row has an answer of its own, which a caller cannot ask about.
                lacking = missing_family(entry.status.message, own.table_name)
                if entry.status.code and lacking is not None:
                    raise await named(store.network, store.place, lacking)
            yield answer

    async def read_rows(
        self, request: pb.BigtableReadRowsRequest
    ) -> AsyncIterator[pb.BigtableReadRowsResponse]:
        store, rows = self._store(), request.rows
        is_identity = list(rows.row_keys) == [CLUSTER] and not rows.row_ranges
        own = for_store(store.place, request, reads_identity=is_identity)
        require_known_families(own.filter, "filter")
        async for answer in _answers(store, store.read_rows, own):
            yield answer

    async def sample_row_keys(
        self, request: pb.BigtableSampleRowKeysRequest
    ) -> AsyncIterator[pb.BigtableSampleRowKeysResponse]:
        store = self._store()
        async for answer in _answers(store, store.sample, for_store(store.place, request)):
            yield answer

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    def _store(self) -> _Store:
        if self._connected is None:
            described = self._servers.described
            if described is None:
                raise NotReady(
                    "no master has described the cluster yet",
                    retry_after_seconds=_NOT_READY_SECONDS,
                )
            if not described.HasField("row_store"):
                raise InvalidArgument(
                    "table_name", "the cells of this cluster are in tablet servers, not in Bigtable"
                )
            self._connection = self._connect(described)
            self._connected = _Store.over(self._connection)
        return self._connected


async def _answers(
    store: _Store, call: StreamCall[RequestT, ResponseT], request: RequestT
) -> AsyncIterator[ResponseT]:
    async with _own_account(store), aclosing(call(request, _seconds())) as answers:
        async for answer in answers:
            yield answer


def _seconds() -> float:
    remaining = remaining_seconds()
    return _USUAL_SECONDS if remaining is None else min(max(remaining, 0.0), CALL_SECONDS_MAX)


@asynccontextmanager
async def _own_account(store: _Store) -> AsyncIterator[None]:
    """Reports a refusal of this gateway's own account as such: the caller would otherwise replace
    its token, or believe that it lacks a role. Only this account can ask what is missing."""
    try:
        yield
    except FamilyMissing as error:
        raise await named(store.network, store.place, error) from error
    except (Unauthenticated, PermissionDenied) as error:
        raise NotReady(
            f"the account of this gateway cannot use the store: {error.message}",
            retry_after_seconds=_NOT_READY_SECONDS,
        ) from error
