"""What every call has to pass before it is answered, by whichever way it comes."""

from __future__ import annotations

import asyncio
from copy import copy

import grpc

from percolator.errors import InvalidArgument, PercolatorError
from percolator.services.chassis.serving.arrivals import Arrivals, Held, received_bytes_max
from percolator.services.chassis.serving.quotas import CallerIdentity, Quotas

STREAMS_MAX = 10_000
REQUEST_BYTES_TOTAL_MAX = 256 << 20
REQUEST_SECONDS_MAX = 60.0
FRAME_BYTES_MAX = 64 * 1024
"""The largest request in a frame. The library sends larger ones than 8 KiB over gRPC."""
_OPEN_SECONDS_MAX = 10.0
_OPEN_REQUESTS = 4
_CALLS_RETRY_SECONDS = 0.1
_STREAMS_RETRY_SECONDS = 1.0
"""Longer: a stream may last for as long as its caller wants."""


class Gate:
    """What every call has to pass: whether this server answers at all, the limits of concurrent
    calls and streams, and the memory that its request takes.

    Streams have a limit of their own, because an idle one may last for days: it must not take the
    place of a short call. Belongs to the event loop. `idle` is set while no admitted call is in
    progress.
    """

    def __init__(
        self,
        concurrency_max: int,
        request_bytes_max: int,
        request_bytes_total_max: int = REQUEST_BYTES_TOTAL_MAX,
        request_seconds_max: float = REQUEST_SECONDS_MAX,
        streams_max: int = STREAMS_MAX,
        quotas: Quotas | None = None,
    ) -> None:
        quotas = quotas or Quotas()
        self._calls = quotas.of(
            "calls", "concurrency_max", concurrency_max, retry_after_seconds=_CALLS_RETRY_SECONDS
        )
        self._streams = quotas.of(
            "streams", "streams_max", streams_max, retry_after_seconds=_STREAMS_RETRY_SECONDS
        )

        def arrivals(bytes_max: int, seconds: float = request_seconds_max) -> Arrivals:
            return Arrivals(request_bytes_max, bytes_max, seconds)

        self._usual = arrivals(request_bytes_total_max)
        self._trusted = arrivals(request_bytes_total_max)
        """For administrators and servers, which get through whatever clients do."""
        self.open = arrivals(
            _OPEN_REQUESTS * received_bytes_max(request_bytes_max),
            min(_OPEN_SECONDS_MAX, request_seconds_max),
        )
        """For requests that need no token, of health and reflection: one at a time of a connection,
        and half of them of a machine."""
        self.framed = arrivals(request_bytes_total_max // 4)
        """For what is complete, and small: what arrives slowly over gRPC does not stop it."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._request_bytes_max = request_bytes_max
        self._refusal: PercolatorError | None = None
        self._closed = False

    def refuse(self, error: PercolatorError | None) -> None:
        """From now on every new call gets this error; None admits calls again."""
        if not self._closed:
            self._refusal = error

    def close(self, error: PercolatorError) -> None:
        """Refuses every new call for good."""
        self.refuse(error)
        self._closed = True

    @property
    def in_flight(self) -> int:
        """Calls and streams in progress."""
        return self._calls.used + self._streams.used

    def require_open(self) -> None:
        """Raises the error that every new call gets, if there is one."""
        if self._refusal is not None:
            # A copy for each call: raising an error adds to the traceback that it keeps.
            raise copy(self._refusal)

    def enter(self, caller: CallerIdentity, *, is_stream: bool = False) -> None:
        """Admits a call, or raises. A call that was admitted must `leave`."""
        (self._streams if is_stream else self._calls).take(caller)
        self.idle.clear()

    @property
    def arrivals(self) -> tuple[Arrivals, ...]:
        """All kinds, for the metrics."""
        return self._usual, self._trusted, self.open, self.framed

    async def receive(self, context: grpc.aio.ServicerContext, caller: CallerIdentity) -> Held:
        """The request of an admitted call over gRPC. To be released when it is answered."""
        # Not by the role: where no token proves it, clients have the role of administrators.
        arrivals = self._trusted if caller.client is None else self._usual
        held = await arrivals.receive(context, caller)
        try:
            self._require_size(held.raw)
        except BaseException:
            held.release()
            raise
        return held

    def hold(self, raw: bytes) -> Held:
        """The request of an admitted call in a frame. To be released when it is answered."""
        self._require_size(raw)
        return self.framed.hold(raw)

    def _require_size(self, raw: bytes) -> None:
        """Refuses a request above the limit. gRPC would do so too, but without any detail."""
        if len(raw) > self._request_bytes_max:
            raise InvalidArgument(
                "request",
                f"has {len(raw)} bytes, at most {self._request_bytes_max} are accepted "
                "(request_bytes_max); send less in one call",
            )

    def leave(self, caller: CallerIdentity, *, is_stream: bool = False) -> None:
        (self._streams if is_stream else self._calls).give_back(caller)
        if self.in_flight == 0:
            self.idle.set()
