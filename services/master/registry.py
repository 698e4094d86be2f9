"""Who is there: the servers of the cluster, as they last reported.

Nothing is stored: after a restart of the master every server is back within one interval. A server
is known by its kind and address, so one that was started again replaces its former self at once.
Servers that fall silent are forgotten after a few seconds, but not because this process slept.
"""

from __future__ import annotations

from dataclasses import dataclass

from percolator.errors import InvalidArgument, Overloaded
from percolator.v1.cluster_pb2 import Server, ServiceKind
from percolator.wire.addresses import parse_host_port
from services.chassis.lived_time import LivedTime, milliseconds_between

_TEXT_CHARACTERS_MAX = 256
_RETRY_SECONDS = 1.0
_UNSIGNED_32_MAX = 2**32 - 1


@dataclass(slots=True)
class _Entry:
    server: Server
    heard_tick: int


class Registry:
    """The servers that reported lately."""

    def __init__(self, time: LivedTime, *, silence_milliseconds: int, servers_max: int) -> None:
        self._time = time
        self._silence_milliseconds = silence_milliseconds
        self._servers_max = servers_max
        self._entries: dict[tuple[int, str], _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def kinds(self) -> list[ServiceKind]:
        """The kind of each registered server."""
        return [entry.server.kind for entry in tuple(self._entries.values())]

    def report(self, server: Server) -> None:
        """A server says that it is there."""
        _check(server)
        key = (server.kind, server.address)
        if key not in self._entries and len(self._entries) >= self._servers_max:
            self.forget_silent()
            if len(self._entries) >= self._servers_max:
                raise Overloaded(
                    f"{self._servers_max} servers are registered already",
                    retry_after_seconds=_RETRY_SECONDS,
                )
        known = Server()
        known.CopyFrom(server)
        self._entries[key] = _Entry(known, self._time.tick())

    def servers(self) -> list[Server]:
        """By kind and address, with how long they have said nothing."""
        now = self._time.tick()
        for entry in self._entries.values():
            silence = milliseconds_between(entry.heard_tick, now)
            entry.server.silence_milliseconds = min(silence, _UNSIGNED_32_MAX)
        return [self._entries[key].server for key in sorted(self._entries)]

    def forget_silent(self) -> None:
        """To be called often: nobody else forgets them."""
        now = self._time.tick()
        silent = [
            key
            for key, entry in self._entries.items()
            if milliseconds_between(entry.heard_tick, now) > self._silence_milliseconds
        ]
        for key in silent:
            del self._entries[key]


def _check(server: Server) -> None:
    if server.kind not in ServiceKind.values() or not server.kind:
        raise InvalidArgument("server.kind", f"{server.kind} is no kind of service")
    for field in ("server_id", "address", "version"):
        if not 0 < len(getattr(server, field)) <= _TEXT_CHARACTERS_MAX:
            raise InvalidArgument(
                f"server.{field}", f"expected 1 to {_TEXT_CHARACTERS_MAX} characters"
            )
    if parse_host_port(server.address, "server.address").port == 0:
        raise InvalidArgument("server.address", "port 0 cannot be dialled")
    if len(server.metrics_address) > _TEXT_CHARACTERS_MAX:
        raise InvalidArgument(
            "server.metrics_address", f"expected at most {_TEXT_CHARACTERS_MAX} characters"
        )
    if server.metrics_address:
        parse_host_port(server.metrics_address, "server.metrics_address")
