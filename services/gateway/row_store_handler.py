"""`percolator.v1.RowStoreService`: calls to the row store, for clients without an account there.

The driver runs in the client, as it does in one with an account, and the gateway passes its calls
on with its own. Only these calls, and only to tables of the cluster: an instance may have others,
and the row in which an oracle keeps its mark is for oracles alone. `row_store_rules.py` says what
else is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple, Protocol

from percolator.bigtable import messages
from percolator.bigtable.errors import FamilyMissing, missing_family, named
from percolator.bigtable.place import Place
from percolator.errors import InvalidArgument, NotReady, PermissionDenied, Unauthenticated
from percolator.rowstore.identity import CLUSTER
from percolator.services.chassis.serving.rpc import caller_role, remaining_seconds
from percolator.services.gateway import row_store_rules as rules
from percolator.services.gateway.row_store_rules import RequestT
from percolator.services.gateway.servers import Servers
from percolator.v1 import bigtable_pb2 as pb
from percolator.v1.cluster_pb2 import DescribeResponse
from percolator.world import Network, ResponseT, StreamCall, UnaryCall

CALL_SECONDS_MAX = 600.0
_USUAL_SECONDS = 30.0
_NOT_READY_SECONDS = 0.5


class StoreConnection(Protocol):
    """As `percolator.bigtable.connection.Connection`."""

    @property
    def network(self) -> Network: ...

    @property
    def place(self) -> Place: ...

    async def close(self) -> None: ...


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
    def over(cls, connection: StoreConnection) -> _Store:
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

    def __init__(
        self, servers: Servers, connect: Callable[[DescribeResponse], StoreConnection]
    ) -> None:
        self._servers = servers
        self._connect = connect
        self._connection: StoreConnection | None = None
        self._connected: _Store | None = None

    async def check_and_mutate_row(
        self, request: pb.BigtableCheckAndMutateRowRequest
    ) -> pb.BigtableCheckAndMutateRowResponse:
        store = self._store()
        own = rules.own(store.place, request)
        rules.require_step(own)
        async with _own_account(store):
            return await store.check_and_mutate(own, _seconds())

    async def mutate_rows(
        self, request: pb.BigtableMutateRowsRequest
    ) -> AsyncIterator[pb.BigtableMutateRowsResponse]:
        store = self._store()
        own = rules.own(store.place, request)
        rules.require_may_write(store.place, own, caller_role())
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
        own = rules.own(store.place, request, reads_identity=is_identity)
        rules.require_known_families(own.filter, "filter")
        async for answer in _answers(store, store.read_rows, own):
            yield answer

    async def sample_row_keys(
        self, request: pb.BigtableSampleRowKeysRequest
    ) -> AsyncIterator[pb.BigtableSampleRowKeysResponse]:
        store = self._store()
        async for answer in _answers(store, store.sample, rules.own(store.place, request)):
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
    """What the store refuses to this gateway's account says nothing of the caller's token: it would
    be replaced in vain, or taken for one without the role. And only this account can ask which
    family a table lacks."""
    try:
        yield
    except FamilyMissing as error:
        raise await named(store.network, store.place, error) from error
    except (Unauthenticated, PermissionDenied) as error:
        raise NotReady(
            f"the account of this gateway cannot use the store: {error.message}",
            retry_after_seconds=_NOT_READY_SECONDS,
        ) from error
