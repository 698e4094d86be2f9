"""Who calls, in frames or over gRPC, and in which role: by token, certificate and address."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime
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
from percolator.services.chassis.audit import Audit
from percolator.services.chassis.coordinator import Trouble
from percolator.wire.channels import FORWARDED_METADATA, SERVER_METADATA
from percolator.wire.credentials import AUTHORIZATION, SCHEME
from percolator.wire.renewal import FileState, file_state
from percolator.wire.roles import ADMINISTERS_TABLE, CHECKS_RIGHTS, NO_ROLE, REQUIRED, Role
from percolator.wire.status import status_code
from percolator.wire.tls import CLUSTER_NAME
from percolator.wire.tokens import Rights, parse, time_text, token_hash
from percolator.world import Clock

_LOOK_SECONDS = 2.0

_FIELD = "tokens"

_log = structlog.get_logger("percolator.tokens")


class Grant(NamedTuple):
    """Role and rights that one token grants."""

    name: str
    role: Role
    expires: datetime | None = None
    """None if it does not expire."""
    rights: Rights | None = None
    """None if the role is not restricted to some tables."""


_CLUSTER = Grant("", Role.SERVER)
_ANYBODY = Grant("", Role.ADMIN)


class Tokens:
    """The tokens that a cluster accepts, by hash, from a file (percolator/wire/tokens.py).

    The file is read again when it changes: removing an entry shuts its owner out within seconds.
    While it is not valid, its last valid content counts.
    """

    def __init__(self, path: Path) -> None:
        """`InvalidArgument` names what is wrong with the file."""
        self._path = path
        self._seen: FileState | None = _state_of(path)
        self._grants = _read(path)

    def grant_of(self, digest: bytes) -> Grant | None:
        """Grant of the token with this hash; None if it is unknown."""
        return self._grants.get(digest)

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
                self._grants = _read(self._path)
            except InvalidArgument as error:
                trouble.lasts(error)
            else:
                _log.info("tokens read again", tokens=len(self._grants))


def _state_of(path: Path) -> FileState:
    try:
        return file_state(path)
    except OSError as error:
        raise InvalidArgument(_FIELD, f"{path}: {error.strerror}") from None


def _read(path: Path) -> dict[bytes, Grant]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(_FIELD, f"{path}: {error.strerror}") from None
    except ValueError:
        raise InvalidArgument(_FIELD, f"{path}: not TOML") from None
    grants: dict[bytes, Grant] = {}
    for entry in parse(text, str(path), _FIELD).values():
        grants[entry.digest] = Grant(entry.name, entry.role, entry.expires, entry.rights)
        if entry.former_digest:
            ends = (time for time in (entry.expires, entry.former_expires) if time is not None)
            grants[entry.former_digest] = Grant(entry.name, entry.role, min(ends), entry.rights)
    return grants


LOCAL = "localhost"
_IPV6_NETWORK_BITS = 64
_PEERS_REMEMBERED = 16_384


class CallerIdentity(NamedTuple):
    """The caller, as far as it decides what it may do, and how much at once."""

    role: Role
    client: tuple[bytes, str] | None = None
    """The hash of the token, if there is one, and the machine. None for administrators and servers,
    which are not limited as clients."""
    name: str = ""
    """The name of its token, if there is one."""
    machine: str = ""
    """The machine of clients and administrators."""
    rights: Rights | None = None
    """None if its role is not restricted to some tables."""

    def require_read(self, table: str, start: bytes = b"", end: bytes = b"") -> None:
        """Raises `PermissionDenied` unless it may read all rows of this range."""
        if self.rights is not None and not self.rights.may_read(table, start, end):
            raise self._denied("read", table)

    def require_write(self, table: str, row: bytes) -> None:
        """Raises `PermissionDenied` unless it may write this row."""
        if self.rights is not None and not self.rights.may_write(table, row):
            raise self._denied("write", table)

    def require_writer(self, table: str) -> None:
        """Raises `PermissionDenied` unless it may write some rows of this table."""
        if self.rights is not None and not self.rights.may_write_some(table):
            raise self._denied("write", table)

    def require_administer(self, table: str) -> None:
        """Raises `PermissionDenied` unless it may change this table."""
        if self.rights is not None and not self.rights.may_administer(table):
            raise self._denied("administer", table)

    def require_known(self, table: str, shown: str = "") -> None:
        """Raises `PermissionDenied` unless it has some right to this table, which the error names
        as it was `shown` by the caller."""
        if self.rights is not None and not self.rights.may_know(table):
            raise PermissionDenied(
                f"the token {self.name!r} has no right to table {shown or repr(table)}"
            )

    def _denied(self, what: str, table: str) -> PermissionDenied:
        # No row: it would be in the audit file.
        rows = "" if what == "administer" else "these rows of "
        return PermissionDenied(f"the token {self.name!r} may not {what} {rows}table {table!r}")


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


def by_address(context: grpc.aio.ServicerContext) -> CallerIdentity:
    """The check without TLS: callers have no names, and may do everything that an operator may. So
    each is limited as a client."""
    machine = machine_of(context.peer())
    return CallerIdentity(Role.ADMIN, (b"", machine), machine=machine)


class Access:
    """Decides who is calling a server with TLS, and whether they may, before the call is decoded.

    `tokens` is None if it knows none. Then only servers may call, unless every certificate of the
    authority makes its owner an administrator.

    If there is a token, the token decides. Without one, the certificate that the servers of a
    cluster share makes the caller one of them. It does not if a gateway forwarded the call for
    another caller, as `percolator-server` in its metadata shows: otherwise all callers of a gateway
    would be servers.
    """

    def __init__(
        self,
        tokens: Tokens | None,
        clock: Clock,
        *,
        any_certificate_is_admin: bool = False,
        audit: Audit | None = None,
    ) -> None:
        self._tokens = tokens
        self._audit = audit
        self._clock = clock
        self._any_certificate_is_admin = any_certificate_is_admin

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
        grant = None
        try:
            grant, digest = self._granted(path, token, forwarded, names)
            _require_permitted(grant, required, path)
        except (Unauthenticated, PermissionDenied) as error:
            if self._audit is not None:
                name = "" if grant is None else grant.name
                whence = machine or machine_of(peer())
                self._audit.refused(name, whence, path, status_code(error).name, error.message)
            raise
        role = grant.role
        if role == Role.SERVER:
            return CallerIdentity(role)
        machine = machine or machine_of(peer())
        is_limited = role == Role.CLIENT or self._any_certificate_is_admin
        client = (digest, machine) if is_limited else None
        return CallerIdentity(role, client, grant.name, machine, grant.rights)

    def _granted(
        self,
        path: str,
        token: str | bytes | None,
        forwarded: bool,
        names: Callable[[], Iterable[bytes] | None],
    ) -> tuple[Grant, bytes]:
        """With the hash of the token, if there is one."""
        if token is not None:
            return self._granted_to_token(path, token)
        if not forwarded and CLUSTER_IDENTITY in (names() or ()):
            return _CLUSTER, b""
        if self._any_certificate_is_admin:
            return _ANYBODY, b""
        raise Unauthenticated(
            "the call carries no token, and a certificate alone gives no role", where=path
        )

    def _granted_to_token(self, path: str, value: str | bytes) -> tuple[Grant, bytes]:
        if self._any_certificate_is_admin:
            return _ANYBODY, b""
        if self._tokens is None:
            raise Unauthenticated(
                "the server knows no tokens: its setting `tokens` is empty", where=path
            )
        if isinstance(value, str) and value.startswith(SCHEME):
            digest = token_hash(value.removeprefix(SCHEME))
            grant = self._tokens.grant_of(digest)
            if grant is not None:
                if grant.expires is not None:
                    self._require_unexpired(grant, grant.expires, path)
                return grant, digest
        # Does not show what was sent: a mistyped secret is nearly a secret.
        raise Unauthenticated("the cluster does not know the token of the call", where=path)

    def _require_unexpired(self, grant: Grant, expires: datetime, path: str) -> None:
        if self._clock.wall_milliseconds() >= expires.timestamp() * 1000:
            raise Unauthenticated(
                f"the token {grant.name!r} has expired at {time_text(expires)}", where=path
            )


def _require_permitted(grant: Grant, required: Role | None, path: str) -> None:
    """Refuses calls above the role of a token, and if it has rights, those that do not check
    them."""
    if grant.rights is None:
        if required is None or grant.role < required:
            needed = NO_ROLE if required is None else f"it needs {required.name}"
            raise PermissionDenied(
                f"the caller has the role {grant.role.name}, but {needed}", where=path
            )
        return
    if path in CHECKS_RIGHTS or (path in ADMINISTERS_TABLE and grant.rights.administer):
        return
    raise PermissionDenied(
        f"the token {grant.name!r} has rights to some tables only, and this call is for tokens "
        "without such limits",
        where=path,
    )
