"""The port for frames, next to that of gRPC: who is connected, and its start and end."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from percolator.errors import ExecutionUnknown, InvalidArgument, Overloaded, PercolatorError
from percolator.services.chassis.access import CallerIdentity, machine_of, peer_name
from percolator.services.chassis.rpc import Exposed, Quota, Unary
from percolator.v1 import frames_pb2
from percolator.v1.frames_pb2 import (
    FramesHello,
    FramesWelcome,
    OfferFramesRequest,
    OfferFramesResponse,
)
from percolator.wire import frames
from percolator.wire.addresses import HostPort
from percolator.wire.credentials import AUTHORIZATION
from percolator.wire.frames import (
    ANSWER_BYTES_MAX,
    CALL_HEAD,
    FRAMED,
    GREETING_BYTES_MAX,
    PREAMBLE,
    Frame,
    FrameReader,
    Kind,
    NotFrames,
    frame,
)
from percolator.wire.methods import READING
from percolator.wire.roles import Role
from percolator.wire.status import DETAILS_TRAILER, failure
from percolator.wire.tls import CLUSTER_NAME


class FrameCallFailed(Exception):
    """The call has failed with this status: a `google.rpc.Status`, as in gRPC's trailer."""

    def __init__(self, status: bytes) -> None:
        super().__init__()
        self.status = status


class Caller:
    """The other end of a connection."""

    def __init__(self, authorization: str, names: Sequence[bytes], peer: str) -> None:
        """`names` are those in the caller's certificate, `peer` is its address as gRPC has it."""
        self.metadata = ((AUTHORIZATION, authorization),) if authorization else ()
        self.names = names
        self.peer = peer


class FrameCallContext:
    """One call, as the edge sees it."""

    __slots__ = ("_caller", "_deadline", "_now")

    def __init__(self, caller: Caller, deadline: float, now: Callable[[], float]) -> None:
        self._caller = caller
        self._deadline = deadline
        self._now = now

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._caller.metadata

    def peer_identities(self) -> Sequence[bytes]:
        return self._caller.names

    def peer(self) -> str:
        return self._caller.peer

    def time_remaining(self) -> float:
        return max(0.0, self._deadline - self._now())

    async def abort(
        self, code: grpc.StatusCode, details: str, trailers: Sequence[tuple[str, bytes]]
    ) -> None:
        raise FrameCallFailed(dict(trailers)[DETAILS_TRAILER])


CALLS_MAX = 64
HELLO_SECONDS = 10.0
FRAME_SECONDS = 60.0
UNREAD_SECONDS = 30.0
FRAMES_PER_TURN = 256
"""Then other connections are served: a frame may be as small as nine bytes."""

_log = structlog.get_logger("percolator.frames")


class Listener(Protocol):
    """The owner of accepted connections, which is told of each what concerns all."""

    def began(self, connection: ServedConnection) -> str:
        """It is made, after any handshake. Returns why it cannot stay, or nothing."""

    def greeted(self, connection: ServedConnection) -> None:
        """It has said hello."""

    def keeps(self, more: int) -> bool:
        """A connection keeps so many more bytes of incomplete frames. Whether there is memory."""

    def refused(self) -> None:
        """This side does not put up with one any longer."""

    def ended(self, connection: ServedConnection) -> None: ...


class ServedConnection(asyncio.Protocol):
    """The server's side of a connection for frames (percolator/wire/frames), from its first byte.

    A caller that is slow or hostile costs a bounded amount, and is cut off in the end:
    - It says hello within ten seconds, and completes each frame within a minute.
    - A frame is no larger than the largest request. All connections together keep a bounded number
      of bytes of incomplete frames. Anything that is not a frame ends the connection.
    - Of `CALLS_MAX` calls in progress, one has to be answered before the next one is read.
    - While it does not take answers, nothing of it is read; after half a minute the connection
      ends.

    The calls themselves pass the edge that gRPC calls pass (`rpc.py`): its limits, access and
    metrics.
    """

    def __init__(
        self,
        server_id: str,
        methods: Mapping[str, Unary],
        request_bytes_max: int,
        listener: Listener,
    ) -> None:
        """`methods` by path."""
        self._server_id = server_id
        self._methods = methods
        self._unary = tuple(methods.items())
        self._request_bytes_max = request_bytes_max
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(GREETING_BYTES_MAX, PREAMBLE)
        self._caller: Caller | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._writable = True
        self._reading = True
        self._kept = 0
        """Bytes of incomplete frames, as the listener knows them."""
        self._behind = False
        """True if frames are left for a later turn of the event loop."""
        self._patience: asyncio.TimerHandle | None = None
        """Ends the connection unless a frame is complete by then."""
        self._unread: asyncio.TimerHandle | None = None
        """Ends the connection unless answers are taken by then."""

    def leave(self) -> None:
        """Asks the caller to end the connection when its calls have been answered."""
        self._write(frame(Kind.LEAVING, 0))

    def abort(self) -> None:
        """Ends the connection at once, and the calls in progress with it."""
        if self._transport is not None:
            self._transport.abort()

    def refuse(self, reason: str) -> None:
        """Ends the connection because it has broken a rule or a limit."""
        self._listener.refused()
        # Not worth a line for operators: anyone who reaches the port can cause it.
        _log.debug("a connection for frames was refused", reason=reason, peer=self.peer())
        self.abort()

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if reason := self._listener.began(self):
            self.refuse(reason)
        else:
            self._expect_within(HELLO_SECONDS, "no hello")

    def data_received(self, data: bytes) -> None:
        self._reader.add(data)
        self._take_all()

    def pause_writing(self) -> None:
        self._writable = False
        self._read_or_not()
        self._unread = self._loop.call_later(UNREAD_SECONDS, self.refuse, "takes no answers")

    def resume_writing(self) -> None:
        self._writable = True
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        self._take_all()

    def connection_lost(self, error: Exception | None) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        for timer in (self._patience, self._unread):
            if timer is not None:
                timer.cancel()
        self._listener.keeps(-self._kept)
        self._listener.ended(self)

    # ------------------------------------------------------------------------- frames

    def _take_all(self) -> None:
        """Takes the frames that are complete, as far as calls may begin."""
        if self._transport is None or self._transport.is_closing():
            return
        self._behind = False
        taken = 0
        try:
            while self._ready and (received := self._reader.next()) is not None:
                taken += 1
                if taken == FRAMES_PER_TURN:
                    self._behind = True
                    self._loop.call_soon(self._take_all)
                self._be_patient()
                if self._caller is None:
                    self._greet(received)
                else:
                    self._take(received)
        except NotFrames as error:
            self.refuse(str(error))
            return
        self._read_or_not()
        if self._ready and self._reader.kept:
            self._expect_within(FRAME_SECONDS, "a frame is not completed")
        change, self._kept = self._reader.kept - self._kept, self._reader.kept
        if change and not self._listener.keeps(change) and self._kept > GREETING_BYTES_MAX:
            self.refuse("too much memory is in use for incomplete frames")

    @property
    def _ready(self) -> bool:
        return self._writable and not self._behind and len(self._tasks) < CALLS_MAX

    def _read_or_not(self) -> None:
        if self._transport is None or self._transport.is_closing() or self._reading == self._ready:
            return
        self._reading = self._ready
        if self._reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _greet(self, received: Frame) -> None:
        if received.kind != Kind.HELLO:
            raise NotFrames(f"a frame of kind {received.kind} before the hello")
        try:
            hello = FramesHello.FromString(received.body)
        except DecodeError as error:
            raise NotFrames(f"the hello is not a message: {error}") from None
        if not self._server_id or hello.server_id != self._server_id:
            raise NotFrames("the hello is meant for another server")
        self._listener.greeted(self)
        self._caller = Caller(hello.authorization, self.names(), self.peer())
        self._reader.bytes_max = self._request_bytes_max + CALL_HEAD.size
        welcome = FramesWelcome(
            paths=[path for path, _ in self._unary],
            request_bytes_max=self._request_bytes_max,
            # One less than where reading stops, so that a caller who keeps to it is always heard,
            # such as when it asks for a heartbeat.
            calls_max=CALLS_MAX - 1,
        )
        self._write(frame(Kind.WELCOME, 0, welcome.SerializeToString()))

    def _take(self, received: Frame) -> None:
        match received.kind:
            case Kind.CALL:
                self._begin(received)
            case Kind.CANCEL:
                task = self._tasks.get(received.call)
                # None if the answer is on its way.
                if task is not None:
                    task.cancel()
            case Kind.PING:
                self._write(frame(Kind.PONG, 0))
            case _:
                raise NotFrames(f"a frame of kind {received.kind} from a caller")

    # -------------------------------------------------------------------------- calls

    def _begin(self, received: Frame) -> None:
        number, body = received.call, received.body
        if len(body) < CALL_HEAD.size or self._caller is None:
            raise NotFrames("a call without a method")
        index, milliseconds = CALL_HEAD.unpack_from(body)
        if index >= len(self._unary):
            raise NotFrames(f"a call of method {index}, which was not offered")
        if number in self._tasks:
            raise NotFrames(f"two calls with the number {number}")
        path, unary = self._unary[index]
        deadline = self._loop.time() + milliseconds / 1000
        context = FrameCallContext(self._caller, deadline, self._loop.time)
        task = self._tasks[number] = self._loop.create_task(
            self._answer(number, path, unary, body[CALL_HEAD.size :], context)
        )
        too_late = self._loop.call_at(deadline, task.cancel)
        task.add_done_callback(lambda _: self._done(number, too_late))

    async def _answer(
        self, number: int, path: str, unary: Unary, request: bytes, context: FrameCallContext
    ) -> None:
        try:
            encoded = await unary(request, context)
        except FrameCallFailed as failed:
            self._write(frame(Kind.FAILURE, number, failed.status))
            return
        if len(encoded) > ANSWER_BYTES_MAX:
            _, _, ((_, status),) = failure(_too_large(path, len(encoded)))
            self._write(frame(Kind.FAILURE, number, status))
            return
        self._write(frame(Kind.ANSWER, number, encoded))

    def _done(self, number: int, too_late: asyncio.TimerHandle) -> None:
        too_late.cancel()
        del self._tasks[number]
        if not self._reading:
            self._take_all()

    # --------------------------------------------------------------------- connection

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _expect_within(self, seconds: float, otherwise: str) -> None:
        if self._patience is None:
            self._patience = self._loop.call_later(seconds, self.refuse, otherwise)

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def names(self) -> list[bytes]:
        """The alternative names in the caller's certificate; none without TLS."""
        if self._transport is None:
            return []
        shown = self._transport.get_extra_info("peercert") or {}
        # A name may also be that of a directory's entry, which is no text.
        names = [name for _, name in shown.get("subjectAltName", ()) if isinstance(name, str)]
        return [name.encode() for name in names]

    def peer(self) -> str:
        """The caller's address, as gRPC writes it."""
        found = self._transport.get_extra_info("peername") if self._transport is not None else None
        # That of a socket of this machine is no pair.
        return peer_name(found[0] if isinstance(found, tuple) else "")


def _too_large(path: str, size: int) -> PercolatorError:
    sizes = f"has {size} bytes, at most {ANSWER_BYTES_MAX} are accepted"
    if path in READING:
        return InvalidArgument("response", f"{sizes}; ask for less in one call", where=path)
    return ExecutionUnknown(f"executed, but its response {sizes}", where=path)


UNKNOWN_MAX = 1_000
UNFINISHED_BYTES_MAX = 32 << 20
_HANDSHAKE_SECONDS = 10.0
_BACKLOG = 1_000
"""How many callers may wait for this process to accept them: after a restart, all come at once.
asyncio sets the socket's own number again, to 100 unless it is told."""
_IDLE_SECONDS = 300
_PROBES = 5
_PROBE_SECONDS = 30
"""When the system looks whether an idle caller is still there, and how often it tries. A caller
whose machine or network is gone ends no connection: without this, each would keep one forever."""


class FrameServer:
    """Listens for frames, and answers nothing before it is told what."""

    def __init__(
        self,
        listen: HostPort,
        request_bytes_max: int,
        context: ssl.SSLContext | None,
        refused: Callable[[], None],
        quota: Quota,
        unknown_max: int = UNKNOWN_MAX,
        unfinished_bytes_max: int = UNFINISHED_BYTES_MAX,
    ) -> None:
        """`refused` is called for each connection that broke a rule or a limit; `quota` is that of
        connections.

        Of those that have not said hello, which callers do at once, there are `unknown_max`; above
        it, the one that has been silent for longest ends. All together keep `unfinished_bytes_max`
        of incomplete frames; above it, one ends that is to keep more than the library ever sends.
        """
        self.listen = listen
        """With the port that was taken, once started."""
        self._request_bytes_max = request_bytes_max
        self._context = context
        self._refused = refused
        self._quota = quota
        self._unknown_max = unknown_max
        self._unfinished_bytes_max = unfinished_bytes_max
        self._server: asyncio.Server | None = None
        self._local: asyncio.Server | None = None
        self._local_name = self._local_address = ""
        self._methods: Mapping[str, Unary] = {}
        self._server_id = ""
        self._connections: dict[ServedConnection, CallerIdentity] = {}
        self._unknown: dict[ServedConnection, None] = {}
        """Connections that have not said hello, the oldest first."""
        self.unfinished_bytes = 0
        self._leaving = False
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def connections(self) -> int:
        """How many connections there are, for the metrics."""
        return len(self._connections)

    async def start(self, near: HostPort | None = None) -> None:
        """Listens. Callers of this machine dial this server at `near`, if it is a loopback address:
        without TLS, they get a socket that is faster. Raises `OSError`."""
        self._server = await asyncio.get_running_loop().create_server(
            self._connection,
            sock=_listening(self.listen),
            backlog=_BACKLOG,
            ssl=self._context,
            ssl_handshake_timeout=_HANDSHAKE_SECONDS if self._context is not None else None,
        )
        self.listen = self.listen.with_port(self._server.sockets[0].getsockname()[1])
        if near is not None and near.is_loopback() and self._context is None:
            await self._listen_locally(near)

    async def _listen_locally(self, near: HostPort) -> None:
        if not frames.AVAILABLE:
            return
        name = secrets.token_hex(16)
        self._local = await asyncio.get_running_loop().create_unix_server(
            self._connection, sock=frames.bound(name), backlog=_BACKLOG
        )
        self._local_name, self._local_address = name, str(near)

    def offer(self, server_id: str) -> Exposed:
        """The service that says over gRPC where this server listens."""
        self._server_id = server_id
        descriptor = frames_pb2.DESCRIPTOR.services_by_name["FrameService"]
        answer = OfferFramesResponse(
            port=self.listen.port,
            server_id=server_id,
            local_name=self._local_name,
            local_address=self._local_address,
        )
        return Exposed(descriptor, _Offering(answer))

    def answer(self, methods: Mapping[str, Unary]) -> None:
        """From now on these methods are answered, by path, if they are among those for frames."""
        self._methods = {path: methods[path] for path in sorted(FRAMED) if path in methods}

    async def stop(self, grace_seconds: float) -> None:
        """Listens no longer, asks all callers to leave, and after the grace ends what is left."""
        if self._server is None:
            return
        self._leaving = True
        self._server.close()
        if self._local is not None:
            self._local.close()
        for connection in list(self._connections):
            connection.leave()
        try:
            async with asyncio.timeout(grace_seconds):
                await self._all_ended.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.abort()

    def _connection(self) -> ServedConnection:
        return ServedConnection(
            self._server_id,
            self._methods,
            self._request_bytes_max,
            self,
        )

    # ------------------------------------------------- what its connections tell it

    def began(self, connection: ServedConnection) -> str:
        if self._leaving:
            # It was accepted before, but its handshake took longer. Nobody would tell it to leave.
            return "the server is leaving"
        # No token is known yet: an administrator is a client here, and can use gRPC.
        caller = CallerIdentity(Role.CLIENT, (b"", machine_of(connection.peer())))
        if CLUSTER_NAME.encode() in connection.names():
            caller = CallerIdentity(Role.SERVER)
        try:
            self._quota.take(caller)
        except Overloaded as error:
            return error.message
        if len(self._unknown) >= self._unknown_max:
            next(iter(self._unknown)).refuse("too many connections without a hello")
        self._connections[connection] = caller
        self._unknown[connection] = None
        self._all_ended.clear()
        return ""

    def greeted(self, connection: ServedConnection) -> None:
        self._unknown.pop(connection, None)

    def keeps(self, more: int) -> bool:
        self.unfinished_bytes += more
        return self.unfinished_bytes <= self._unfinished_bytes_max

    def refused(self) -> None:
        self._refused()

    def ended(self, connection: ServedConnection) -> None:
        caller = self._connections.pop(connection, None)
        if caller is not None:
            self._quota.give_back(caller)
        self._unknown.pop(connection, None)
        if not self._connections:
            self._all_ended.set()


def _listening(address: HostPort) -> socket.socket:
    """A socket of the first family to which the host resolves; every interface means both."""
    family = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0][0]
    both = family == socket.AF_INET6 and address.is_wildcard() and socket.has_dualstack_ipv6()
    made = socket.create_server((address.host, address.port), family=family, dualstack_ipv6=both)
    _look_for_callers(made)
    return made


def _look_for_callers(listening: socket.socket) -> None:
    """Connections inherit these options from the socket that accepts them."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)


class _Offering:
    """`percolator.v1.FrameService`."""

    def __init__(self, answer: OfferFramesResponse) -> None:
        self._answer = answer

    async def offer_frames(self, request: OfferFramesRequest) -> OfferFramesResponse:
        return self._answer
