"""The calls of one connection, and the streams that they have: one each, from when it is sent until
both sides know of its end. The peer permits only so many at a time, and the others wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from percolator.bigtable.http2.call import Call
from percolator.bigtable.http2.frames import STREAM_MAX, ErrorCode, Violation, rst_stream
from percolator.bigtable.http2.headers import NO_TABLE
from percolator.bigtable.http2.sending import Sending
from percolator.bigtable.http2.settings import PeerSettings
from percolator.bigtable.http2.status import CallFailed, lost, not_executed

_FIRST: Final = 1
USED_UP: Final = "the numbers of the connection's streams are used up"


class Streams:
    """Belongs to a `Connection`."""

    def __init__(
        self,
        peer: PeerSettings,
        sending: Sending,
        *,
        idle: Callable[[], None],
        used_up: Callable[[], None],
    ) -> None:
        """`idle` is called when the last stream has ended, `used_up` when there can be no more."""
        self._peer = peer
        self._sending = sending
        self._idle = idle
        self._used_up = used_up
        self._calls: dict[int, Call] = {}
        """By the number of the stream."""
        self._waiting: dict[Call, None] = {}
        self._next = _FIRST

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, call: Call) -> None:
        """Sends a call, now or when the peer permits it."""
        if self._waiting or len(self._calls) >= self._peer.streams_max:
            self._waiting[call] = None
        else:
            self._open(call)

    def begin_waiting(self) -> None:
        while self._waiting and len(self._calls) < self._peer.streams_max:
            call = next(iter(self._waiting))
            del self._waiting[call]
            self._open(call)

    def call(self, stream: int) -> Call | None:
        """The call on a stream; None if it has ended. Raises for streams that never were."""
        call = self._calls.get(stream)
        if call is None and (stream % 2 == 0 or stream >= self._next):
            raise Violation(ErrorCode.PROTOCOL_ERROR, f"a frame of stream {stream}")
        return call

    # ----------------------------------------------------------------- how they end

    def finish(self, call: Call) -> None:
        """The peer has answered. It need not have read the whole request for that."""
        if not call.is_sent:
            self._sending.put(rst_stream(call.stream, ErrorCode.NO_ERROR))
        self.forget(call)

    def cancel(self, call: Call, failure: CallFailed) -> None:
        """Ends a call for both sides."""
        call.fail(failure)
        if call.stream in self._calls:
            self._sending.put(rst_stream(call.stream, ErrorCode.CANCEL))
            self.forget(call)
        else:
            self._waiting.pop(call, None)

    def forget(self, call: Call) -> None:
        """The call has no stream any more, as both sides know."""
        del self._calls[call.stream]
        if not call.is_sent:
            self._sending.drop(call)
        if self._waiting:
            self.begin_waiting()
        if not self._calls:
            self._idle()

    def refuse_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            call.fail(not_executed(why))

    def refuse_above(self, last: int, why: str) -> None:
        """The peer has not looked at streams above the last one, and will not."""
        for call in [call for stream, call in self._calls.items() if stream > last]:
            del self._calls[call.stream]
            self._sending.drop(call)
            call.fail(lost(why) if call.is_answered else not_executed(why))

    def fail_all(self, why: str) -> None:
        """The connection has ended."""
        self.refuse_waiting(why)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(lost(why) if call.is_sent else not_executed(why))

    def _open(self, call: Call) -> None:
        call.stream = self._next
        if call.stream == _FIRST:
            call.head = NO_TABLE + call.head
        self._next += 2
        self._calls[call.stream] = call
        self._sending.request(call)
        if self._next > STREAM_MAX:
            self._used_up()
