"""The servers of the cluster, as they last reported.

Nothing is stored: after a restart of the master every server reports again within one interval. A
server is known by its kind and address, so a restarted one replaces its former entry at once.
Servers that fall silent are forgotten after a few seconds. Time in which this process was paused
does not count as silence: otherwise it would forget all of them when it wakes.

A server that fell silent and had not said that it was leaving is missed for a quarter of an hour:
`percolator status` tells. If its address is used again, it is missed no longer.

What a server said about its clock is believed for a shorter time, and that time does not stand
still: the clock may have been set right since, or wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from percolator.errors import InvalidArgument, NotReady, Overloaded, PercolatorError
from percolator.services.chassis.coordinator import LivedTime, milliseconds_between
from percolator.v1 import cluster_pb2 as cluster
from percolator.v1.cluster_pb2 import Server, ServiceKind
from percolator.wire.addresses import parse_host_port
from percolator.world import Clock, Network, StreamMethod

_TEXT_CHARACTERS_MAX = 256
_METADATA_TEXT = re.compile(r"[!-~]+")
_RETRY_SECONDS = 1.0
_WALL_MILLISECONDS_MAX = 253_402_300_800_000
_UNSIGNED_32_MAX = 2**32 - 1
_MISSED_MILLISECONDS = 900_000
_MISSED_MAX = 100
_CLOCK_AGE_MILLISECONDS_MAX = 3_000
"""Three intervals in which servers report."""


@dataclass(slots=True)
class _Entry:
    server: Server
    heard_tick: int
    clock_origin: float | None
    """Wall-clock time when this process's monotonic clock was 0, in milliseconds. Both go on at the
    same speed, so this holds even if this process's own wall clock is set."""
    heard_at: float
    """When it last reported, in monotonic milliseconds."""


class Registry:
    """The servers that reported recently."""

    def __init__(
        self, clock: Clock, time: LivedTime, *, silence_milliseconds: int, servers_max: int
    ) -> None:
        self._clock = clock
        self._time = time
        self._silence_milliseconds = silence_milliseconds
        self._servers_max = servers_max
        self._entries: dict[tuple[int, str], _Entry] = {}
        self._missed: dict[tuple[int, str], _Entry] = {}
        """Processes that fell silent unexpectedly, in that order."""
        self.masters: list[Server] = []
        """All living masters. They do not report: each lists itself in the cluster's store."""

    def __len__(self) -> int:
        return len(self._entries)

    def kinds(self) -> list[ServiceKind]:
        """The kind of each registered server."""
        return [entry.server.kind for entry in tuple(self._entries.values())]

    def others_at(self, server: Server) -> list[Server]:
        """Servers of other kinds that are listed at the address of this one."""
        keys = ((kind, server.address) for kind in ServiceKind.values() if kind != server.kind)
        return [self._entries[key].server for key in keys if key in self._entries]

    def forget(self, servers: Iterable[Server]) -> None:
        """Forgets servers whose addresses belong to others now."""
        for server in servers:
            self._entries.pop((server.kind, server.address), None)

    def report(self, server: Server, *, wall_milliseconds: int = 0) -> None:
        """A server reports, with what its wall clock says; 0 if it did not."""
        check(server)
        if wall_milliseconds > _WALL_MILLISECONDS_MAX:
            # A clock that no description could tell anyone: they would all fail.
            raise InvalidArgument(
                "wall_milliseconds", f"expected at most {_WALL_MILLISECONDS_MAX}, the year 10000"
            )
        key = (server.kind, server.address)
        if key not in self._entries and len(self._entries) >= self._servers_max:
            self.forget_silent()
            if len(self._entries) >= self._servers_max:
                raise Overloaded(
                    f"{self._servers_max} servers are registered, the limit",
                    retry_after_seconds=_RETRY_SECONDS,
                )
        known = Server()
        known.CopyFrom(server)
        known.ClearField("clock_lead_milliseconds")
        monotonic = self._clock.monotonic_seconds() * 1000
        origin = wall_milliseconds - monotonic if wall_milliseconds else None
        self._entries[key] = _Entry(known, self._time.tick(), origin, monotonic)
        self._missed.pop(key, None)

    def servers(self) -> list[Server]:
        """All servers by kind and address, with the time since each last reported, and how far its
        wall clock is ahead of this process's, if it has said so recently."""
        now = self._time.tick()
        monotonic = self._clock.monotonic_seconds() * 1000
        wall = self._clock.wall_milliseconds()
        for entry in self._entries.values():
            entry.server.ClearField("clock_lead_milliseconds")
            is_recent = monotonic - entry.heard_at <= _CLOCK_AGE_MILLISECONDS_MAX
            if entry.clock_origin is not None and is_recent:
                ahead = round(entry.clock_origin + monotonic - wall)
                entry.server.clock_lead_milliseconds = ahead
            silence = milliseconds_between(entry.heard_tick, now)
            entry.server.silence_milliseconds = min(silence, _UNSIGNED_32_MAX)
        return [self._entries[key].server for key in sorted(self._entries)]

    def missed(self) -> list[Server]:
        """Servers that fell silent unexpectedly a while ago, with the time since then."""
        now = self._time.tick()
        for entry in self._missed.values():
            entry.server.ClearField("clock_lead_milliseconds")
            entry.server.silence_milliseconds = milliseconds_between(entry.heard_tick, now)
        return [self._missed[key].server for key in sorted(self._missed)]

    def forget_all(self) -> None:
        """Forgets all servers, and misses none: from now on they report to another master."""
        self._entries.clear()
        self._missed.clear()

    def forget_silent(self) -> None:
        """Forgets servers that fell silent. To be called often."""
        now = self._time.tick()
        silent = [
            key
            for key, entry in self._entries.items()
            if milliseconds_between(entry.heard_tick, now) > self._silence_milliseconds
        ]
        for key in silent:
            entry = self._entries.pop(key)
            if not entry.server.leaving:
                self._missed[key] = entry
        for key, entry in list(self._missed.items()):
            silence = milliseconds_between(entry.heard_tick, now)
            if silence > _MISSED_MILLISECONDS or len(self._missed) > _MISSED_MAX:
                del self._missed[key]


def check(server: Server) -> None:
    """Raises `InvalidArgument`, naming the field, unless the server could be listed."""
    if server.kind not in ServiceKind.values() or not server.kind:
        raise InvalidArgument("server.kind", f"{server.kind} is not a kind of service")
    if server.kind == ServiceKind.SERVICE_KIND_MASTER:
        # Gateways would forward calls to an address where no master is.
        raise InvalidArgument(
            "server.kind", "masters do not register: each lists itself in the cluster's store"
        )
    for field in ("server_id", "address", "version"):
        if not 0 < len(getattr(server, field)) <= _TEXT_CHARACTERS_MAX:
            raise InvalidArgument(
                f"server.{field}", f"expected 1 to {_TEXT_CHARACTERS_MAX} characters"
            )
    for field in ("server_id", "address"):
        # A gateway sends either as metadata of gRPC, which refuses anything else. The call that it
        # forwarded calls would fail, and nothing would say why.
        text = getattr(server, field)
        if not _METADATA_TEXT.fullmatch(text):
            raise InvalidArgument(f"server.{field}", f"expected visible ASCII, found {text!r}")
    if parse_host_port(server.address, "server.address").port == 0:
        raise InvalidArgument("server.address", "port 0 cannot be dialled")
    if len(server.metrics_address) > _TEXT_CHARACTERS_MAX:
        raise InvalidArgument(
            "server.metrics_address", f"expected at most {_TEXT_CHARACTERS_MAX} characters"
        )
    if server.metrics_address:
        parse_host_port(server.metrics_address, "server.metrics_address")


HEALTH = StreamMethod("/grpc.health.v1.Health/Watch", HealthCheckRequest, HealthCheckResponse)

SERVICE_OF: dict[int, str] = {
    cluster.SERVICE_KIND_MASTER: "percolator.v1.MasterService",
    cluster.SERVICE_KIND_ORACLE: "percolator.v1.OracleService",
    cluster.SERVICE_KIND_LOCK_SERVICE: "percolator.v1.LockService",
    cluster.SERVICE_KIND_TABLET_SERVER: "percolator.v1.TabletServerService",
    cluster.SERVICE_KIND_GATEWAY: "percolator.v1.GatewayService",
}
"""A service that servers of no other kind have under this name. A worker has none."""

_ANSWER_SECONDS = 1.0


class KindCheck:
    """Asks an address what it is, when a server registers there as another kind than the listed
    one.

    Anyone who may register could otherwise list a second server at the address of a first one:
    clients would ask a tablet server for timestamps, or wait for a lock service that is not one.
    But a port may also be given to another kind of server, legitimately, and its former entry stays
    for seconds. The process that listens there knows which of the two it is: its health service
    knows its services.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.questions = 0

    async def require(self, server: Server, listed: Sequence[Server]) -> None:
        """Returns if the server may register although these are listed at its address, all of
        other kinds. Raises `InvalidArgument` if one of them is still there, and `NotReady` if the
        address does not answer."""
        for other in listed:
            if await self._is_still(other, server):
                raise InvalidArgument(
                    "server.kind",
                    f"{server.address} answers as a {_name(other)}, not as a {_name(server)}; "
                    "register the address that this process listens on",
                )

    async def _is_still(self, listed: Server, claimed: Server) -> bool:
        service = SERVICE_OF.get(listed.kind)
        if service is not None:
            return await self._knows(claimed.address, service)
        # A worker has no service by which to know it, but the one that replaces it has.
        return not await self._knows(claimed.address, SERVICE_OF[claimed.kind])

    async def _knows(self, address: str, service: str) -> bool:
        self.questions += 1
        ask = self._network.stream(address, HEALTH)
        watching: Any = ask(HealthCheckRequest(service=service), _ANSWER_SECONDS)
        try:
            async with aclosing(watching):
                async for answer in watching:
                    return bool(answer.status != HealthCheckResponse.SERVICE_UNKNOWN)
        except PercolatorError as error:
            raise NotReady(
                f"another kind of server is listed at {address}, which does not say what it is: "
                f"{error.message}",
                retry_after_seconds=_RETRY_SECONDS,
            ) from error
        raise NotReady(f"{address} does not say what it is", retry_after_seconds=_RETRY_SECONDS)


def _name(server: Server) -> str:
    return cluster.ServiceKind.Name(server.kind).removeprefix("SERVICE_KIND_").lower()
