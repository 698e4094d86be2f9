"""The connections to one address: as many as the calls in flight need.

A connection carries about a hundred calls at a time; Google's front ends let more of them wait,
unseen. So the next connection is opened when the ones before are full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from percolator.errors import UsageError

STREAMS_MAX = 90
"""Calls in flight on one connection; the service permits a hundred."""
LANES_MAX = 10

Procedure = Callable[..., Any]
"""Calls a method over a connection: what gRPC calls a multi-callable."""


class Lane:
    """One connection, its calls in flight, and its procedures."""

    __slots__ = ("channel", "in_flight", "procedures")

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.in_flight = 0
        self.procedures: dict[str, Procedure] = {}
        """By the path of the method."""


class Lanes:
    """All connections to an address."""

    def __init__(self, open_channel: Callable[[], grpc.aio.Channel]) -> None:
        self._open_channel = open_channel
        self._lanes: list[Lane] = []
        self._is_closed = False

    def lane(self) -> Lane:
        """The first connection that is not full; if all are, the one with the fewest calls."""
        if self._is_closed:
            raise UsageError("the network of this client is closed")
        for lane in self._lanes:
            if lane.in_flight < STREAMS_MAX:
                return lane
        if len(self._lanes) < LANES_MAX:
            self._lanes.append(Lane(self._open_channel()))
            return self._lanes[-1]
        return min(self._lanes, key=lambda lane: lane.in_flight)

    async def close(self) -> None:
        self._is_closed = True
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            await lane.channel.close()
