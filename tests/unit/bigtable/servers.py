"""Servers for tests of the driver: one checks who calls, the other breaks off its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

from google.protobuf.message import Message
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded, StreamReset

from percolator.bigtable.account import Token, Tokens
from percolator.bigtable.admin import create_table
from percolator.bigtable.connection import BigtableNetwork
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.rowstore.layout import WRITES
from percolator.rowstore.port import Check, Selection, SetCell
from tests.doubles.bigtable_service import BigtableService, served

TABLE = 7
SECONDS = 10.0
NOTHING = Check((Selection(WRITES),), found=False)


class Account:
    """An account with the tokens that a test chooses."""

    def __init__(self) -> None:
        self.tokens = ["valid"]
        self.asked = 0

    def __call__(self) -> Token:
        self.asked += 1
        return Token(self.tokens[0] if len(self.tokens) == 1 else self.tokens.pop(0), 3600.0)


class Connected(NamedTuple):
    service: BigtableService
    account: Account
    network: BigtableNetwork
    place: Place
    store: BigtableStore

    async def put(self, row: bytes, value: bytes = b"value") -> bool:
        change = SetCell(WRITES, b"ca", 1000, value)
        return await self.store.check_and_mutate(TABLE, row, NOTHING, (change,), SECONDS)

    def names(self, name: str) -> int:
        """The number of calls of that name that have arrived."""
        return sum(called == name for called, _ in self.service.calls)

    async def rows(self) -> list[bytes]:
        scan = self.store.scan(
            TABLE,
            b"",
            b"",
            (Selection(WRITES),),
            rows_max=0,
            reverse=False,
            timeout_seconds=SECONDS,
        )
        async with aclosing(scan) as rows:
            return [row.key async for row in rows]


@asynccontextmanager
async def connected() -> AsyncIterator[Connected]:
    service, account = BigtableService(), Account()
    async with served(service) as (address, certificate):
        network = BigtableNetwork(Tokens(account), certificate)
        place = Place(address, "my-project", "my-instance", "one_cluster")
        await create_table(network, place, TABLE, SECONDS)
        yield Connected(service, account, network, place, BigtableStore(network, place))
        await network.close()


HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
DONE = [("grpc-status", "0")]


class Peer:
    """A server of HTTP/2 that answers as a test says, also in ways that no server should.

    `answer_call` gets the stream of each call that has arrived completely.
    """

    def __init__(self, answer_call: Callable[[PeerConnection, int], None]) -> None:
        self.answer_call = answer_call
        self.calls = 0
        self.connections: list[PeerConnection] = []
        self.resets: asyncio.Queue[int] = asyncio.Queue()
        """The codes with which callers have given up calls."""

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[str]:
        """Serves, and yields the address."""
        loop = asyncio.get_running_loop()
        async with await loop.create_server(
            lambda: PeerConnection(self), "127.0.0.1", port
        ) as server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for connection in self.connections:
            connection.transport.abort()
            await connection.lost


class PeerConnection(asyncio.Protocol):
    """One connection to a `Peer`."""

    transport: asyncio.Transport

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.h2 = H2Connection(H2Configuration(client_side=False))
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.peer.connections.append(self)
        self.h2.initiate_connection()
        self._send()

    def connection_lost(self, _: Exception | None) -> None:
        self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, DataReceived) and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamReset):
                self.peer.resets.put_nowait(event.error_code)
            elif isinstance(event, StreamEnded):
                self.peer.calls += 1
                self.peer.answer_call(self, event.stream_id)
        self._send()

    def answer(self, stream: int, message: Message) -> None:
        """Answers with one message, as a server should."""
        self.begin(stream, message.SerializeToString())
        self.h2.send_headers(stream, DONE, end_stream=True)

    def begin(self, stream: int, *messages: bytes) -> None:
        """Begins an answer, and does not end it."""
        self.h2.send_headers(stream, HEADERS)
        for message in messages:
            self.h2.send_data(stream, b"\0" + len(message).to_bytes(4) + message)

    def leave(self, last: int) -> None:
        """Announces that no call after that of the stream `last` is taken (GOAWAY)."""
        self._send()
        self.transport.write(b"\0\0\x08\x07\0" + bytes(4) + last.to_bytes(4) + bytes(4))

    def _send(self) -> None:
        if data := self.h2.data_to_send():
            self.transport.write(data)
