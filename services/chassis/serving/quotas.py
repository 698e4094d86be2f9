"""Quotas: how much of a server's limits one caller may use, so that none can exhaust a server.

A client is a token at an address (docs/decisions.md, 75):
- One client may use `client_quota_percent` of each limit.
- All clients together may use `clients_quota_percent`. Half of the rest is for administrators and
  servers, the other half for servers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import unquote

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from percolator.errors import Overloaded
from percolator.services.chassis.settings.service_settings import (
    CLIENT_QUOTA_PERCENT,
    CLIENTS_QUOTA_PERCENT,
)
from percolator.wire.roles import Role

LOCAL = "localhost"
_IPV6_NETWORK_BITS = 64
_PEERS_REMEMBERED = 16_384


class CallerIdentity(NamedTuple):
    """Who calls, as far as it matters for what the caller may do, and how much of it at once."""

    role: Role
    client: tuple[bytes, str] | None = None
    """The hash of the token, if there is one, and the machine. None for administrators and servers,
    which are not limited as clients."""


OWN = CallerIdentity(Role.SERVER)
"""The process itself, such as a simulation that calls a handler."""


@lru_cache(_PEERS_REMEMBERED)
def machine_of(peer: str) -> str:
    """The machine at the other end of a connection, from an address as gRPC writes it.

    An IPv6 network of 64 bits counts as one machine, since a machine may take any of its addresses;
    so do all loopback addresses.
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return LOCAL
    host = unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None and not address.is_loopback:
            bits = 128 - _IPV6_NETWORK_BITS
            return f"{IPv6Address(int(address) >> bits << bits)}/{_IPV6_NETWORK_BITS}"
        address = address.ipv4_mapped or address
    return LOCAL if address.is_loopback else str(address)


def peer_name(host: str) -> str:
    """An address of a socket as gRPC writes it; no host means a socket of this machine."""
    if not host:
        return "unix:"
    return f"ipv6:[{host}]:0" if ":" in host else f"ipv4:{host}:0"


class Quota:
    """One limit of a server, and how much of it each client uses. Belongs to the event loop."""

    def __init__(
        self,
        what: str,
        setting: str,
        limit: int,
        *,
        client_percent: int = CLIENT_QUOTA_PERCENT,
        clients_percent: int = CLIENTS_QUOTA_PERCENT,
        retry_after_seconds: float = 1.0,
    ) -> None:
        """`what` is limited by a setting: "sessions" by "sessions_max"."""
        self.what = what
        self.used = 0
        self.used_by_clients = 0
        self.refused = {"client": 0, "clients": 0, "all": 0}
        """By the limit that was reached: that of one client, of all clients, or of all callers."""
        self._setting = setting
        self._limit = limit
        self._client_percent = client_percent
        self._clients_percent = clients_percent
        self._client_max = max(1, limit * client_percent // 100)
        self._clients_max = max(1, limit * clients_percent // 100)
        self._admins_max = limit - (limit - self._clients_max) // 2
        self._retry_after_seconds = retry_after_seconds
        self._by_client: dict[tuple[bytes, str], int] = {}

    @property
    def most_used(self) -> int:
        """How much the client uses that uses the most."""
        return max(tuple(self._by_client.values()), default=0)

    def reached(self, caller: CallerIdentity, amount: int = 1) -> str:
        """Which limit is in the way of so much more; empty if none is."""
        total = self.used + amount
        if caller.client is not None:
            if self._by_client.get(caller.client, 0) + amount > self._client_max:
                return "client"
            if self.used_by_clients + amount > self._clients_max:
                return "clients"
        elif caller.role == Role.ADMIN and total > self._admins_max:
            return "all"
        return "all" if total > self._limit else ""

    def take(self, caller: CallerIdentity, amount: int = 1) -> None:
        """Counts so much more for the caller, until it is given back. Raises `Overloaded`."""
        if limit := self.reached(caller, amount):
            self.refused[limit] += 1
            raise Overloaded(self._explained(limit), retry_after_seconds=self._retry_after_seconds)
        self.used += amount
        client = caller.client
        if client is not None and amount:
            self.used_by_clients += amount
            self._by_client[client] = self._by_client.get(client, 0) + amount

    def give_back(self, caller: CallerIdentity, amount: int = 1) -> None:
        self.used -= amount
        client = caller.client
        if client is not None and amount:
            self.used_by_clients -= amount
            left = self._by_client[client] - amount
            if left:
                self._by_client[client] = left
            else:
                del self._by_client[client]

    def _explained(self, limit: str) -> str:
        whole = f"{self._setting}, {self._limit}"
        if limit == "client":
            return (
                f"this client may have {self._client_max} {self.what} here at once: "
                f"{self._client_percent}% (client_quota_percent) of {whole}; programs with the "
                "same token at the same address count as one client"
            )
        if limit == "clients":
            return (
                f"all clients together may have {self._clients_max} {self.what} here at once: "
                f"{self._clients_percent}% (clients_quota_percent) of {whole}; the rest is for "
                "administrators and servers"
            )
        return f"{self.used} {self.what} are in use here, and the limit is {whole}"


class Quotas(Collector):
    """All quotas of one process, and their metrics."""

    def __init__(
        self,
        client_percent: int = CLIENT_QUOTA_PERCENT,
        clients_percent: int = CLIENTS_QUOTA_PERCENT,
    ) -> None:
        self._client_percent = client_percent
        self._clients_percent = clients_percent
        self._all: list[Quota] = []

    def of(self, what: str, setting: str, limit: int, *, retry_after_seconds: float = 1.0) -> Quota:
        """The quota of one more limit."""
        quota = Quota(
            what,
            setting,
            limit,
            client_percent=self._client_percent,
            clients_percent=self._clients_percent,
            retry_after_seconds=retry_after_seconds,
        )
        self._all.append(quota)
        return quota

    def collect(self) -> Iterator[Metric]:
        used = GaugeMetricFamily(
            "percolator_quota_used",
            "What callers use: all of them, all clients, or the client that uses the most.",
            labels=["what", "by"],
        )
        refused = CounterMetricFamily(
            "percolator_quota_refused",
            "Calls refused, by the limit that was reached: that of one client, of all clients, or "
            "of all callers.",
            labels=["what", "limit"],
        )
        for one in self._all:
            used.add_metric([one.what, "all"], one.used)
            used.add_metric([one.what, "clients"], one.used_by_clients)
            used.add_metric([one.what, "client"], one.most_used)
            for limit, count in one.refused.items():
                refused.add_metric([one.what, limit], count)
        yield from (used, refused)
