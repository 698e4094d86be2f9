"""The ways in which a message and its answer may travel between two programs in Python.

Each way is a server that returns what it gets, and a client of it. Both sides do what a call of the
library needs, and no more: any number of calls at a time, each with its own answer. Calls over a
stream of gRPC's are answered in order, so their answers need no numbers.
"""

from __future__ import annotations

import asyncio
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

UNARY, STREAM, ITERATED = "/benchmark.Echo/Unary", "/benchmark.Echo/Stream", "/benchmark.Echo/Each"
HEADER = struct.Struct("<II")
"""The length of what follows, and the number of the call."""
THREADS_MAX = 64


class Way(ABC):
    """One way. `serve` and `open` run in different processes, on their event loops."""

    @abstractmethod
    async def serve(self, path: str) -> int:
        """Begins to answer, at a port that it returns, or at the path."""

    @abstractmethod
    async def open(self, address: str) -> None: ...

    @abstractmethod
    async def call(self, message: bytes) -> bytes: ...


class GrpcUnary(Way):
    """Unary calls of gRPC's asyncio API."""

    async def serve(self, path: str) -> int:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((_echo(),))
        port: int = self._server.add_insecure_port("127.0.0.1:0")
        self._server.add_insecure_port(f"unix:{path}")
        await self._server.start()
        return port

    async def open(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        await self._channel.channel_ready()
        self._unary = self._channel.unary_unary(UNARY)

    async def call(self, message: bytes) -> bytes:
        answer: bytes = await self._unary(message)
        return answer


class GrpcStream(GrpcUnary):
    """One stream, with `read` and `write` on both sides."""

    async def open(self, address: str) -> None:
        await super().open(address)
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._stream = self._channel.stream_stream(STREAM)()
        self._turn = asyncio.Lock()
        self._reading = asyncio.create_task(self._read())

    async def call(self, message: bytes) -> bytes:
        async with self._turn:  # one `write` at a time
            answer = asyncio.get_running_loop().create_future()
            self._waiting.append(answer)
            await self._stream.write(message)
        found: bytes = await answer
        return found

    async def _read(self) -> None:
        while True:
            answer = await self._stream.read()
            self._waiting.popleft().set_result(answer)


class GrpcIterated(GrpcUnary):
    """One stream, with iterators on both sides."""

    async def open(self, address: str) -> None:
        await super().open(address)
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    async def call(self, message: bytes) -> bytes:
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._messages.put_nowait(message)
        found: bytes = await answer
        return found

    async def _requests(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._messages.get()

    async def _read(self) -> None:
        async for answer in self._channel.stream_stream(ITERATED)(self._requests()):
            self._waiting.popleft().set_result(answer)


class GrpcThreads(Way):
    """Unary calls of gRPC's API for threads, on both sides."""

    async def serve(self, path: str) -> int:
        self._server = grpc.server(ThreadPoolExecutor(THREADS_MAX))
        echo = grpc.unary_unary_rpc_method_handler(lambda message, _: message)
        self._server.add_generic_rpc_handlers((_Handlers({UNARY: echo}),))
        port: int = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return port

    async def open(self, address: str) -> None:
        self.unary: Any = grpc.insecure_channel(address).unary_unary(UNARY)
        """For callers that are threads."""

    async def call(self, message: bytes) -> bytes:
        answer: bytes = await asyncio.to_thread(self.unary, message)
        return answer


class Frames(Way):
    """asyncio's `Protocol`: a task for each call, and one write for all that is ready together."""

    async def serve(self, path: str) -> int:
        return _port(await asyncio.get_running_loop().create_server(_ServerSide, "127.0.0.1", 0))

    async def open(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        _, self._side = await loop.create_connection(_ClientSide, host, int(port))

    async def call(self, message: bytes) -> bytes:
        return await self._side.call(message)


class Streams(Way):
    """asyncio's streams: no task for a call, and a write for each."""

    async def serve(self, path: str) -> int:
        return _port(await asyncio.start_server(self._answer, "127.0.0.1", 0))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            size, number = HEADER.unpack(await reader.readexactly(HEADER.size))
            writer.write(HEADER.pack(size, number) + await reader.readexactly(size))

    async def open(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._reading = asyncio.create_task(self._read())

    async def call(self, message: bytes) -> bytes:
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._writer.write(HEADER.pack(len(message), 0) + message)
        found: bytes = await answer
        return found

    async def _read(self) -> None:
        while True:
            size, _ = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            answer = await self._reader.readexactly(size)
            self._waiting.popleft().set_result(answer)


class _Side(asyncio.Protocol, ABC):
    """Frames in both directions; what is sent in one turn of the loop leaves together."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._kept = b""
        self._ready: list[bytes] = []

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - asyncio's are not related
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        kept, at = self._kept + data, 0
        while len(kept) - at >= HEADER.size:
            size, number = HEADER.unpack_from(kept, at)
            end = at + HEADER.size + size
            if len(kept) < end:
                break
            self.take(number, kept[at + HEADER.size : end])
            at = end
        self._kept = kept[at:]

    @abstractmethod
    def take(self, number: int, body: bytes) -> None: ...

    def send(self, number: int, body: bytes) -> None:
        if not self._ready:
            self._loop.call_soon(self._flush)
        self._ready += (HEADER.pack(len(body), number), body)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._ready))
        self._ready.clear()


class _ServerSide(_Side):
    def __init__(self) -> None:
        super().__init__()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, number: int, body: bytes) -> None:
        task = self._loop.create_task(self._answer(number, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, body: bytes) -> None:
        self.send(number, body)


class _ClientSide(_Side):
    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._calls = 0

    async def call(self, message: bytes) -> bytes:
        self._calls += 1
        answer = self._waiting[self._calls] = self._loop.create_future()
        self.send(self._calls, message)
        found: bytes = await answer
        return found

    def take(self, number: int, body: bytes) -> None:
        self._waiting.pop(number).set_result(body)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, methods: dict[str, grpc.RpcMethodHandler]) -> None:
        self._methods = methods

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._methods.get(details.method)


def _echo() -> _Handlers:
    async def unary(message: bytes, _: object) -> bytes:
        return message

    async def stream(_: object, context: Any) -> None:  # noqa: ANN401 - grpc has no types
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    async def each(messages: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message

    return _Handlers(
        {
            UNARY: grpc.unary_unary_rpc_method_handler(unary),
            STREAM: grpc.stream_stream_rpc_method_handler(stream),
            ITERATED: grpc.stream_stream_rpc_method_handler(each),
        }
    )


def _port(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port
