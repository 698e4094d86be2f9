"""One call on a connection, and what has arrived for it.

It ends once: with the server's status, with an error in what the server sends, with the end of the
connection, or at its deadline. What arrives later is not for it any more.
"""

from __future__ import annotations

import asyncio
from collections import deque

from percolator.bigtable.http2.messages import PREFIX_BYTES, MessageReader, is_one_message
from percolator.bigtable.http2.settings import STREAM_WINDOW
from percolator.bigtable.http2.status import (
    CallFailed,
    Code,
    Fields,
    is_grpc,
    of_http,
    of_trailers,
)


class Call:
    """Belongs to a `Connection`. Whoever has begun it waits for it, one at a time."""

    __slots__ = (
        "_credit",
        "_messages",
        "_reader",
        "_waiter",
        "_wants_all",
        "_window",
        "body",
        "ended",
        "failure",
        "head",
        "is_answered",
        "is_sent",
        "send_window",
        "stream",
        "timer",
        "unsent",
    )

    def __init__(self, head: bytes, body: bytes, *, wants_all: bool) -> None:
        """`wants_all` if the answer is one message, which nobody takes before the end."""
        self.head = head
        self.body = body
        self.stream = 0
        """0 until it is sent."""
        self.is_sent = False
        """Whether all of the request was given to the connection. Before, it is not executed."""
        self.is_answered = False
        """Whether the answer has begun."""
        self.send_window = 0
        self.unsent = 0
        """Of a body that is sent bit by bit: how many bytes are left, and how many are permitted.
        """
        self.timer: asyncio.TimerHandle | None = None
        self.ended = False
        self.failure: CallFailed | None = None
        """Once it has ended."""
        self._wants_all = wants_all
        self._messages: deque[bytes] = deque()
        self._reader: MessageReader | None = None
        """Made for an answer that is not one message in one frame, as most are."""
        self._window = STREAM_WINDOW
        self._credit = 0
        self._waiter: asyncio.Future[None] | None = None

    # ----------------------------------------------------------------- for whoever waits

    async def message(self) -> bytes:
        """The only message of the answer. Raises `CallFailed`."""
        if not self.ended:
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            await waiter
        if self.failure is not None:
            raise self.failure
        if not self._messages:
            raise CallFailed(Code.INTERNAL, "an answer without a message")
        return self._messages.popleft()

    async def next(self) -> bytes | None:
        """The next message; None at the end. Raises `CallFailed`."""
        while not self._messages:
            if self.ended:
                if self.failure is not None:
                    raise self.failure
                return None
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            await waiter
        return self._messages.popleft()

    # ------------------------------------------------------------------ for the connection

    def fail(self, failure: CallFailed) -> None:
        if not self.ended:
            self.failure = failure
            self.ended = True
            self._wake()

    def take_headers(self, fields: Fields, *, is_last: bool) -> None:
        """The beginning or the end of the answer. Raises `CallFailed` if it cannot be."""
        if self.is_answered:
            if b":status" in fields or not is_last:
                raise CallFailed(Code.INTERNAL, "headers in the middle of the answer")
            self._end(fields)
            return
        status = fields.get(b":status")
        if status is None or len(status) != 3 or not status.isdigit():
            raise CallFailed(Code.INTERNAL, "an answer without an HTTP status")
        if status.startswith(b"1"):
            if is_last:
                raise CallFailed(Code.INTERNAL, "an answer that only announces another one")
            return
        if not is_grpc(fields) or (status != b"200" and b"grpc-status" not in fields):
            raise of_http(fields)
        self.is_answered = True
        if is_last:
            self._end(fields)
        elif fields.get(b"grpc-encoding", b"identity") != b"identity":
            raise CallFailed(Code.INTERNAL, "the answer is compressed, which was not asked for")

    def take_data(self, data: bytes, flow: int, *, is_last: bool) -> int:
        """A part of the answer, which takes `flow` bytes of the window. Returns by how much the
        peer's window is to grow. Raises `CallFailed` if it cannot be."""
        if not self.is_answered:
            raise CallFailed(Code.INTERNAL, "an answer without headers")
        self._window -= flow
        if self._window < 0:
            raise CallFailed(Code.INTERNAL, "more data than the window permits")
        self._credit += flow
        if self._reader is None and is_one_message(data):
            self._messages.append(data[PREFIX_BYTES:])
        else:
            if self._reader is None:
                self._reader = MessageReader()
            self._messages.extend(self._reader.take(data))
        if not self._wants_all:
            if self._messages:
                self._wake()
        elif len(self._messages) > 1:
            raise CallFailed(Code.INTERNAL, "an answer of several messages instead of one")
        if is_last:
            self._end({})
        return self.credit()

    def credit(self) -> int:
        """By how much the peer's window is to grow: when half of it is used up, unless messages
        wait for somebody to take them. One that is incomplete has to be completed."""
        if self._credit < STREAM_WINDOW // 2 or self.ended:
            return 0
        if self._messages and not self._wants_all:
            return 0
        credit, self._credit = self._credit, 0
        self._window += credit
        return credit

    def _end(self, trailers: Fields) -> None:
        failure = of_trailers(trailers)
        if failure is None and self._reader is not None and self._reader.is_within:
            failure = CallFailed(Code.INTERNAL, "the last message of the answer is cut off")
        self.failure = failure
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self.ended or not self._wants_all):
            waiter.set_result(None)
