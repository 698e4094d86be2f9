"""The server's side of a connection for frames (percolator/wire/frames), and what it puts up with.

A caller that is slow or hostile costs a bounded amount, and is cut off in the end:
- It says hello within ten seconds, and completes each frame within a minute.
- A frame is no larger than the largest request. All connections together keep a bounded number of
  bytes of incomplete frames. Anything that is not a frame ends the connection.
- Of `CALLS_MAX` calls in progress, one has to be answered before the next one is read.
- While it does not take answers, nothing of it is read; after half a minute the connection ends.

The calls themselves pass the edge that gRPC calls pass (`rpc.py`): its limits, access and metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, cast

import structlog
from google.protobuf.message import DecodeError

from percolator.errors import ExecutionUnknown, InvalidArgument, PercolatorError
from percolator.services.chassis.serving.frame_call import Caller, FrameCallContext, FrameCallFailed
from percolator.services.chassis.serving.quotas import peer_name
from percolator.services.chassis.serving.rpc import Unary
from percolator.services.chassis.serving.trailers import failure
from percolator.v1.frames_pb2 import FramesHello, FramesWelcome
from percolator.wire.frames.layout import (
    ANSWER_BYTES_MAX,
    CALL_HEAD,
    GREETING_BYTES_MAX,
    PREAMBLE,
    Frame,
    FrameReader,
    Kind,
    NotFrames,
    frame,
)
from percolator.wire.methods import READING

CALLS_MAX = 64
HELLO_SECONDS = 10.0
FRAME_SECONDS = 60.0
UNREAD_SECONDS = 30.0
FRAMES_PER_TURN = 256
"""Then other connections have their turn: a frame may be as small as nine bytes."""

_log = structlog.get_logger("percolator.frames")


class Listener(Protocol):
    """What has accepted connections, and hears of each what concerns all."""

    def began(self, connection: ServedConnection) -> str:
        """It is made, after any handshake. Returns why it cannot stay, or nothing."""
        ...

    def greeted(self, connection: ServedConnection) -> None:
        """It has said hello."""
        ...

    def keeps(self, more: int) -> bool:
        """A connection keeps so many more bytes of incomplete frames. Whether there is memory."""
        ...

    def refused(self) -> None:
        """This side does not put up with one any longer."""
        ...

    def ended(self, connection: ServedConnection) -> None: ...


class ServedConnection(asyncio.Protocol):
    """One connection, from its first byte on."""

    def __init__(
        self,
        server_id: str,
        methods: Mapping[str, Unary],
        request_bytes_max: int,
        listener: Listener,
    ) -> None:
        """`methods` by path."""
        self._server_id = server_id
        self._methods = methods
        self._unary = tuple(methods.items())
        self._request_bytes_max = request_bytes_max
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(GREETING_BYTES_MAX, PREAMBLE)
        self._caller: Caller | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._writable = True
        self._reading = True
        self._kept = 0
        """Bytes of incomplete frames, as the listener knows them."""
        self._behind = False
        """Whether frames are left for a later turn of the loop."""
        self._patience: asyncio.TimerHandle | None = None
        """Ends the connection unless a frame is complete by then."""
        self._unread: asyncio.TimerHandle | None = None
        """Ends the connection unless answers are taken by then."""

    def leave(self) -> None:
        """Asks the caller to end the connection when its calls have been answered."""
        self._write(frame(Kind.LEAVING, 0))

    def abort(self) -> None:
        """Ends the connection at once, and the calls in progress with it."""
        if self._transport is not None:
            self._transport.abort()

    def refuse(self, reason: str) -> None:
        """Ends the connection because it has broken a rule or a limit."""
        self._listener.refused()
        # Not worth a line for operators: anyone who reaches the port can cause it.
        _log.debug("a connection for frames was refused", reason=reason, peer=self.peer())
        self.abort()

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if reason := self._listener.began(self):
            self.refuse(reason)
        else:
            self._expect_within(HELLO_SECONDS, "no hello")

    def data_received(self, data: bytes) -> None:
        self._reader.add(data)
        self._take_all()

    def pause_writing(self) -> None:
        self._writable = False
        self._read_or_not()
        self._unread = self._loop.call_later(UNREAD_SECONDS, self.refuse, "takes no answers")

    def resume_writing(self) -> None:
        self._writable = True
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        self._take_all()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel_calls()
        for timer in (self._patience, self._unread):
            if timer is not None:
                timer.cancel()
        self._listener.keeps(-self._kept)
        self._listener.ended(self)

    # ------------------------------------------------------------------------- frames

    def _take_all(self) -> None:
        """Takes the frames that are complete, as far as calls may begin."""
        if self._transport is None or self._transport.is_closing():
            return
        self._behind = False
        taken = 0
        try:
            while self._ready and (received := self._reader.next()) is not None:
                taken += 1
                if taken == FRAMES_PER_TURN:
                    self._behind = True
                    self._loop.call_soon(self._take_all)
                self._be_patient()
                if self._caller is None:
                    self._greet(received)
                else:
                    self._take(received)
        except NotFrames as error:
            self.refuse(str(error))
            return
        self._read_or_not()
        if self._ready and self._reader.kept:
            self._expect_within(FRAME_SECONDS, "a frame is not completed")
        change, self._kept = self._reader.kept - self._kept, self._reader.kept
        if change and not self._listener.keeps(change) and self._kept > GREETING_BYTES_MAX:
            self.refuse("too much memory is in use for incomplete frames")

    @property
    def _ready(self) -> bool:
        return self._writable and not self._behind and len(self._tasks) < CALLS_MAX

    def _read_or_not(self) -> None:
        if self._transport is None or self._transport.is_closing() or self._reading == self._ready:
            return
        self._reading = self._ready
        if self._reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _greet(self, received: Frame) -> None:
        if received.kind != Kind.HELLO:
            raise NotFrames(f"a frame of kind {received.kind} before the hello")
        try:
            hello = FramesHello.FromString(received.body)
        except DecodeError as error:
            raise NotFrames(f"the hello is not a message: {error}") from None
        if not self._server_id or hello.server_id != self._server_id:
            raise NotFrames("the hello is meant for another server")
        self._listener.greeted(self)
        self._caller = Caller(hello.authorization, self.names(), self.peer())
        self._reader.bytes_max = self._request_bytes_max + CALL_HEAD.size
        welcome = FramesWelcome(
            paths=[path for path, _ in self._unary],
            request_bytes_max=self._request_bytes_max,
            # One less than where reading stops, so that a caller who keeps to it is always heard,
            # such as when it asks for a sign of life.
            calls_max=CALLS_MAX - 1,
        )
        self._write(frame(Kind.WELCOME, 0, welcome.SerializeToString()))

    def _take(self, received: Frame) -> None:
        match received.kind:
            case Kind.CALL:
                self._begin(received)
            case Kind.CANCEL:
                task = self._tasks.get(received.call)
                # None if the answer is on its way.
                if task is not None:
                    task.cancel()
            case Kind.PING:
                self._write(frame(Kind.PONG, 0))
            case _:
                raise NotFrames(f"a frame of kind {received.kind} from a caller")

    # -------------------------------------------------------------------------- calls

    def _begin(self, received: Frame) -> None:
        number, body = received.call, received.body
        if len(body) < CALL_HEAD.size or self._caller is None:
            raise NotFrames("a call without a method")
        index, milliseconds = CALL_HEAD.unpack_from(body)
        if index >= len(self._unary):
            raise NotFrames(f"a call of method {index}, which was not offered")
        if number in self._tasks:
            raise NotFrames(f"two calls with the number {number}")
        path, unary = self._unary[index]
        deadline = self._loop.time() + milliseconds / 1000
        context = FrameCallContext(self._caller, deadline, self._loop.time)
        task = self._tasks[number] = self._loop.create_task(
            self._answer(number, path, unary, body[CALL_HEAD.size :], context)
        )
        too_late = self._loop.call_at(deadline, task.cancel)
        task.add_done_callback(lambda _: self._done(number, too_late))

    async def _answer(
        self, number: int, path: str, unary: Unary, request: bytes, context: FrameCallContext
    ) -> None:
        try:
            encoded = await unary(request, context)
        except FrameCallFailed as failed:
            self._write(frame(Kind.FAILURE, number, failed.status))
            return
        if len(encoded) > ANSWER_BYTES_MAX:
            _, _, ((_, status),) = failure(_too_large(path, len(encoded)))
            self._write(frame(Kind.FAILURE, number, status))
            return
        self._write(frame(Kind.ANSWER, number, encoded))

    def _done(self, number: int, too_late: asyncio.TimerHandle) -> None:
        too_late.cancel()
        del self._tasks[number]
        if not self._reading:
            self._take_all()

    def _cancel_calls(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    # --------------------------------------------------------------------- connection

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _expect_within(self, seconds: float, otherwise: str) -> None:
        if self._patience is None:
            self._patience = self._loop.call_later(seconds, self.refuse, otherwise)

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def names(self) -> list[bytes]:
        """The alternative names in the caller's certificate; none without TLS."""
        if self._transport is None:
            return []
        shown = self._transport.get_extra_info("peercert") or {}
        # A name may also be that of a directory's entry, which is no text.
        names = [name for _, name in shown.get("subjectAltName", ()) if isinstance(name, str)]
        return [name.encode() for name in names]

    def peer(self) -> str:
        """The caller's address, as gRPC writes it."""
        found = self._transport.get_extra_info("peername") if self._transport is not None else None
        # That of a socket of this machine is no pair.
        return peer_name(found[0] if isinstance(found, tuple) else "")


def _too_large(path: str, size: int) -> PercolatorError:
    sizes = f"has {size} bytes, at most {ANSWER_BYTES_MAX} are accepted"
    if path in READING:
        return InvalidArgument("response", f"{sizes}; ask for less in one call", where=path)
    return ExecutionUnknown(f"executed, but its response {sizes}", where=path)
