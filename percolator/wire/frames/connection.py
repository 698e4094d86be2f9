"""The caller's side of a connection for frames: any number of calls at a time.

Invariants:
- A call ends once: with its answer, at its deadline, when its caller is cancelled, or when the
  connection ends. In the last case it may have been executed, as over gRPC.
- A call that its caller gives up is cancelled at the server, too.
- A server that says nothing, not even that it is there, is given up after about 15 seconds; if not
  even its machine acknowledges what was sent, after five.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from typing import cast

from google.protobuf.message import DecodeError

from percolator import errors
from percolator.v1.frames_pb2 import FramesHello, FramesWelcome
from percolator.wire.frames import local_socket
from percolator.wire.frames.layout import (
    ANSWER_BYTES_MAX,
    CALL_HEAD,
    PREAMBLE,
    TIMEOUT_MILLISECONDS_MAX,
    Frame,
    FrameReader,
    Kind,
    NotFrames,
    frame,
)
from percolator.wire.status import from_status
from percolator.wire.tls import CLUSTER_NAME

LOOK_SECONDS = 5.0
"""How often a connection with calls in progress is looked at. After two looks without a sign of the
server, it is asked for one, and given up at the next look."""
_LOOKS_BEFORE_PING = 2

UNACKNOWLEDGED_SECONDS = 5.0
"""As gRPC has it (percolator/wire/channels.py). Firewalls forget connections that were idle, and
drop what is sent over them from then on. Calls give up sooner than 15 seconds."""

_CALL_NUMBERS = 2**32


class FrameConnection(asyncio.Protocol):
    """A connection on which the server has said welcome. Belongs to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(ANSWER_BYTES_MAX)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._welcome: asyncio.Future[FramesWelcome] = self._loop.create_future()
        self._methods: dict[str, int] = {}
        self._paused = False
        self._retiring = False
        self._heard = False
        self._silent_looks = 0
        self._last_used = self._loop.time()
        self._look: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the connection has ended, for whatever reason."""
        self.request_bytes_max = 0
        self._calls_max = 0

    @staticmethod
    async def open(
        host: str,
        port: int,
        hello: FramesHello,
        context: ssl.SSLContext | None,
        seconds: float,
    ) -> FrameConnection:
        """Connects, and waits for the welcome. Raises `OSError`, `TimeoutError`, `NotFrames`."""

        def connect(connection: FrameConnection) -> Awaitable[object]:
            return connection._loop.create_connection(
                lambda: connection,
                host,
                port,
                ssl=context,
                server_hostname=CLUSTER_NAME if context is not None else None,
            )

        return await FrameConnection._opened(connect, hello, seconds)

    @staticmethod
    async def open_local(name: str, hello: FramesHello, seconds: float) -> FrameConnection:
        """The same within this machine, by the name of the server's socket."""

        async def connect(connection: FrameConnection) -> None:
            sock = await local_socket.connected(name)
            await connection._loop.create_unix_connection(lambda: connection, sock=sock)

        return await FrameConnection._opened(connect, hello, seconds)

    @staticmethod
    async def _opened(
        connect: Callable[[FrameConnection], Awaitable[object]], hello: FramesHello, seconds: float
    ) -> FrameConnection:
        connection = FrameConnection()
        try:
            async with asyncio.timeout(seconds):
                await connect(connection)
                connection._begin(hello)
                await connection._welcomed()
        except BaseException:
            connection.close()
            connection._forget_welcome()
            raise
        return connection

    # --------------------------------------------------------------------------- calls

    def takes(self, path: str) -> bool:
        """Whether a call of this method may be sent now."""
        return (
            path in self._methods
            and len(self._waiting) < self._calls_max
            and not self._paused
            and not self._retiring
            and self._transport is not None
            and not self._transport.is_closing()
        )

    def unused_since(self) -> float | None:
        """By looks, so that it costs calls nothing; None while calls are in progress."""
        return None if self._waiting else self._last_used

    async def call(self, path: str, request: bytes, timeout: float) -> bytes:
        """The bytes of the response. Call it only if `takes`. Raises only `PercolatorError`."""
        number = next(self._numbers) % _CALL_NUMBERS
        answer = self._waiting[number] = self._loop.create_future()
        milliseconds = max(0, min(int(timeout * 1000), TIMEOUT_MILLISECONDS_MAX))
        head = CALL_HEAD.pack(self._methods[path], milliseconds)
        timer = self._loop.call_later(timeout, _too_late, answer)
        self._write(frame(Kind.CALL, number, head + request))
        try:
            response: bytes = await answer
        finally:
            timer.cancel()
            if self._waiting.pop(number, None) is not None:
                self._write(frame(Kind.CANCEL, number))
            if self._retiring and not self._waiting:
                self.close()
        return response

    def retire(self) -> None:
        """Takes no further calls, and closes when those in progress have ended."""
        self._retiring = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """Ends the connection at once, and the calls in progress with it."""
        self._retiring = True
        if self._transport is not None:
            # Not `close`: that would wait for a server that reads nothing.
            self._transport.abort()

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _expect_acknowledgements(transport.get_extra_info("socket"))
        if self._retiring:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self._reader.add(data)
        try:
            while (received := self._reader.next()) is not None:
                self._take(received)
        except NotFrames as error:
            self._end(f"the server sent nonsense: {error}")

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def connection_lost(self, error: Exception | None) -> None:
        self._end("the connection was closed" if error is None else f"{error}")

    # ------------------------------------------------------------------------- frames

    def _begin(self, hello: FramesHello) -> None:
        self._write(PREAMBLE + frame(Kind.HELLO, 0, hello.SerializeToString()))

    async def _welcomed(self) -> None:
        welcome = await self._welcome
        self._methods = {path: index for index, path in enumerate(welcome.paths)}
        self.request_bytes_max = welcome.request_bytes_max
        self._calls_max = welcome.calls_max
        if self.ended.done():
            # Nobody is left to cancel the looks: they would go on for as long as the program.
            raise NotFrames("the connection was closed with its welcome")
        self._look = self._loop.call_later(LOOK_SECONDS, self._look_after)

    def _forget_welcome(self) -> None:
        """Nobody waits for it any more, so the event loop would report an error that it gets."""
        if not self._welcome.cancel() and not self._welcome.cancelled():
            self._welcome.exception()

    def _take(self, received: Frame) -> None:
        match received.kind:
            case Kind.ANSWER:
                answer = self._waiting.pop(received.call, None)
                # None for a call that was given up meanwhile.
                if answer is not None and not answer.done():
                    answer.set_result(received.body)
            case Kind.FAILURE:
                answer = self._waiting.pop(received.call, None)
                if answer is not None and not answer.done():
                    answer.set_exception(from_status(received.body))
            case Kind.WELCOME if not self._welcome.done():
                try:
                    self._welcome.set_result(FramesWelcome.FromString(received.body))
                except DecodeError as error:
                    raise NotFrames(f"a welcome that is not a message: {error}") from None
            case Kind.PONG:
                pass
            case Kind.LEAVING:
                self.retire()
            case _:
                raise NotFrames(f"a frame of kind {received.kind} from a server")

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _look_after(self) -> None:
        self._look = self._loop.call_later(LOOK_SECONDS, self._look_after)
        if self._heard or self._waiting:
            self._last_used = self._loop.time()
        if self._heard or not self._waiting:
            self._heard = False
            self._silent_looks = 0
            return
        self._silent_looks += 1
        if self._silent_looks == _LOOKS_BEFORE_PING:
            self._write(frame(Kind.PING, 0))
        elif self._silent_looks > _LOOKS_BEFORE_PING:
            self._end("the server gives no sign of life")

    def _end(self, reason: str) -> None:
        self.close()
        if self._look is not None:
            self._look.cancel()
        if not self._welcome.done():
            self._welcome.set_exception(NotFrames(reason))
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(errors.Unavailable(reason))
        if not self.ended.done():
            self.ended.set_result(None)


def _expect_acknowledgements(sock: socket.socket) -> None:
    """Has the system end a connection over TCP on which everything is lost."""
    if sys.platform == "linux" and sock.family != socket.AF_UNIX:
        milliseconds = round(UNACKNOWLEDGED_SECONDS * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _too_late(answer: asyncio.Future[bytes]) -> None:
    if not answer.done():
        answer.set_exception(errors.DeadlineExceeded("no answer in time"))
