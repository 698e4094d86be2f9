"""Which calls are forwarded, and to which server, for clients that can reach only a gateway.

A call whose metadata has `percolator-server` goes to the server with that id or advertised address.
Only servers of this cluster are dialled: otherwise a gateway would be an open proxy into its
network. A call to `MasterService` needs no such metadata: it goes to any master.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    PercolatorError,
    Unavailable,
)
from percolator.services.chassis.serving.access import Check
from percolator.services.chassis.serving.gate import Gate
from percolator.services.gateway.forwarded_call import ForwardedCall
from percolator.services.gateway.servers import Servers
from percolator.v1.cluster_pb2 import SERVICE_KIND_MASTER, Server
from percolator.v1.master_pb2 import DESCRIPTOR as MASTER_PROTO
from percolator.wire import methods
from percolator.wire.channels import SERVER_METADATA, GrpcNetwork
from percolator.wire.line import Line
from percolator.world import StreamMethod, UnaryMethod

_MASTER_SERVICE = MASTER_PROTO.services_by_name["MasterService"].full_name
_MASTER_PATHS = f"/{_MASTER_SERVICE}/"

_KNOWN = [one for one in vars(methods).values() if isinstance(one, UnaryMethod | StreamMethod)]
_UNARY = {method.path for method in _KNOWN if isinstance(method, UnaryMethod)}
_STREAMS = {method.path for method in _KNOWN if isinstance(method, StreamMethod)}

_NO_MASTER_RETRY_SECONDS = 0.5


class ForwardedCalls:
    """The figures of forwarded calls."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.finished: dict[tuple[str, str], int] = {}
        """By method and status code."""
        self.request_bytes = 0
        self.answer_bytes = 0

    def finish(self, method: str, code: str) -> None:
        self.in_flight -= 1
        key = method, code
        self.finished[key] = self.finished.get(key, 0) + 1


class ServerRoutes:
    """A `percolator.services.chassis.serving.rpc.Forwarder`, and the `Routes` of its calls."""

    def __init__(self, network: GrpcNetwork, servers: Servers, own: Server) -> None:
        self.calls = ForwardedCalls()
        self.draining = False
        self.endless: dict[grpc.aio.Call, None] = {}
        """Streams in progress that end only when their callers end them."""
        self._network = network
        self._servers = servers
        self._own = ([own.server_id], [own.address])
        self._first_master = ""
        """The id of the master that answered last."""
        self._silent: list[str] = []
        """The ids of masters that gave no answer at all, the latest at the end. A master that was
        killed stays listed for seconds, and would otherwise fail every call until then."""

    @property
    def services(self) -> Sequence[str]:
        """Services that are reached without naming a server: any master answers."""
        return (_MASTER_SERVICE,)

    def handler(
        self, details: grpc.HandlerCallDetails, gate: Gate, check: Check
    ) -> grpc.RpcMethodHandler | None:
        path = details.method
        names = [value for key, value in details.invocation_metadata if key == SERVER_METADATA]
        if names in self._own or (not names and not path.startswith(_MASTER_PATHS)):
            return None
        if path in _UNARY:
            call = ForwardedCall(self, path, path, names, gate, check, is_stream=False)
            return grpc.stream_unary_rpc_method_handler(call.unary)
        if path in _STREAMS:
            call = ForwardedCall(self, path, path, names, gate, check, is_stream=True)
            return grpc.stream_stream_rpc_method_handler(call.stream)
        call = ForwardedCall(self, path, "other", names, gate, check, is_stream=True)
        return grpc.stream_stream_rpc_method_handler(call.any_stream)

    async def targets(self, names: Sequence[object]) -> list[Server]:
        """Where a call may go: one server, or the masters, one after another."""
        if names:
            if len(names) > 1 or not isinstance(names[0], str):
                raise InvalidArgument(SERVER_METADATA, f"expected one server, found {names!r}")
            return [await self._servers.find(names[0])]
        if not self._servers.masters:
            await self._servers.refresh()
        found = sorted(self._servers.masters, key=self._rank)
        if not found:
            raise NotReady("no master is known", retry_after_seconds=_NO_MASTER_RETRY_SECONDS)
        return found

    def _rank(self, master: Server) -> tuple[bool, int]:
        """Those that have answered come before those that have not, of which the latest is last."""
        name = master.server_id
        silent = self._silent.index(name) + 1 if name in self._silent else 0
        return name != self._first_master, silent

    def answered(self, server: Server, problem: PercolatorError | None) -> None:
        """Remembers the master that leads, which is asked first, and those that are silent."""
        if server.kind != SERVICE_KIND_MASTER:
            return
        if problem is None:
            self._first_master = server.server_id
        elif server.server_id == self._first_master:
            self._first_master = ""
        listed = {one.server_id for one in self._servers.masters} - {server.server_id}
        self._silent = [name for name in self._silent if name in listed]
        if isinstance(problem, Unavailable | DeadlineExceeded):
            self._silent.append(server.server_id)

    def line(self, server: Server) -> Line:
        return self._network.line(server.address)

    def failed(self, error: grpc.aio.AioRpcError) -> None:
        """Lets the network read this gateway's certificate again, in case it was renewed."""
        self._network.failed(error)

    @staticmethod
    def is_endless(path: str) -> bool:
        """Whether only its caller ends the stream. Unknown streams are assumed to be endless."""
        return path not in _STREAMS or path.rpartition("/")[2].startswith("Watch")

    async def end_watches(self) -> None:
        """To be called at shutdown: callers that watch are asked to reconnect later."""
        self.draining = True
        for call in tuple(self.endless):
            call.cancel()
