"""The channel to one address, and the calls in progress over it."""

from __future__ import annotations

import asyncio

import grpc


class Line:
    """A channel. Enter it for the time of each call; it is then not closed for being unused."""

    __slots__ = ("_calls", "_left", "_loop", "channel", "is_over")

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.is_over = False
        """There are other credentials, or it was unused for long: calls begin on another line."""
        self._loop = asyncio.get_running_loop()
        self._calls = 0
        self._left = self._loop.time()

    def __enter__(self) -> None:
        self._calls += 1

    def __exit__(self, *_: object) -> None:
        self._calls -= 1
        self._left = self._loop.time()

    def unused_since(self) -> float | None:
        return None if self._calls else self._left
