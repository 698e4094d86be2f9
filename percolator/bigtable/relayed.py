"""Bigtable as a client reaches it through the gateways of its cluster, which have an account there.

The driver is the same, and so are its messages: only the methods have other names. What a gateway
refuses, and why, is in services/gateway/row_store_handler.py.
"""

from __future__ import annotations

from percolator.bigtable import methods as bigtable
from percolator.errors import UsageError
from percolator.wire import methods
from percolator.wire.through import ThroughNetwork
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)

RELAYED = {
    bigtable.CHECK_AND_MUTATE_ROW.path: methods.CHECK_AND_MUTATE_ROW.path,
    bigtable.MUTATE_ROWS.path: methods.MUTATE_ROWS.path,
    bigtable.READ_ROWS.path: methods.READ_ROWS.path,
    bigtable.SAMPLE_ROW_KEYS.path: methods.SAMPLE_ROW_KEYS.path,
}
"""The method of a gateway for each of Bigtable's. None of them changes what tables there are."""


class RelayedNetwork:
    """A `percolator.world.Network` to Bigtable. Whoever has made `through` closes it."""

    def __init__(self, through: ThroughNetwork) -> None:
        self._through = through

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        relayed = UnaryMethod(_relayed(method.path), method.request, method.response)
        return self._through.unary_of_any(relayed)

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        relayed = StreamMethod(_relayed(method.path), method.request, method.response)
        return self._through.stream_of_any(relayed)

    async def close(self) -> None:
        """Nothing is its own."""


def _relayed(path: str) -> str:
    found = RELAYED.get(path)
    if found is None:
        raise UsageError(f"no gateway makes the call {path}")
    return found
