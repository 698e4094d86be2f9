"""What is sent on a connection: in few pieces, and not more than the peer permits.

What begins in one pass of the event loop leaves in one piece. A request that the windows of the
peer, or a full socket, do not let pass at once is sent bit by bit, in turns with others.
"""

from __future__ import annotations

import asyncio
from typing import Final

from percolator.bigtable.http2.call import Call
from percolator.bigtable.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    ErrorCode,
    Violation,
    frame_head,
)
from percolator.bigtable.http2.settings import WINDOW_DEFAULT, WINDOW_MAX, PeerSettings

_PIECE_BYTES_MAX: Final = 256 * 1024
"""Of the requests that are sent bit by bit: more waits until the socket has taken this."""
_ANSWERS_MAX: Final = 10_000
"""Frames that answer those of a peer that does not read them: more are an attack."""


class Sending:
    """Belongs to a `Connection`."""

    def __init__(self, peer: PeerSettings) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._is_due = False
        """Whether the event loop will call `flush`."""
        self._window = WINDOW_DEFAULT
        self._waiting: dict[Call, None] = {}
        """Calls whose requests are not sent completely, in turns."""
        self._is_full = False
        self._answers = 0

    def open(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def close(self) -> None:
        """Nothing is sent any more."""
        self._transport = None
        self._pieces.clear()
        self._waiting.clear()

    def put(self, data: bytes) -> None:
        """Sends it at the end of this pass of the event loop."""
        if not self._is_due:
            self.expect()
        self._pieces.append(data)
        self._pieces_bytes += len(data)

    def answer(self, data: bytes) -> None:
        """The same for what a peer makes us send, and could make us keep."""
        if self._is_full:
            self._answers += 1
            if self._answers > _ANSWERS_MAX:
                raise Violation(ErrorCode.ENHANCE_YOUR_CALM, "a peer that asks and does not read")
        self.put(data)

    def expect(self) -> None:
        """Something will be put soon: by whoever is woken in this pass, and runs in the next. It
        leaves at the end of that pass, not one later."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._is_due = False
        if self._pieces and self._transport is not None:
            pieces, self._pieces = self._pieces, []
            self._pieces_bytes = 0
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._waiting:
            self._send_more()

    def request(self, call: Call) -> None:
        """Sends the headers of a call, and as much of its body as may be sent now."""
        body, stream = call.body, call.stream
        size = len(body)
        if (
            size <= self._window
            and size <= self._peer.window
            and size <= self._peer.frame_bytes_max
            and len(call.head) <= self._peer.frame_bytes_max
            and not self._is_full
        ):
            self._window -= size
            call.is_sent = True
            # One piece, for nearly all calls.
            first = frame_head(HEADERS, END_HEADERS, stream, len(call.head))
            self.put(first + call.head + frame_head(DATA, END_STREAM, stream, size) + body)
            return
        self._put_head(call)
        call.send_window = self._peer.window
        call.unsent = size
        self._waiting[call] = None
        self._send_more()

    def drop(self, call: Call) -> None:
        """The rest of its request is not wanted any more."""
        self._waiting.pop(call, None)

    def grow(self, more: int) -> None:
        """The peer takes so much more from all streams together."""
        self._window += more
        if self._window > WINDOW_MAX:
            raise Violation(ErrorCode.FLOW_CONTROL_ERROR, "a window that is too large")
        self._send_more()

    def grow_stream(self, call: Call, more: int) -> bool:
        """The peer takes so much more of this request. False if that cannot be."""
        if call in self._waiting:
            call.send_window += more
            if call.send_window > WINDOW_MAX:
                return False
            self._send_more()
        return True

    def grow_streams(self, more: int) -> None:
        """The peer has changed the window of all streams. They may be negative after that."""
        for call in self._waiting:
            call.send_window += more
            if call.send_window > WINDOW_MAX:
                raise Violation(ErrorCode.FLOW_CONTROL_ERROR, "a window that is too large")
        self._send_more()

    def pause(self) -> None:
        self._is_full = True

    def resume(self) -> None:
        self._is_full = False
        self._answers = 0
        self._send_more()

    def _put_head(self, call: Call) -> None:
        """The block of headers, in as many frames as it needs."""
        head, most = call.head, self._peer.frame_bytes_max
        kind = HEADERS
        for first in range(0, len(head), most):
            part = head[first : first + most]
            flags = END_HEADERS if first + most >= len(head) else 0
            self.put(frame_head(kind, flags, call.stream, len(part)) + part)
            kind = CONTINUATION

    def _send_more(self) -> None:
        """A frame of each request that may send one, and so on, until nothing more may be sent."""
        moved = True
        while moved and not self._is_full:
            moved = False
            for call in list(self._waiting):
                if self._window <= 0 or self._pieces_bytes >= _PIECE_BYTES_MAX:
                    return
                size = min(self._peer.frame_bytes_max, call.send_window, self._window, call.unsent)
                if size > 0:
                    self._put_part(call, size)
                    moved = True

    def _put_part(self, call: Call, size: int) -> None:
        first = len(call.body) - call.unsent
        call.unsent -= size
        call.send_window -= size
        self._window -= size
        if not call.unsent:
            call.is_sent = True
            del self._waiting[call]
        flags = 0 if call.unsent else END_STREAM
        self.put(frame_head(DATA, flags, call.stream, size) + call.body[first : first + size])
