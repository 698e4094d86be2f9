"""Calls to the lock service: to one address as long as it answers, then to the next.

A session is known only to the service that opened it, so each client stays with one address and
moves on only when it does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from percolator.errors import ExecutionUnknown, NotReady, PercolatorError, Unavailable
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire import methods
from percolator.wire.addresses import refuse_lone_address
from percolator.world import Network, RequestT, ResponseT, UnaryCall


@dataclass(frozen=True)
class LockServiceStub:
    """The procedures of the lock service at one address."""

    open_session: UnaryCall[pb.OpenSessionRequest, pb.OpenSessionResponse]
    renew_session: UnaryCall[pb.RenewSessionRequest, pb.RenewSessionResponse]
    end_session: UnaryCall[pb.EndSessionRequest, pb.EndSessionResponse]
    check_sessions: UnaryCall[pb.CheckSessionsRequest, pb.CheckSessionsResponse]
    list_sessions: UnaryCall[pb.ListSessionsRequest, pb.ListSessionsResponse]
    try_lock: UnaryCall[pb.TryLockRequest, pb.TryLockResponse]
    renew_locks: UnaryCall[pb.RenewLocksRequest, pb.RenewLocksResponse]
    unlock: UnaryCall[pb.UnlockRequest, pb.UnlockResponse]


Procedure = Callable[[LockServiceStub], UnaryCall[RequestT, ResponseT]]


class LockServiceCalls:
    """`addresses` is read before every call: its owner may change it as the cluster changes."""

    def __init__(self, network: Network, addresses: Sequence[str]) -> None:
        refuse_lone_address(addresses)
        self._network = network
        self.addresses = addresses
        self._current = ""
        """The address that is called as long as it is listed, and answers."""
        self._stubs: dict[str, LockServiceStub] = {}

    async def call(
        self,
        procedure: Procedure[RequestT, ResponseT],
        request: RequestT,
        timeout: float,
    ) -> ResponseT:
        """Calls the current address. If it does not answer, later calls go to the next address."""
        return await self.call_at(self.current(), procedure, request, timeout)

    async def call_at(
        self,
        address: str,
        procedure: Procedure[RequestT, ResponseT],
        request: RequestT,
        timeout: float,
    ) -> ResponseT:
        """As `call`, at one of the addresses."""
        try:
            return await procedure(self._stub(address))(request, timeout)
        except (ExecutionUnknown, NotReady):
            if self._current == address:  # if several calls fail together, only the first moves on
                self._current = self._after(address)
            raise

    def stay_at(self, address: str) -> None:
        """Later calls go to this address, even if others have failed there."""
        self._current = address

    def in_turn(self, first: str = "") -> list[str]:
        """All addresses: `first` before all others, if it is listed, or else the current one."""
        listed = list(self.addresses)
        if not listed:
            return []
        at = listed.index(first if first in listed else self.current())
        return listed[at:] + listed[:at]

    async def all_sessions(
        self,
        timeout: float,
        missing: Callable[[str, PercolatorError], None],
        *,
        activity: bool = False,
    ) -> list[pb.Session]:
        """The sessions that the lock services know, oldest first. `missing` is called with the
        address of each that does not answer, and why; if none does, that is raised. For the other
        arguments, see `sessions_of_each`."""
        listed: dict[bytes, pb.Session] = {}
        silent: dict[str, PercolatorError] = {}
        found = await self.sessions_of_each(timeout, activity=activity)
        for address, sessions in found.items():
            if isinstance(sessions, PercolatorError):
                silent[address] = sessions
            else:
                listed |= {one.session_id: one for one in sessions}
        if len(silent) == len(found):
            raise next(iter(silent.values()), Unavailable("no address of a lock service is known"))
        for address, problem in silent.items():
            missing(address, problem)
        return sorted(listed.values(), key=lambda one: -one.age_milliseconds)

    async def sessions_of_each(
        self, timeout: float, *, activity: bool = False
    ) -> Mapping[str, list[pb.Session] | PercolatorError]:
        """By the address of each lock service: its sessions, or why they are not known; with what
        their processes do, if wanted. The timeout is for each page."""
        addresses = list(self.addresses)
        listed = await asyncio.gather(
            *(self._sessions_at(address, timeout, activity=activity) for address in addresses)
        )
        return dict(zip(addresses, listed, strict=True))

    async def _sessions_at(
        self, address: str, timeout: float, *, activity: bool
    ) -> list[pb.Session] | PercolatorError:
        listed: list[pb.Session] = []
        token = b""
        while True:
            request = pb.ListSessionsRequest(page_token=token, activity=activity)
            try:
                page = await self._stub(address).list_sessions(request, timeout)
            except PercolatorError as error:
                return error
            listed += page.sessions
            token = page.next_page_token
            if not token:
                return listed

    def current(self) -> str:
        """The current address, or the first one if that has left the cluster. Raises `Unavailable`
        if none is known."""
        if not self.addresses:
            raise Unavailable("no address of a lock service is known")
        if self._current not in self.addresses:
            self._current = self.addresses[0]
        return self._current

    def _after(self, address: str) -> str:
        """The address after this one, if it is still listed."""
        listed = list(self.addresses)
        return listed[(listed.index(address) + 1) % len(listed)] if address in listed else ""

    def _stub(self, address: str) -> LockServiceStub:
        stub = self._stubs.get(address)
        if stub is None:
            # Drop the stubs of addresses that are no longer listed: they are not called again.
            addresses = self.addresses
            self._stubs = {known: s for known, s in self._stubs.items() if known in addresses}
            stub = self._stubs[address] = self._connect(address)
        return stub

    def _connect(self, address: str) -> LockServiceStub:
        return LockServiceStub(
            open_session=self._network.unary(address, methods.OPEN_SESSION),
            renew_session=self._network.unary(address, methods.RENEW_SESSION),
            end_session=self._network.unary(address, methods.END_SESSION),
            check_sessions=self._network.unary(address, methods.CHECK_SESSIONS),
            list_sessions=self._network.unary(address, methods.LIST_SESSIONS),
            try_lock=self._network.unary(address, methods.TRY_LOCK),
            renew_locks=self._network.unary(address, methods.RENEW_LOCKS),
            unlock=self._network.unary(address, methods.UNLOCK),
        )
