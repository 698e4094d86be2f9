"""What a call in a frame has in place of gRPC's `ServicerContext`, so that one edge serves both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc

from percolator.wire.credentials import AUTHORIZATION
from percolator.wire.status import DETAILS_TRAILER


class FrameCallFailed(Exception):
    """The call has failed with this status: a `google.rpc.Status`, as in gRPC's trailer."""

    def __init__(self, status: bytes) -> None:
        super().__init__()
        self.status = status


class Caller:
    """Who is at the other end of a connection."""

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
