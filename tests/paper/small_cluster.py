"""A cluster with small timestamps, cells that can be inspected, and clients that die.

The tablets and the clients are the real ones. Values are stored apart from their write records, as
in the paper, and not in them, as this system usually does with short ones.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from percolator import Limits, RetryPolicy, Table, codecs
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
    World,
)
from tests.simulation.virtual_time import VirtualClock
from tests.unit.connected import written_out

accounts = Table("accounts")
balance = accounts.column("bal", codecs.integer)

LIMITS = Limits(value_inline_bytes_max=1, one_round_cells_max=0)
"""With these, values are stored apart, and transactions take two phases, as in the paper."""

Cells = dict[str, dict[str, dict[int, object]]]
"""Cells as Figure 4 draws them: by row, then "data", "lock" or "write", then timestamp."""


class SmallCluster(ClusterInMemory):
    """Bob and Joe are in different tablets, so that each step of Figure 4 is one of ours."""

    def __init__(self) -> None:
        super().__init__(VirtualClock(asyncio.get_running_loop()))
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.next_timestamp = 1
        self.after_batch: Callable[[], Awaitable[None]] | None = None

    def _allocate(self, count: int) -> int:
        first = self.next_timestamp
        self.next_timestamp += count
        return first

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        response = pb.MutateResponse()
        for batch in request.batches:
            part = await super().mutate(pb.MutateRequest(batches=[batch]))
            response.batches.extend(part.batches)
            if self.after_batch is not None:
                await self.after_batch()
        return response

    async def cells(self) -> Cells:
        """The stored cells of the balances."""
        found: Cells = {}
        for tablet in self.tablets.values():
            for space in (cells_pb2.SPACE_DATA, cells_pb2.SPACE_LOCK, cells_pb2.SPACE_WRITE):
                request = pb.ScanCellsRequest(
                    target=pb.TabletTarget(
                        tablet_id=tablet.identity.tablet_id, epoch=1, schema_version=1
                    ),
                    space=space,
                )
                async for page in tablet.scan_cells(request):
                    for cell in page.cells:
                        columns = found.setdefault(
                            cell.row.decode(), {"data": {}, "lock": {}, "write": {}}
                        )
                        _draw(cell, columns)
        return found

    async def client(self) -> Client:
        client = Client(self)
        client.db = await connect_to(
            World(self.clock, client, random.Random(1)), [ADDRESS], LIMITS, RetryPolicy()
        )
        return client

    async def opened(self) -> Client:
        """A client, and the empty table."""
        client = await self.client()
        await client.db.create_table(accounts, splits=["Joe"])
        return client


def _draw(cell: cells_pb2.Cell, columns: dict[str, dict[int, object]]) -> None:
    if cell.space == cells_pb2.SPACE_DATA:
        columns["data"][cell.timestamp] = codecs.integer.decode(cell.value)
    elif cell.space == cells_pb2.SPACE_LOCK:
        lock = LockRecord.decode(cell.value)
        primary = lock.primary.row.decode()
        here = primary == cell.row.decode()
        columns["lock"][lock.start_timestamp] = "primary" if here else f"primary @ {primary}.bal"
    else:
        record = WriteRecord.decode(cell.value)
        at = record.start_timestamp
        drawn = f"data @ {at}" if record.kind == RecordKind.PUT_IN_DATA else record.kind.name
        columns["write"][cell.timestamp] = drawn


class Client:
    """One process: its `Database`, and its network, which ends with it."""

    db: Database

    def __init__(self, cluster: SmallCluster) -> None:
        self._network = InProcessNetwork({ADDRESS: cluster})
        self._alive = asyncio.Event()
        self._alive.set()
        self.before: Callable[[pb.MutateRequest], Awaitable[None]] | None = None
        self.after: Callable[[pb.MutateRequest], Awaitable[None]] | None = None

    def crash(self) -> None:
        """From now on, the client sends and receives nothing."""
        self._alive.clear()

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        call = self._network.unary(address, method)

        async def guarded(request: RequestT, timeout: float) -> ResponseT:
            await self._alive.wait()
            if isinstance(request, pb.MutateRequest) and self.before is not None:
                await self.before(request)
            await self._alive.wait()
            response = await call(request, timeout)
            if isinstance(request, pb.MutateRequest) and self.after is not None:
                await self.after(request)
            await self._alive.wait()
            return response

        return guarded

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        return self._network.stream(address, method)

    async def close(self) -> None:
        """There is nothing to close."""


def commits(request: pb.MutateRequest) -> bool:
    """True if the request writes a commit record."""
    return any(
        change.kind == pb.Change.KIND_PUT and change.space == cells_pb2.SPACE_WRITE
        for batch in request.batches
        for mutation in written_out(batch)
        for change in mutation.changes
    )


async def put(client: Client, **balances: int) -> int:
    """Runs one transaction; returns its commit timestamp."""
    async with client.db.transaction() as tx:
        for row, amount in balances.items():
            await tx.set(row, balance, amount)
    assert tx.commit_timestamp is not None
    return tx.commit_timestamp


async def transfer(client: Client, amount: int) -> None:
    """The paper's transfer, from Bob to Joe."""
    async with client.db.transaction() as tx:
        bob, joe = await tx.get_many(accounts, ["Bob", "Joe"])
        await tx.set("Bob", balance, bob[balance] - amount)
        await tx.set("Joe", balance, joe[balance] + amount)


async def balances(client: Client) -> dict[str, int]:
    async with client.db.snapshot() as snapshot:
        return {row.key: row[balance] async for row in snapshot.scan(accounts)}
