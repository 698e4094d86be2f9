"""One call from one simulated process to another: its request, its execution, its response.

The caller waits for whatever comes first: the response, a broken connection, or its time-out.
Anything that arrives later is ignored. A request that is duplicated or late is executed all the
same, since its server cannot tell.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, NamedTuple

from percolator.errors import (
    DeadlineExceeded,
    InvariantViolation,
    PercolatorError,
    Unavailable,
    UsageError,
)
from percolator.testing.simulator.network_faults import Fault
from percolator.testing.simulator.simulated_life import Life
from percolator.testing.simulator.simulated_wire import Handler, Listener, Wire
from percolator.v1 import errors_pb2
from percolator.wire.status import from_detail, to_detail
from percolator.world import RequestT, ResponseT, StreamMethod, UnaryMethod


class CallingProcess(NamedTuple):
    """The caller: a process, named by its address, in its present life."""

    wire: Wire
    life: Life
    address: str


class CallInFlight(ABC, Generic[RequestT, ResponseT]):
    """What unary and streaming calls have in common: everything but the response."""

    def __init__(
        self,
        caller: CallingProcess,
        method: UnaryMethod[RequestT, ResponseT] | StreamMethod[RequestT, ResponseT],
        target: str,
        request: bytes,
        timeout_seconds: float,
    ) -> None:
        self._wire = wire = caller.wire
        self._target = target
        self._there = caller.address, target
        self._back = target, caller.address
        self._method = method
        self._request = request
        self._timeout_seconds = timeout_seconds
        self._executions: list[tuple[Life, asyncio.Task[None]]] = []
        """Futures that wait for something, each with its process."""
        self.is_over = False
        self.context = caller.life.own_context
        self._send()
        # If sending raises, there is no call: nothing is left that would time out with no caller.
        wire.time_outs.set(wire.loop.now + timeout_seconds, self)

    # ------------------------------------------------------------------ the caller's side

    @abstractmethod
    def _fail(self, error: PercolatorError) -> None:
        """Ends the caller's wait with this error."""

    def break_off(self, why: str) -> None:
        """The connection is gone; the request may or may not have been executed."""
        if not self.is_over:
            self._finish()
            self._fail(Unavailable(why, where=self._where()))

    def give_up(self) -> None:
        """The caller no longer waits. The handler learns of it, if that message arrives."""
        if not self.is_over:
            self._finish()
            self._wire.counts[Fault.GIVEN_UP] += 1
            self._wire.carry(self._there, self._cancel_executions)

    def time_out(self) -> None:
        if not self.is_over:
            self.give_up()
            self._fail(DeadlineExceeded("no answer in time", where=self._where()))

    def _finish(self) -> None:
        self.is_over = True

    def _where(self) -> str:
        return f"{self._method.path} at {self._target}"

    def _send(self) -> None:
        wire, there = self._wire, self._there
        match wire.fate(there, self._method.path, self._request, is_reply=False):
            case None:
                wire.carry(there, self._arrive)
            case Fault.SLOW:
                wire.carry(there, self._arrive, late=True)
            case Fault.DUPLICATED:
                wire.carry(there, self._arrive)
                wire.carry(there, self._arrive, late=True)
            case Fault.BROKEN_BEFORE:
                self._break_soon()
            case Fault.BROKEN_AFTER:
                wire.carry(there, self._arrive)
                self._break_soon()
            case _:
                pass  # dropped: it never arrives anywhere

    def _break_soon(self) -> None:
        self._wire.carry(self._back, self.break_off, "the connection broke")

    # ------------------------------------------------------------------ the server's side

    def _arrive(self) -> None:
        listener = self._wire.listener_at(self._target)
        if listener is None:
            self._wire.counts[Fault.REFUSED] += 1
            self._wire.carry(self._back, self.break_off, "connection refused")
            return
        handler = listener.methods.get(self._method.path)
        if handler is None:
            self._wire.carry(self._back, self._miss)
            return
        listener.calls[self] = None
        waiting = listener.life.begin(self._execute(handler, listener))
        if waiting is not None:
            self._executions.append((listener.life, waiting))

    def _miss(self) -> None:
        if not self.is_over:
            self._finish()
            self._fail(UsageError("no such method there", where=self._where()))

    def broken_by_server(self) -> None:
        """The process that was executing it has ended, and its machine resets the connection."""
        self._wire.carry(self._back, self.break_off, "connection reset")

    def _cancel_executions(self) -> None:
        for life, task in self._executions:
            life.cancel(task)

    async def _execute(self, handler: Handler, listener: Listener) -> None:
        """Runs the handler as a task of the process that owns it."""
        wire = self._wire
        try:
            if wire.on_call is not None:
                loop, deadline = wire.loop, wire.loop.now + self._timeout_seconds
                wire.on_call(lambda: deadline - loop.now)
            await self._answer(handler, listener)
        except InvariantViolation as error:
            wire.unexpected.append(error)
            self._answer_error(error, listener)
        except PercolatorError as error:
            self._answer_error(error, listener)
        except Exception as error:  # noqa: BLE001  # the simulation fails with it at the end
            wire.unexpected.append(error)
            self._answer_error(InvariantViolation(f"failed unexpectedly: {error!r}"), listener)
        finally:
            listener.calls.pop(self, None)

    @abstractmethod
    async def _answer(self, handler: Handler, listener: Listener) -> None:
        """Calls the handler and sends its response."""

    @abstractmethod
    def _answer_error(self, error: PercolatorError, listener: Listener) -> None:
        """Sends the error as the response."""


class UnaryInFlight(CallInFlight[RequestT, ResponseT]):
    """One request, one response."""

    def __init__(
        self,
        caller: CallingProcess,
        method: UnaryMethod[RequestT, ResponseT],
        target: str,
        request: bytes,
        timeout_seconds: float,
    ) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.Future(loop=caller.wire.loop)
        """The serialised response."""
        super().__init__(caller, method, target, request, timeout_seconds)

    def _fail(self, error: PercolatorError) -> None:
        if not self.answer.done():  # cancelled, when the caller was
            self.answer.set_exception(error)

    def _take(self, payload: bytes) -> None:
        if not self.is_over:
            self._finish()
            self.answer.set_result(payload)

    def _take_error(self, payload: bytes) -> None:
        if not self.is_over:
            self._finish()
            self._fail(decoded_error(payload))

    async def _answer(self, handler: Handler, listener: Listener) -> None:
        response = await handler(self._method.request.FromString(self._request))
        self._reply(listener, response.SerializeToString(), is_error=False)

    def _answer_error(self, error: PercolatorError, listener: Listener) -> None:
        self._reply(listener, encoded_error(error), is_error=True)

    def _reply(self, listener: Listener, payload: bytes, *, is_error: bool) -> None:
        if not listener.life.alive:
            return
        wire, back = self._wire, self._back
        take = self._take_error if is_error else self._take
        match wire.fate(back, self._method.path, payload, is_reply=True):
            case None:
                wire.carry(back, take, payload)
            case Fault.SLOW:
                wire.carry(back, take, payload, late=True)
            case Fault.BROKEN_AFTER | Fault.BROKEN_BEFORE:
                self._break_soon()
            case _:
                pass  # dropped


def encoded_error(error: PercolatorError) -> bytes:
    """An error as it travels on the wire."""
    return to_detail(error).SerializeToString()


def decoded_error(payload: bytes) -> PercolatorError:
    """A new error, equal to the one that was sent."""
    return from_detail(errors_pb2.ErrorDetail.FromString(payload))
