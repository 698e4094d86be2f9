"""Addresses of the form host:port: one parser for settings, sockets and announcements."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from percolator.errors import InvalidArgument

_LABEL = "[A-Za-z0-9_-]{1,63}"
_HOST_NAME = re.compile(rf"(?=[A-Za-z0-9_]){_LABEL}(\.{_LABEL})*(?<=[A-Za-z0-9_])\.?")
"""Without empty or overlong labels: the system's resolver does not refuse these, it crashes."""
_HOST_NAME_CHARACTERS_MAX = 253
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True)
class HostPort:
    """A host (name, IPv4, or IPv6 address without brackets) and a port; port 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_loopback(self) -> bool:
        """True if only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def is_wildcard(self) -> bool:
        """True if the host means every interface: good to listen on, useless to dial."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def with_port(self, port: int) -> HostPort:
        return HostPort(self.host, port)

    def dialable(self) -> HostPort:
        """An address that others can dial: this machine's host name replaces a wildcard."""
        return HostPort(socket.gethostname(), self.port) if self.is_wildcard() else self


def parse_host_port(text: str, field: str) -> HostPort:
    """Parses "host:port" or "[IPv6]:port"; `InvalidArgument` names `field`."""
    if not text:
        raise InvalidArgument(field, "is empty; expected host:port")
    if "://" in text:
        raise InvalidArgument(
            field, f"expected host:port without a scheme, as in localhost:7100, found {text!r}"
        )
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise InvalidArgument(field, f"expected host:port, found {text!r}")
    if host.startswith("[") and host.endswith("]"):
        host = _ipv6(host[1:-1], text, field)
    elif ":" in host:
        raise InvalidArgument(field, f"an IPv6 address must be in brackets, found {text!r}")
    elif len(host) > _HOST_NAME_CHARACTERS_MAX or not _HOST_NAME.fullmatch(host):
        raise InvalidArgument(field, f"{host!r} is not a host name or address, in {text!r}")
    if not _PORT.fullmatch(port) or int(port) > 65_535:
        raise InvalidArgument(field, f"expected a port from 0 to 65535, found {text!r}")
    return HostPort(host, int(port))


def refuse_lone_address(addresses: Sequence[str]) -> None:
    """Refuses a string: it is a sequence of strings too, and each character would be dialled."""
    if isinstance(addresses, str):
        raise InvalidArgument("addresses", f"expected a list of host:port, found {addresses!r}")


def _ipv6(host: str, text: str, field: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError as error:
        raise InvalidArgument(field, f"{error}, in {text!r}") from None
