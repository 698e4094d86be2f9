"""Who calls, in frames or over gRPC, and in which role: by token, certificate and address."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Callable, Iterable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import grpc
import structlog

from percolator.errors import (
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
)
from percolator.services.chassis.coordinator import Trouble
from percolator.wire.channels import FORWARDED_METADATA, SERVER_METADATA
from percolator.wire.credentials import AUTHORIZATION, SCHEME
from percolator.wire.renewal import FileState, file_state
from percolator.wire.roles import NO_ROLE, REQUIRED, Role
from percolator.wire.tls import CLUSTER_NAME
from percolator.wire.tokens import NAME, ROLES, token_hash
from percolator.world import Clock

_HASH = re.compile("[0-9a-f]{64}")

_LOOK_SECONDS = 2.0

_SHOWN_CHARACTERS_MAX = 20

_BEGINNING_CHARACTERS = 6
"""A token has 43 characters: the others cannot be guessed."""

_FIELD = "tokens"

_log = structlog.get_logger("percolator.tokens")


class Tokens:
    """The tokens that a cluster accepts: a TOML file of their hashes, so that reading it reveals
    none.

        [shop]                      # the owner, for people
        role = "client"             # or "admin"
        sha256 = "9f86d081884c..."  # of the token

    The file is read again when it changes: removing an entry shuts its owner out within seconds.
    While it is not valid, its last valid content counts.
    """

    def __init__(self, path: Path) -> None:
        """`InvalidArgument` names what is wrong with the file."""
        self._path = path
        self._seen: FileState | None = _state_of(path)
        self._roles = _read(path)

    def role_of(self, digest: bytes) -> Role | None:
        """The role of the token with this hash; None if it is unknown."""
        return self._roles.get(digest)

    async def follow(self, clock: Clock) -> None:
        """Follows the file until cancelled: a valid change takes effect within seconds; an invalid
        one never does."""
        trouble = Trouble(
            _log, "the tokens cannot be read; the former ones remain in force", level=logging.ERROR
        )
        while True:
            await clock.sleep(_LOOK_SECONDS)
            # None if it is gone: when it is back, it is read, whether it has changed or not.
            before, self._seen = self._seen, None
            try:
                self._seen = _state_of(self._path)
                if self._seen == before:
                    continue
                trouble.is_over()  # whoever has changed the file learns what is wrong with it now
                self._roles = _read(self._path)
            except InvalidArgument as error:
                trouble.lasts(error)
            else:
                _log.info("tokens read again", tokens=len(self._roles))


def _state_of(path: Path) -> FileState:
    try:
        return file_state(path)
    except OSError as error:
        raise InvalidArgument(_FIELD, f"{path}: {error.strerror}") from None


def _read(path: Path) -> dict[bytes, Role]:
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(_FIELD, f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        # Leave out the reason, which may show a part of the file.
        raise InvalidArgument(_FIELD, f"{path}: not TOML") from None
    roles: dict[bytes, Role] = {}
    for name, entry in entries.items():
        where = f"{path}: [{_shown(name)}]" if NAME.fullmatch(name) else f"{path}: a name"
        if not NAME.fullmatch(name):
            raise InvalidArgument(_FIELD, f"{where}: expected letters, digits, - and _")
        if not isinstance(entry, dict) or entry.keys() != {"role", "sha256"}:
            raise InvalidArgument(_FIELD, f"{where}: expected role and sha256, and nothing else")
        if entry["role"] not in ROLES:
            raise InvalidArgument(_FIELD, f"{where}: role: expected client or admin")
        # Never show the value: it may be the token itself, put there by mistake.
        if not isinstance(entry["sha256"], str) or not _HASH.fullmatch(entry["sha256"]):
            raise InvalidArgument(_FIELD, f"{where}: sha256: expected 64 hexadecimal digits")
        digest = bytes.fromhex(entry["sha256"])
        if digest in roles:
            raise InvalidArgument(_FIELD, f"{where}: sha256: another token has the same")
        roles[digest] = ROLES[entry["role"]]
    return roles


def _shown(name: str) -> str:
    """The name, or its beginning: a long one may be the token itself, put there by mistake."""
    return name if len(name) <= _SHOWN_CHARACTERS_MAX else f"{name[:_BEGINNING_CHARACTERS]}..."


LOCAL = "localhost"
_IPV6_NETWORK_BITS = 64
_PEERS_REMEMBERED = 16_384


class CallerIdentity(NamedTuple):
    """The caller, as far as it decides what it may do, and how much at once."""

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


CLUSTER_IDENTITY = CLUSTER_NAME.encode()
"""The name in the certificate that all servers of a cluster have."""

Check = Callable[[grpc.aio.ServicerContext], CallerIdentity]
"""Identifies the caller. Raises `Unauthenticated` or `PermissionDenied`."""


class Access:
    """Decides who is calling a server with TLS, and whether they may, before the call is decoded.

    `tokens` is None if none are required.

    If there is a token, the token decides. Without one, the certificate that the servers of a
    cluster share makes the caller one of them. It does not if a gateway forwarded the call for
    another caller, as `percolator-server` in its metadata shows: otherwise all callers of a gateway
    would be servers.
    """

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens

    def check_of(self, path: str) -> Check:
        """The check of one remote procedure."""
        required = REQUIRED.get(path)

        def check(context: grpc.aio.ServicerContext) -> CallerIdentity:
            metadata, names = context.invocation_metadata(), context.peer_identities
            return self.require(path, required, metadata, names, context.peer)

        return check

    def require(
        self,
        path: str,
        required: Role | None,
        metadata: Iterable[tuple[str, str | bytes]] | None,
        names: Callable[[], Iterable[bytes] | None],
        peer: Callable[[], str],
    ) -> CallerIdentity:
        """`names` returns the names in the caller's certificate, `peer` its address."""
        token: str | bytes | None = None
        forwarded = False
        machine = ""
        for key, value in metadata or ():
            if key == AUTHORIZATION and token is None:
                token = value
            elif key == SERVER_METADATA:
                forwarded = True
            elif key == FORWARDED_METADATA and CLUSTER_IDENTITY in (names() or ()):
                # The machine whose call a gateway forwards, if the gateway names it.
                machine = "" if isinstance(value, bytes) else value
        role, digest = self._role(path, token, forwarded, names)
        if required is None or role < required:
            needed = NO_ROLE if required is None else f"it needs {required.name}"
            raise PermissionDenied(f"the caller has the role {role.name}, but {needed}", where=path)
        if role == Role.SERVER or (role == Role.ADMIN and self._tokens is not None):
            return CallerIdentity(role)
        return CallerIdentity(role, (digest, machine or machine_of(peer())))

    def _role(
        self,
        path: str,
        token: str | bytes | None,
        forwarded: bool,
        names: Callable[[], Iterable[bytes] | None],
    ) -> tuple[Role, bytes]:
        """With the hash of the token that proves it, if there is one."""
        if token is not None:
            return self._role_of_token(path, token)
        if not forwarded and CLUSTER_IDENTITY in (names() or ()):
            return Role.SERVER, b""
        if self._tokens is None:
            return Role.ADMIN, b""
        raise Unauthenticated("the call carries no token", where=path)

    def _role_of_token(self, path: str, value: str | bytes) -> tuple[Role, bytes]:
        if self._tokens is None:
            return Role.ADMIN, b""
        if isinstance(value, str) and value.startswith(SCHEME):
            digest = token_hash(value.removeprefix(SCHEME))
            role = self._tokens.role_of(digest)
            if role is not None:
                return role, digest
        # Does not show what was sent: a mistyped secret is nearly a secret.
        raise Unauthenticated("the cluster does not know the token of the call", where=path)
