"""Calls through a gateway, for clients that can dial it but none of the servers behind it.

Each call goes to a gateway with the metadata `percolator-server: ADDRESS`, the address by which the
cluster itself knows the server. The gateway forwards the bytes without decoding them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from percolator.errors import (
    DeadlineExceeded,
    NotReady,
    PercolatorError,
    Unavailable,
    UsageError,
)
from percolator.v1.cluster_pb2 import ROUTE_THROUGH, DescribeResponse
from percolator.wire.channels import GrpcNetwork
from percolator.world import (
    Network,
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
    World,
)

GATEWAY = "gateway"


def shutting_down(service: str, retry_after_seconds: float) -> NotReady:
    """Refusal of calls by a server that is about to end."""
    return NotReady(
        f"the {service} is shutting down", retry_after_seconds=retry_after_seconds, leaving=service
    )


def routed(network: Network, addresses: Sequence[str], cluster: DescribeResponse) -> Network:
    """The network that reaches the servers of a cluster; these addresses have described it."""
    if cluster.route != ROUTE_THROUGH:
        return network
    if not isinstance(network, GrpcNetwork):
        raise UsageError("only a network of gRPC channels can go through a gateway")
    return ThroughNetwork(network, addresses)


def routed_world(world: World, addresses: Sequence[str], cluster: DescribeResponse) -> World:
    """This world with a network that reaches the servers of the cluster."""
    return replace(world, network=routed(world.network, addresses, cluster))


class ThroughNetwork:
    """A `percolator.world.Network` behind one of several gateways."""

    def __init__(self, network: GrpcNetwork, gateways: Sequence[str]) -> None:
        self._network = network
        self._gateways = list(gateways)
        self._current = 0

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        if address in self._gateways:
            return self._network.unary(address, method)
        return self._with_failover(
            [self._network.unary(one, method, server=address) for one in self._gateways]
        )

    def unary_of_any(
        self, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        """A method of the gateways themselves."""
        return self._with_failover([self._network.unary(one, method) for one in self._gateways])

    def _with_failover(
        self, calls: Sequence[UnaryCall[RequestT, ResponseT]]
    ) -> UnaryCall[RequestT, ResponseT]:
        async def call(request: RequestT, timeout: float) -> ResponseT:
            current = self._current
            try:
                return await calls[current % len(calls)](request, timeout)
            except PercolatorError as error:
                if _another_may_answer(error):
                    self._go_elsewhere(current)
                raise

        return call

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        if address in self._gateways:
            return self._network.stream(address, method)
        return self._stream_with_failover(
            [self._network.stream(one, method, server=address) for one in self._gateways]
        )

    def stream_of_any(
        self, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        """As `unary_of_any`, for a method that streams its answer."""
        return self._stream_with_failover(
            [self._network.stream(one, method) for one in self._gateways]
        )

    def _stream_with_failover(
        self, calls: Sequence[StreamCall[RequestT, ResponseT]]
    ) -> StreamCall[RequestT, ResponseT]:
        async def call(request: RequestT, timeout: float) -> AsyncGenerator[ResponseT, None]:
            current = self._current
            try:
                async with aclosing(calls[current % len(calls)](request, timeout)) as responses:
                    async for response in responses:
                        yield response
            except PercolatorError as error:
                if _another_may_answer(error):
                    self._go_elsewhere(current)
                raise

        return call

    def _go_elsewhere(self, current: int) -> None:
        """Moves to the next gateway: this one may be gone, or the server behind it; we cannot tell.

        If several calls fail together, only the first one moves on.
        """
        if current == self._current:
            self._current += 1

    async def close(self) -> None:
        await self._network.close()


def _another_may_answer(error: PercolatorError) -> bool:
    """True if the gateway itself may be the trouble. If a server behind it is not ready, no other
    gateway can help, and one that is gone would cost time."""
    if isinstance(error, NotReady):
        return error.leaving == GATEWAY
    return isinstance(error, Unavailable | DeadlineExceeded)
