"""Which way a call takes: frames where the server offers them, and gRPC at all other times.

Nothing waits for frames. Once a server was called a few times, it is asked over gRPC whether it
offers them, and connected to in the background; until that has succeeded, and whenever the
connection has ended, calls go over gRPC. So a server without frames, a closed port, or one that
leads to another server, costs nothing but speed.

Large requests always go over gRPC. A call is repeated over gRPC only if it was not executed: it did
not leave, or its token is no longer valid. gRPC reads the token again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

from google.protobuf.message import DecodeError

from percolator import errors
from percolator.errors import ExecutionUnknown, PercolatorError, Unauthenticated
from percolator.tasks import Tasks
from percolator.v1.frames_pb2 import FramesHello, FramesWelcome, OfferFramesResponse
from percolator.wire import methods
from percolator.wire.addresses import HostPort, parse_host_port
from percolator.wire.credentials import SCHEME, Credentials
from percolator.wire.status import from_status
from percolator.wire.tls import CLUSTER_NAME
from percolator.world import (
    RequestT,
    Responses,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)

# The bytes of a connection that carries frames, for both sides.
#
# The caller begins with `PREAMBLE`. What follows, in both directions, are frames: a header with the
# size of the body, the kind, and the number of the call, and then the body. Numbers are
# little-endian.
#
# | kind | from | body |
# |---|---|---|
# | HELLO | caller | a `FramesHello` |
# | WELCOME | server | a `FramesWelcome` |
# | CALL | caller | the index of the method, the time-out in milliseconds, and the request |
# | CANCEL | caller | empty: the caller no longer waits, and there will be no answer |
# | ANSWER | server | the response |
# | FAILURE | server | a `google.rpc.Status` with one `percolator.v1.ErrorDetail`, as over gRPC |
# | PING | caller | empty |
# | PONG | server | empty |
# | LEAVING | server | empty: it is about to end the connection; further calls go elsewhere |

PREAMBLE = b"percolator frames 1\n"
"""Its number changes with every change that the other side has to know of."""

HEADER = struct.Struct("<IBI")
CALL_HEAD = struct.Struct("<BI")

GREETING_BYTES_MAX = 8 * 1024
"""The size of a hello; its token has at most 1,024 characters."""
ANSWER_BYTES_MAX = 32 * 1024 * 1024
"""The size of the largest answer, as over gRPC (percolator/wire/channels.py)."""
TIMEOUT_MILLISECONDS_MAX = 2**32 - 1

FRAMED = frozenset(
    method.path
    for method in (
        methods.GET_TIMESTAMPS,
        methods.READ,
        methods.AWAIT_TURN,
        methods.END_TURN,
        methods.SCAN,
        methods.MUTATE,
        methods.COMMIT_TRANSACTIONS,
    )
)
"""The paths of the methods that travel in frames, where a server offers them. An answer is one
response: of a method that streams, the first."""


class Kind(IntEnum):
    """Kind of frame."""

    HELLO = 1
    WELCOME = 2
    CALL = 3
    CANCEL = 4
    ANSWER = 5
    FAILURE = 6
    PING = 7
    PONG = 8
    LEAVING = 9


class Frame(NamedTuple):
    """One frame. `kind` is a number that the sender chose: perhaps none of `Kind`."""

    kind: int
    call: int
    body: bytes


class NotFrames(Exception):
    """Received bytes that this layout does not allow; the text says why."""


def frame(kind: Kind, call: int, body: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return HEADER.pack(len(body), kind, call) + body


class FrameReader:
    """Cuts what was received into frames.

    Only what a frame lacks is kept. What others send in many small pieces is copied once.
    """

    def __init__(self, bytes_max: int, preamble: bytes = b"") -> None:
        """`bytes_max` is the size of the largest body; `preamble` has to come first."""
        self.bytes_max = bytes_max
        self._preamble = preamble
        self._kept = bytearray()

    @property
    def kept(self) -> int:
        """The bytes that were received and are not a whole frame yet, or not taken."""
        return len(self._kept)

    def add(self, data: bytes) -> None:
        """Takes what was received."""
        self._kept += data

    def next(self) -> Frame | None:
        """The next frame; None if it is not complete. `NotFrames` if there will never be one."""
        kept = self._kept
        if self._preamble and not self._skip_preamble():
            return None
        if len(kept) < HEADER.size:
            return None
        size, kind, call = HEADER.unpack_from(kept)
        if size > self.bytes_max:
            raise NotFrames(f"a frame of {size} bytes, at most {self.bytes_max} are accepted")
        end = HEADER.size + size
        if len(kept) < end:
            return None
        with memoryview(kept) as view:
            body = bytes(view[HEADER.size : end])
        del kept[:end]
        return Frame(kind, call, body)

    def _skip_preamble(self) -> bool:
        # Judged by what is there: noise is refused at its first byte.
        kept, expected = self._kept, self._preamble
        if kept[: len(expected)] != expected[: len(kept)]:
            raise NotFrames("does not begin as a connection for frames")
        if len(kept) < len(expected):
            return False
        del kept[: len(expected)]
        self._preamble = b""
        return True


LOOK_SECONDS = 5.0
"""How often a connection with calls in progress is looked at. After two looks without a sign of the
server, it is asked for one, and given up at the next look."""
_LOOKS_BEFORE_PING = 2

UNACKNOWLEDGED_SECONDS = 5.0
"""As gRPC has it (percolator/wire/channels.py). Firewalls forget connections that were idle, and
drop what is sent over them from then on. Calls give up sooner than 15 seconds."""

_CALL_NUMBERS = 2**32


class FrameConnection(asyncio.Protocol):
    """The caller's side of a connection on which the server has said welcome: any number of calls
    at a time. Belongs to one event loop.

    Invariants:
    - A call ends once: with its answer, at its deadline, when its caller is cancelled, or when the
      connection ends. In the last case it may have been executed, as over gRPC.
    - A call that its caller gives up is cancelled at the server, too.
    - A server that says nothing, not even that it is there, is given up after about 15 seconds; if
      not even its machine acknowledges what was sent, after five.
    """

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
        """As `open`, within this machine, by the name of the server's socket."""

        async def connect(connection: FrameConnection) -> None:
            sock = await connected(name)
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
        """True if a call of this method may be sent now. Those that wait long leave half of the
        calls to others."""
        return (
            path in self._methods
            and len(self._waiting) < self._calls_max >> (path == methods.AWAIT_TURN.path)
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
        """Retrieves its error: no one waits for it any more, so the event loop would report it."""
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
    """Makes the system end a TCP connection on which everything is lost."""
    if sys.platform == "linux" and sock.family != socket.AF_UNIX:
        milliseconds = round(UNACKNOWLEDGED_SECONDS * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _too_late(answer: asyncio.Future[bytes]) -> None:
    if not answer.done():
        answer.set_exception(errors.DeadlineExceeded("no answer in time"))


# The socket for frames within one machine, for both sides.
#
# A message over TCP costs more than over a Unix socket, also within one machine. The socket has no
# file, but a name that exists only in the server's network namespace, as its loopback addresses do:
# who can dial one can dial the other. Linux has such names; elsewhere there is no such socket.

AVAILABLE = sys.platform == "linux"

_PREFIX = b"\0percolator-frames-"
"""No server can make its callers connect to a socket of something else."""


def bound(name: str) -> socket.socket:
    """A socket to listen at. Raises `OSError`."""
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        taken.bind(_PREFIX + name.encode())
    except BaseException:
        taken.close()
        raise
    return taken


async def connected(name: str) -> socket.socket:
    """Raises `OSError`."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, _PREFIX + name.encode())
    except BaseException:
        made.close()
        raise
    return made


UNUSED_SECONDS = 600.0
"""Much longer than the pauses of a program that calls its servers now and then."""


class Used(Protocol):
    """Object kept for one address."""

    def unused_since(self) -> float | None:
        """By the event loop's clock; None while a call is in progress or waits."""


UsedT = TypeVar("UsedT", bound=Used)


class ByAddress(Generic[UsedT]):
    """One thing of a kind for each address. Belongs to one event loop.

    What was dropped must not be used any more: ask for it with each use, or mark it in `drop`.

    A tablet server that is replaced usually comes back at another address. A process that lives for
    months among such servers would otherwise keep a queue, a connection and a socket for each that
    it has ever called.

    What was unused for ten minutes is dropped when another address is first used, and made again if
    its own address is used again. So there is no timer, and a process whose servers stay drops
    nothing.
    """

    def __init__(
        self, make: Callable[[str], UsedT], drop: Callable[[UsedT], None] | None = None
    ) -> None:
        """`drop` gets each that is kept no longer."""
        self._make = make
        self._drop = drop
        self._kept: dict[str, UsedT] = {}

    def get(self, address: str) -> UsedT:
        """Object kept for this address; makes it if there is none."""
        kept = self._kept.get(address)
        if kept is None:
            self._drop_unused()
            kept = self._kept[address] = self._make(address)
        return kept

    def __iter__(self) -> Iterator[UsedT]:
        return iter(self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def take_all(self) -> list[UsedT]:
        """Empties the collection, without dropping anything; returns what was in it."""
        taken, self._kept = list(self._kept.values()), {}
        return taken

    def _drop_unused(self) -> None:
        earliest = asyncio.get_running_loop().time() - UNUSED_SECONDS
        for address, kept in list(self._kept.items()):
            since = kept.unused_since()
            if since is not None and since <= earliest:
                del self._kept[address]
                if self._drop is not None:
                    self._drop(kept)


CALLS_BEFORE = 4
"""A server is asked for frames after this many calls: a program that makes one or two has more to
lose than to gain."""
SMALL_BYTES_MAX = 8 * 1024
"""The size of the largest request that travels in a frame. Larger ones carry the rows of hundreds
of transactions: there a call's own cost is small, and gRPC sends it while Python goes on."""
CONNECT_SECONDS = 5.0
PAUSE_SECONDS_MIN = 0.5
PAUSE_SECONDS_MAX = 60.0
"""Between two attempts; twice as long after each that failed. A server that offers nothing may be
upgraded."""
STEADY_SECONDS = 10.0
"""A connection that has lasted so long was a success."""

Offer = Callable[[str], Awaitable[OfferFramesResponse]]
"""Asks the server at an address, over gRPC."""

_log = logging.getLogger("percolator.frames")


class FrameConnections:
    """The connections for frames of one network. Belongs to its event loop."""

    def __init__(self, offer: Offer, credentials: Credentials) -> None:
        self.credentials = credentials
        """The present ones: a connection that was made with others takes no more calls."""
        self._tasks = Tasks()
        self._peers = ByAddress(lambda address: _Peer(address, offer, self._tasks), _Peer.leave)
        self._closed = False

    def unary(
        self,
        address: str,
        method: UnaryMethod[RequestT, ResponseT],
        over_grpc: UnaryCall[RequestT, ResponseT],
    ) -> UnaryCall[RequestT, ResponseT]:
        """The call of a method: in a frame where that is possible when it is made."""
        if method.path not in FRAMED:
            return over_grpc
        framed = self._framed(address, method)

        async def call(request: RequestT, timeout: float) -> ResponseT:
            response = await framed.response(request, timeout)
            return await over_grpc(request, timeout) if response is None else response

        return call

    def stream(
        self,
        address: str,
        method: StreamMethod[RequestT, ResponseT],
        over_grpc: StreamCall[RequestT, ResponseT],
    ) -> StreamCall[RequestT, ResponseT]:
        """As `unary`, for a method that streams. In a frame, a stream ends after its first
        response, so only short ones travel there."""
        is_short = method.is_short
        if method.path not in FRAMED or is_short is None:
            return over_grpc
        framed = self._framed(address, method)

        def call(request: RequestT, timeout: float) -> Responses[ResponseT]:
            if not is_short(request):
                return over_grpc(request, timeout)
            return _ShortStream(framed, over_grpc, request, timeout)

        return call

    def _framed(
        self,
        address: str,
        method: UnaryMethod[RequestT, ResponseT] | StreamMethod[RequestT, ResponseT],
    ) -> _FramedMethod[RequestT, ResponseT]:
        where = f"{method.path} at {address}"
        return _FramedMethod(self, address, method.path, where, method.response)

    def peer(self, address: str) -> _Peer:
        return self._peers.get(address)

    def current(self, peer: _Peer) -> FrameConnection | None:
        """The connection for a call that begins now. If there is none, perhaps begins to connect,
        for later ones."""
        if peer.connection is not None and peer.credentials is self.credentials:
            return peer.connection
        if not self._closed:
            peer.called(self.credentials)
        return None

    async def close(self) -> None:
        """Ends all connections, and calls in progress with them."""
        self._closed = True
        await self._tasks.cancel()
        ending = [one.connection for one in self._peers if one.connection is not None]
        for connection in ending:
            connection.close()
        await asyncio.gather(*(connection.ended for connection in ending))


class _FramedMethod(Generic[RequestT, ResponseT]):
    """One method of one server, called in frames."""

    __slots__ = ("_address", "_connections", "_decode", "_path", "_peer", "_where")

    def __init__(
        self,
        connections: FrameConnections,
        address: str,
        path: str,
        where: str,
        response: type[ResponseT],
    ) -> None:
        self._connections = connections
        self._address = address
        self._peer = connections.peer(address)
        self._path = path
        self._where = where
        self._decode = response.FromString

    async def response(self, request: RequestT, timeout: float) -> ResponseT | None:
        """None if the call has to go over gRPC: it was not executed."""
        if self._peer.is_over:
            self._peer = self._connections.peer(self._address)
        connection = self._connections.current(self._peer)
        if connection is None:
            return None
        encoded = request.SerializeToString()
        size_max = min(SMALL_BYTES_MAX, connection.request_bytes_max)
        if not connection.takes(self._path) or len(encoded) > size_max:
            return None
        try:
            answer = await connection.call(self._path, encoded, timeout)
        except Unauthenticated:
            connection.retire()
            return None
        except PercolatorError as error:
            error.where = error.where or self._where
            raise
        try:
            return self._decode(answer)
        except DecodeError:
            raise ExecutionUnknown(
                "the response is not a message of its type", where=self._where
            ) from None


class _ShortStream(Generic[RequestT, ResponseT]):
    """The responses to a short request: the first one in a frame, or all of them over gRPC.

    Not a generator: one that is left before its end would cost a task that closes it.
    """

    __slots__ = ("_begun", "_framed", "_over_grpc", "_request", "_responses", "_timeout")

    def __init__(
        self,
        framed: _FramedMethod[RequestT, ResponseT],
        over_grpc: StreamCall[RequestT, ResponseT],
        request: RequestT,
        timeout: float,
    ) -> None:
        self._framed = framed
        self._over_grpc = over_grpc
        self._request = request
        self._timeout = timeout
        self._begun = False
        self._responses: Responses[ResponseT] | None = None

    def __aiter__(self) -> AsyncIterator[ResponseT]:
        return self

    async def __anext__(self) -> ResponseT:
        if not self._begun:
            self._begun = True
            response = await self._framed.response(self._request, self._timeout)
            if response is not None:
                return response
            self._responses = self._over_grpc(self._request, self._timeout)
        if self._responses is None:
            raise StopAsyncIteration
        return await anext(self._responses)

    async def aclose(self) -> None:
        self._begun = True
        if self._responses is not None:
            await self._responses.aclose()


class _Peer:
    """A server, and the connection to it."""

    def __init__(self, address: str, offer: Offer, tasks: Tasks) -> None:
        self._address = address
        self._offer = offer
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._calls = 0
        self._last_call = self._loop.time()
        """The last one over gRPC; the connection knows its own."""
        self.is_over = False
        """It was unused for long: calls use another object for its address."""
        self._connecting = False
        self._not_before = 0.0
        self._pause = PAUSE_SECONDS_MIN
        self._said = ""
        self.connection: FrameConnection | None = None
        self.credentials: Credentials | None = None
        """Credentials with which the connection was made."""

    def unused_since(self) -> float | None:
        if self._connecting:
            return None
        return self._last_call if self.connection is None else self.connection.unused_since()

    def leave(self) -> None:
        """Ends the connection, which is no longer used."""
        self.is_over = True
        if self.connection is not None:
            self.connection.retire()

    def called(self, credentials: Credentials) -> None:
        """Counts a call that has to go over gRPC; perhaps begins to connect."""
        self._calls += 1
        now = self._last_call = self._loop.time()
        if self._connecting or self._calls <= CALLS_BEFORE or now < self._not_before:
            return
        self._connecting = True
        self._tasks.start(self._connect(credentials))

    async def _connect(self, credentials: Credentials) -> None:
        if self.connection is not None:
            # It was made with former credentials.
            self.connection.retire()
            self.connection = None
        try:
            connection = await self._connected(credentials)
        except (PercolatorError, NotFrames, OSError, TimeoutError) as error:
            self._say(str(error) or type(error).__name__)
            self._pause_before_the_next()
            return
        finally:
            self._connecting = False
        self.connection, self.credentials = connection, credentials
        began = self._loop.time()

        def ended(_: object) -> None:
            if self.connection is connection:
                self.connection = None
                if self._loop.time() - began > STEADY_SECONDS:
                    self._pause = PAUSE_SECONDS_MIN
                self._pause_before_the_next()

        connection.ended.add_done_callback(ended)

    async def _connected(self, credentials: Credentials) -> FrameConnection:
        dialled = parse_host_port(self._address, "address")
        context = None
        if credentials.tls is not None:
            context = credentials.tls.client_context
            if context is None:
                raise NotFrames("the certificate files were not tried")
        offered = await self._offer(self._address)
        if not offered.port:
            raise NotFrames("the server offers no frames")
        hello = FramesHello(server_id=offered.server_id)
        if credentials.token:
            hello.authorization = SCHEME + credentials.token
        if self._is_near(offered, dialled) and context is None:
            try:
                return await FrameConnection.open_local(offered.local_name, hello, CONNECT_SECONDS)
            except (NotFrames, OSError, TimeoutError) as error:
                self._say(f"no local socket: {error!r}")
        return await FrameConnection.open(
            dialled.host, offered.port, hello, context, CONNECT_SECONDS
        )

    def _is_near(self, offered: OfferFramesResponse, dialled: HostPort) -> bool:
        """True if the server is on this machine, with nothing between it and us."""
        return (
            AVAILABLE
            and bool(offered.local_name)
            and dialled.is_loopback()
            and offered.local_address == self._address
        )

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            _log.info("calls to %s go over gRPC: %s", self._address, reason)

    def _pause_before_the_next(self) -> None:
        self._not_before = self._loop.time() + self._pause
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)
