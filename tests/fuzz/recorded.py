"""Requests that a client has really sent: a session that uses all of the library, recorded.

What is valid in the protocol of transactions cannot be made from descriptors: conditions, records
and timestamps that fit each other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from datetime import timedelta

from google.protobuf.message import Message

from percolator import Table, aio, codecs
from percolator.aio.bulk_load import BulkLoad, LoadPlan
from percolator.aio.connecting import connect_to
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.wire.channels import GrpcNetwork
from percolator.world import (
    MachineClock,
    Random,
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
    World,
    machine_random,
)
from tests.integration.observed_orders import observers, orders, placed

_RECORDED_MAX = 30
_ROWS = 12

played = Table("played", key=codecs.text)
note = played.column("note", codecs.raw)


class Recorded:
    """The latest requests that clients have really sent, by method."""

    def __init__(self) -> None:
        self._by_path: defaultdict[str, deque[bytes]] = defaultdict(
            lambda: deque(maxlen=_RECORDED_MAX)
        )

    def note(self, path: str, request: Message) -> None:
        self._by_path[path].append(request.SerializeToString())

    def of(self, path: str, chance: Random) -> bytes | None:
        found = self._by_path.get(path)
        return chance.choice(found) if found else None


class RecordingNetwork(GrpcNetwork):
    """Notes every request before it is sent."""

    recorded: Recorded

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT], *, server: str = ""
    ) -> UnaryCall[RequestT, ResponseT]:
        call = super().unary(address, method, server=server)

        async def noted(request: RequestT, timeout: float) -> ResponseT:
            self.recorded.note(method.path, request)
            return await call(request, timeout)

        return noted

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT], *, server: str = ""
    ) -> StreamCall[RequestT, ResponseT]:
        call = super().stream(address, method, server=server)

        async def noted(request: RequestT, timeout: float) -> AsyncGenerator[ResponseT, None]:
            self.recorded.note(method.path, request)
            async for answer in call(request, timeout):
                yield answer

        return noted


async def connected(address: str, network: RecordingNetwork, description: str) -> aio.Database:
    """A database whose calls are recorded."""
    world = World(clock=MachineClock(), network=network, random=machine_random())
    return await connect_to(world, [address], Limits(), RetryPolicy(), description=description)


async def play(database: aio.Database) -> None:
    """Uses everything that a program may use, and ends."""
    await database.create_table(orders, exist_ok=True)
    await database.create_table(played, ["m"], exist_ok=True, retention=timedelta(hours=1))
    await database.register_observers(observers)
    await database.set_many((f"{number:02}", {placed: number}) for number in range(_ROWS))
    await database.run(_transact)
    async with database.snapshot() as snapshot:
        _ = [row.key async for row in snapshot.scan(played)]
        _ = [row.key async for row in snapshot.scan(played, reverse=True)]
    async with database.pin():
        await database.run(_transact)
    await database.wait_for_observers()
    load = BulkLoad(database, LoadPlan("played", "a bulk load", b"zz", b"", notify=False))
    timestamps = await load.begin()
    await load.load([(b"zz1", b"note", b"loaded")], timestamps)
    await load.finish(timestamps)
    engine = database.internal.engine
    await engine.catalog.tables(engine.now() + 5.0)


async def _transact(tx: aio.Transaction) -> None:
    """Reads, puts, deletes and locks, in both tablets."""
    chance = Random("what is played")
    for number in range(4):
        await tx.set(f"{chance.choice('az')}-{number}", note, bytes(10**number))
    await tx.get("a-0", note, default=b"")
    await tx.delete("a-9", note)
    await tx.lock("b-1", note)
