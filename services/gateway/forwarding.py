"""Which calls are passed on, and to whom: for clients that reach a gateway and nobody else.

A call whose metadata has `percolator-server` goes to the server of that id, or of that advertised
address. Only servers of this cluster are dialled. What a master answers goes to any master, without
being told which.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from percolator.errors import InvalidArgument, NotReady, PercolatorError
from percolator.v1.cluster_pb2 import Server
from percolator.v1.master_pb2 import DESCRIPTOR as MASTER_PROTO
from percolator.wire import methods
from percolator.wire.channels import SERVER_METADATA, GrpcNetwork
from percolator.world import StreamMethod, UnaryMethod
from services.chassis.access import Check
from services.chassis.rpc import Gate
from services.gateway.passing_on import PassedOn
from services.gateway.servers import Servers

_MASTER_SERVICE = MASTER_PROTO.services_by_name["MasterService"].full_name
_MASTER_PATHS = f"/{_MASTER_SERVICE}/"

_KNOWN = [one for one in vars(methods).values() if isinstance(one, UnaryMethod | StreamMethod)]
_UNARY = {method.path for method in _KNOWN if isinstance(method, UnaryMethod)}
_STREAMS = {method.path for method in _KNOWN if isinstance(method, StreamMethod)}

_NO_MASTER_RETRY_SECONDS = 0.5


class ForwardedCalls:
    """The figures of the calls that were passed on."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.finished: dict[tuple[str, str], int] = {}
        """By method, and status code."""
        self.request_bytes = 0
        self.answer_bytes = 0

    def finish(self, method: str, code: str) -> None:
        self.in_flight -= 1
        key = method, code
        self.finished[key] = self.finished.get(key, 0) + 1


class Forwarding:
    """A `services.chassis.rpc.Relay`."""

    def __init__(self, network: GrpcNetwork, servers: Servers, own: Server) -> None:
        self.calls = ForwardedCalls()
        self.draining = False
        self.endless: set[grpc.aio.Call] = set()
        """Streams in progress that only their callers end."""
        self._network = network
        self._servers = servers
        self._own = ([own.server_id], [own.address])
        self._first_master = ""
        """The id of the one that answered last."""

    @property
    def services(self) -> Sequence[str]:
        """Reached without naming a server: any master."""
        return (_MASTER_SERVICE,)

    def handler(
        self, details: grpc.HandlerCallDetails, gate: Gate, check: Check | None
    ) -> grpc.RpcMethodHandler | None:
        path = details.method
        names = [value for key, value in details.invocation_metadata if key == SERVER_METADATA]
        if names in self._own or (not names and not path.startswith(_MASTER_PATHS)):
            return None
        if path in _UNARY:
            call = PassedOn(self, path, path, names, gate, check)
            return grpc.unary_unary_rpc_method_handler(call.unary)
        if path in _STREAMS:
            call = PassedOn(self, path, path, names, gate, check)
            return grpc.unary_stream_rpc_method_handler(call.stream)
        call = PassedOn(self, path, "other", names, gate, check)
        return grpc.stream_stream_rpc_method_handler(call.any_stream)

    async def targets(self, names: Sequence[object]) -> list[Server]:
        """Whom a call may go to: one server; or the masters, one after the other."""
        if names:
            if len(names) > 1 or not isinstance(names[0], str):
                raise InvalidArgument(SERVER_METADATA, f"expected one server, found {names!r}")
            return [await self._servers.find(names[0])]
        if not self._servers.masters:
            await self._servers.refresh()
        found = sorted(self._servers.masters, key=lambda one: one.server_id != self._first_master)
        if not found:
            raise NotReady("no master is known", retry_after_seconds=_NO_MASTER_RETRY_SECONDS)
        return found

    def answered(self, server: Server, problem: PercolatorError | None) -> None:
        """Remembers which master to ask first: the one that leads."""
        if problem is None:
            self._first_master = server.server_id
        elif server.server_id == self._first_master:
            self._first_master = ""

    def channel(self, server: Server) -> grpc.aio.Channel:
        return self._network.channel(server.address)

    def failed(self, error: grpc.aio.AioRpcError) -> None:
        """Perhaps this gateway's own certificate has to be read again."""
        self._network.failed(error)

    @staticmethod
    def is_endless(path: str) -> bool:
        """Whether only its caller ends it; of streams that nobody here knows, that is assumed."""
        return path not in _STREAMS or path.rpartition("/")[2].startswith("Watch")

    async def end_watches(self) -> None:
        """At shutdown: whoever watches is told to come back."""
        self.draining = True
        for call in tuple(self.endless):
            call.cancel()
