"""Networks of gRPC for tests that call services themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from percolator.wire.channels import GrpcNetwork
from percolator.wire.credentials import PLAIN_TEXT, Credentials


@asynccontextmanager
async def grpc_network(credentials: Credentials = PLAIN_TEXT) -> AsyncIterator[GrpcNetwork]:
    """A network that is closed at the end."""
    network = GrpcNetwork(credentials)
    try:
        yield network
    finally:
        await network.close()
