"""One connection of HTTP/2 to a server of gRPC (RFC 9113, and gRPC's PROTOCOL-HTTP2).

Invariants:
- A call ends once, and then it has no stream: the peer has ended it, or was told of its end.
- Whatever ends a call says whether it is certain that it was not executed: it never left
  completely, the peer has refused its stream, or has said by GOAWAY that it did not get that far.
- What a peer makes us keep is bounded: by the windows that it has, by the length of frames, headers
  and messages, and by how many of its questions wait for it to read our answers.
- A peer that breaks the protocol is told so, and the connection ends.
"""

from __future__ import annotations

import asyncio
from typing import Final, cast

from percolator.bigtable.http2 import frames
from percolator.bigtable.http2.call import Call
from percolator.bigtable.http2.frames import (
    END_STREAM,
    STREAM_MAX,
    ErrorCode,
    Frame,
    FrameReader,
    Violation,
)
from percolator.bigtable.http2.headers import HeaderReader, Malformed
from percolator.bigtable.http2.sending import Sending
from percolator.bigtable.http2.settings import (
    CONNECTION_WINDOW,
    HEADER_LIST_BYTES_MAX,
    OURS,
    WINDOW_DEFAULT,
    PeerSettings,
)
from percolator.bigtable.http2.signs_of_life import SignsOfLife
from percolator.bigtable.http2.status import CallFailed, Code, not_executed, reset
from percolator.bigtable.http2.streams import USED_UP, Streams

CLOSE_SECONDS: Final = 1.0
"""How long a connection may take to send its last words."""
_OUR_PING: Final = frames.frame(frames.PING, 0, 0, b"still on")
_SETTINGS_ACK: Final = frames.frame(frames.SETTINGS, frames.ACK, 0)
_PING_BYTES: Final = 8
_PRIORITY_BYTES: Final = 5


class Connection(asyncio.Protocol):
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._peer = PeerSettings()
        self._sending = Sending(self._peer)
        self._reader = FrameReader()
        self._headers = HeaderReader()
        self._expected: int | None = frames.SETTINGS
        """The kind that the next frame has to have; None if it may have any."""
        self._block: tuple[int, int, bytearray] | None = None
        """Of headers that continue: the stream, the flags, and what has come."""
        self._block_counts = 0
        self._streams = Streams(
            self._peer,
            self._sending,
            idle=self._idle,
            used_up=lambda: self._retire(USED_UP),
        )
        self._window = CONNECTION_WINDOW
        self._life: SignsOfLife | None = None
        self._aborting: asyncio.TimerHandle | None = None
        self._retiring = ""
        """Why no further calls are taken; empty if they are."""
        self._is_over = False
        self.ready: asyncio.Future[str] = self._loop.create_future()
        """Done with "" when the peer has announced its settings, or with what prevents that."""
        self.ended: asyncio.Future[None] = self._loop.create_future()

    @property
    def takes_calls(self) -> bool:
        return not self._retiring

    @property
    def streams_max(self) -> int:
        """How many calls the peer takes at a time."""
        return self._peer.streams_max

    # --------------------------------------------------------------------------- calls

    def begin(self, head: bytes, body: bytes, seconds: float, *, wants_all: bool) -> Call:
        """Sends a call; `leave` it in any case. `head` is its block of headers, and `body` its
        message with the prefix. The call fails after so many seconds."""
        call = Call(head, body, wants_all=wants_all)
        if self._retiring:
            call.fail(not_executed(self._retiring))
            return call
        call.timer = self._loop.call_later(seconds, self._too_late, call)
        if self._life is not None:
            self._life.is_owed = True
        self._streams.begin(call)
        return call

    def leave(self, call: Call) -> None:
        """Nobody waits for the call any more."""
        if call.timer is not None:
            call.timer.cancel()
        if not call.ended:
            self._streams.cancel(call, CallFailed(Code.CANCELLED, "given up"))

    def taken(self, call: Call) -> None:
        """Messages of the call were taken, which may make room for others."""
        credit = call.credit()
        if credit:
            self._sending.put(frames.window_update(call.stream, credit))

    async def close(self) -> None:
        """Ends the connection, and the calls in progress with it."""
        self._end("the connection was closed", ErrorCode.NO_ERROR)
        if self._transport is not None:
            await asyncio.wait([self.ended])

    def _too_late(self, call: Call) -> None:
        if not call.ended:
            self._streams.cancel(call, CallFailed(Code.DEADLINE_EXCEEDED, "no answer in time"))

    # ----------------------------------------------------------------------- the end

    def _retire(self, why: str) -> None:
        """Takes no further calls, and ends with those in progress."""
        self._retiring = self._retiring or why
        self._streams.refuse_waiting(why)
        if not self._streams:
            self._end(why, ErrorCode.NO_ERROR)

    def _idle(self) -> None:
        if self._retiring:
            self._end(self._retiring, ErrorCode.NO_ERROR)

    def _end(self, why: str, code: ErrorCode | None) -> None:
        """Ends the connection at once. With a code, the peer is told."""
        if self._is_over:
            return
        self._is_over = True
        self._retiring = self._retiring or why
        if self._life is not None:
            self._life.stop()
        if code is not None:
            self._sending.put(frames.goaway(code, "" if code is ErrorCode.NO_ERROR else why))
            self._sending.flush()
        self._sending.close()
        if self._transport is not None:
            if code is None:
                self._transport.abort()
            else:
                self._transport.close()
                self._aborting = self._loop.call_later(CLOSE_SECONDS, self._transport.abort)
        if not self.ready.done():
            self.ready.set_result(why)
        self._streams.fail_all(why)

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_over:
            self._transport.abort()
            return
        self._sending.open(self._transport)
        more = frames.window_update(0, CONNECTION_WINDOW - WINDOW_DEFAULT)
        self._sending.put(frames.PREFACE + OURS + more)
        self._life = SignsOfLife(lambda: bool(self._streams), self._ping, self._give_up)

    def data_received(self, data: bytes) -> None:
        if self._life is not None:
            self._life.hear()
        try:
            for received in self._reader.take(data):
                if self._is_over:
                    return
                self._take(received)
        except Violation as violation:
            self._end(f"the server breaks HTTP/2: {violation}", violation.code)
        self._sending.expect()

    def pause_writing(self) -> None:
        self._sending.pause()

    def resume_writing(self) -> None:
        self._sending.resume()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"{error}" if error else "the server has closed the connection", None)
        if self._aborting is not None:
            self._aborting.cancel()
        self.ended.set_result(None)

    def _ping(self) -> None:
        self._sending.put(_OUR_PING)

    def _give_up(self) -> None:
        self._end("the server gives no sign of life", None)

    # ------------------------------------------------------------------- what arrives

    def _take(self, received: Frame) -> None:
        kind, flags, stream, payload = received
        if self._expected is not None and kind != self._expected:
            raise Violation(ErrorCode.PROTOCOL_ERROR, f"a frame of kind {kind} in this place")
        if kind == frames.DATA:
            self._take_data(flags, stream, payload)
        elif kind == frames.HEADERS:
            block = payload
            if flags & (frames.PADDED | frames.WITH_PRIORITY):
                block = frames.content(flags, payload)
            self._take_headers(flags, stream, block)
        elif kind == frames.CONTINUATION:
            self._take_continuation(flags, stream, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._take_window_update(stream, payload)
        elif kind == frames.RST_STREAM:
            self._take_reset(stream, payload)
        elif kind in (frames.PING, frames.SETTINGS, frames.GOAWAY):
            if stream:
                raise Violation(ErrorCode.PROTOCOL_ERROR, f"a stream in a frame of kind {kind}")
            self._take_of_all(kind, flags, payload)
        elif kind == frames.PUSH_PROMISE:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "a push, which was not permitted")
        elif kind == frames.PRIORITY and (not stream or len(payload) != _PRIORITY_BYTES):
            raise Violation(ErrorCode.PROTOCOL_ERROR, "a priority of nothing")

    def _take_of_all(self, kind: int, flags: int, payload: bytes) -> None:
        """A frame for the whole connection."""
        if kind == frames.PING:
            if len(payload) != _PING_BYTES:
                raise Violation(ErrorCode.FRAME_SIZE_ERROR, f"a ping of {len(payload)} bytes")
            if not flags & frames.ACK:
                self._sending.answer(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.GOAWAY:
            last, code, said = frames.goaway_in(payload)
            why = f"the server is leaving: {frames.error_name(code)} {said}".rstrip()
            self._streams.refuse_above(last, why)
            self._retire(why)
        elif not flags & frames.ACK:
            before = self._peer.window
            self._peer.take(payload)
            self._sending.answer(_SETTINGS_ACK)
            if self._peer.window != before:
                self._sending.grow_streams(self._peer.window - before)
            if not self.ready.done():
                self._expected = None
                self.ready.set_result("")
            self._streams.begin_waiting()
        elif payload:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement with settings")

    def _take_data(self, flags: int, stream: int, payload: bytes) -> None:
        size = len(payload)
        self._window -= size
        if self._window < 0:
            raise Violation(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window permits")
        if self._window < CONNECTION_WINDOW // 2:
            # Whoever does not take messages holds up its own stream, and no other.
            self._sending.put(frames.window_update(0, CONNECTION_WINDOW - self._window))
            self._window = CONNECTION_WINDOW
        data = frames.content(frames.PADDED, payload) if flags & frames.PADDED else payload
        call = self._streams.call(stream)
        if call is None:
            return
        is_last = bool(flags & END_STREAM)
        try:
            credit = call.take_data(data, size, is_last=is_last)
        except CallFailed as failure:
            self._streams.cancel(call, failure)
            return
        if is_last:
            self._streams.finish(call)
        elif credit:
            self._sending.put(frames.window_update(stream, credit))

    def _take_headers(self, flags: int, stream: int, block: bytes) -> None:
        if not flags & frames.END_HEADERS:
            self._block = (stream, flags, bytearray(block))
            self._expected = frames.CONTINUATION
            self._block_counts = len(block)
            return
        call = self._streams.call(stream)
        if call is None:
            return  # a block that is not decoded changes nothing for later ones
        is_last = bool(flags & END_STREAM)
        try:
            call.take_headers(self._headers.fields(block), is_last=is_last)
        except Malformed as error:
            self._streams.cancel(
                call, CallFailed(Code.INTERNAL, f"the answer's headers have {error}")
            )
        except CallFailed as failure:
            self._streams.cancel(call, failure)
        else:
            if is_last:
                self._streams.finish(call)

    def _take_continuation(self, flags: int, stream: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != stream:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "a continuation of nothing")
        _, first_flags, block = self._block
        block += payload
        self._block_counts += len(payload) + frames.HEAD_BYTES
        if self._block_counts > HEADER_LIST_BYTES_MAX:
            raise Violation(ErrorCode.ENHANCE_YOUR_CALM, "headers that are too long")
        if flags & frames.END_HEADERS:
            self._block = self._expected = None
            self._take_headers(first_flags | frames.END_HEADERS, stream, bytes(block))

    def _take_window_update(self, stream: int, payload: bytes) -> None:
        more = frames.number_in(payload, "a window update") & STREAM_MAX
        if not stream:
            if not more:
                raise Violation(ErrorCode.PROTOCOL_ERROR, "a window that grows by nothing")
            self._sending.grow(more)
            return
        call = self._streams.call(stream)
        if call is not None and not (more and self._sending.grow_stream(call, more)):
            self._streams.cancel(
                call, CallFailed(Code.INTERNAL, f"a window that grows by {more:,}")
            )

    def _take_reset(self, stream: int, payload: bytes) -> None:
        code = frames.number_in(payload, "a reset")
        call = self._streams.call(stream)
        if call is not None:
            failure = reset(code)
            # Nothing that has begun to answer can say that it has not begun.
            failure.not_executed = not call.is_sent or (
                failure.not_executed and not call.is_answered
            )
            call.fail(failure)
            self._streams.forget(call)
