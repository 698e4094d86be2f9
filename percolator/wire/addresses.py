"""Addresses of the form host:port: one reading of them for settings, sockets and announcements."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from percolator.errors import InvalidArgument

_HOST_NAME = re.compile(r"^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?$")
_PORT = re.compile(r"^[0-9]{1,5}$")


@dataclass(frozen=True)
class HostPort:
    """A host (name, IPv4 or IPv6 address without brackets) and a port; port 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def is_wildcard(self) -> bool:
        """Whether it means every interface: good to listen on, useless to dial."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def with_port(self, port: int) -> HostPort:
        return HostPort(self.host, port)

    def dialable(self) -> HostPort:
        """What others can dial: every interface is named by this machine's host name."""
        return HostPort(socket.gethostname(), self.port) if self.is_wildcard() else self


def parse_host_port(text: str, field: str) -> HostPort:
    """Reads "host:port" or "[IPv6]:port"; `InvalidArgument` names `field`."""
    if not text:
        raise InvalidArgument(field, "is empty; expected host:port")
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise InvalidArgument(field, f"expected host:port, found {text!r}")
    if host.startswith("[") and host.endswith("]"):
        host = _ipv6(host[1:-1], text, field)
    elif ":" in host:
        raise InvalidArgument(field, f"an IPv6 address stands in brackets, found {text!r}")
    elif not _HOST_NAME.match(host):
        raise InvalidArgument(field, f"{host!r} is not a host name or address, in {text!r}")
    if not _PORT.match(port) or int(port) > 65_535:
        raise InvalidArgument(field, f"expected a port from 0 to 65535, found {text!r}")
    return HostPort(host, int(port))


def _ipv6(host: str, text: str, field: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError as error:
        raise InvalidArgument(field, f"{error}, in {text!r}") from None
