"""What every call has to pass before it is answered, by whichever way it comes."""

from __future__ import annotations

import asyncio
from copy import copy

from percolator.errors import InvalidArgument, Overloaded, PercolatorError

_OVERLOADED_RETRY_SECONDS = 0.1


class Gate:
    """What every call has to pass: the limit of concurrent calls, whether this server answers at
    all, and the size of its request.

    Belongs to the event loop. `idle` is set while no admitted call is in progress.
    """

    def __init__(self, concurrency_max: int, request_bytes_max: int) -> None:
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._concurrency_max = concurrency_max
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

    def enter(self) -> None:
        """Admits a call, or raises. A call that was admitted must `leave`."""
        if self._refusal is not None:
            # A copy for each call: raising an error adds to the traceback that it keeps.
            raise copy(self._refusal)
        if self.in_flight >= self._concurrency_max:
            raise Overloaded(
                f"{self._concurrency_max} calls are in progress, the limit of this server",
                retry_after_seconds=_OVERLOADED_RETRY_SECONDS,
            )
        self.in_flight += 1
        if self.in_flight == 1:
            self.idle.clear()

    def require_size(self, raw: bytes) -> None:
        """Refuses a request above the limit. gRPC would do so too, but without any detail."""
        if len(raw) > self._request_bytes_max:
            raise InvalidArgument(
                "request",
                f"has {len(raw)} bytes, at most {self._request_bytes_max} are accepted "
                "(request_bytes_max); send less in one call",
            )

    def leave(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self.idle.set()
