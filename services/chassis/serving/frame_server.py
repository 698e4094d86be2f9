"""The port for frames, beside that of gRPC: who is connected, and its start and end."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import sys
from collections.abc import Callable, Mapping

from percolator.errors import Overloaded
from percolator.services.chassis.serving.frame_connection import ServedConnection
from percolator.services.chassis.serving.quotas import CallerIdentity, Quota, machine_of
from percolator.services.chassis.serving.rpc import Exposed, Unary
from percolator.v1 import frames_pb2
from percolator.v1.frames_pb2 import OfferFramesRequest, OfferFramesResponse
from percolator.wire.addresses import HostPort
from percolator.wire.frames import local_socket
from percolator.wire.frames.layout import FRAMED
from percolator.wire.roles import Role
from percolator.wire.tls import CLUSTER_NAME

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
        if not local_socket.AVAILABLE:
            return
        name = secrets.token_hex(16)
        self._local = await asyncio.get_running_loop().create_unix_server(
            self._connection, sock=local_socket.bound(name), backlog=_BACKLOG
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
