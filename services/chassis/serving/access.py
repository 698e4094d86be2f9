"""Who is calling, and whether they may: decided once per call, before the call is decoded.

If there is a token, the token decides. Without one, the certificate that the servers of a cluster
share makes the caller one of them. It does not if a gateway forwarded the call for another caller,
as `percolator-server` in its metadata shows: otherwise all callers of a gateway would be
servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import grpc

from percolator.errors import PermissionDenied, Unauthenticated
from percolator.services.chassis.serving.quotas import CallerIdentity, machine_of
from percolator.services.chassis.serving.tokens import Tokens
from percolator.wire.channels import FORWARDED_METADATA, SERVER_METADATA
from percolator.wire.credentials import AUTHORIZATION, SCHEME
from percolator.wire.roles import NO_ROLE, REQUIRED, Role
from percolator.wire.tls import CLUSTER_NAME
from percolator.wire.tokens import token_hash

_CLUSTER = CLUSTER_NAME.encode()

Check = Callable[[grpc.aio.ServicerContext], CallerIdentity]
"""Identifies the caller. Raises `Unauthenticated` or `PermissionDenied`."""


def by_address(context: grpc.aio.ServicerContext) -> CallerIdentity:
    """The check without TLS: callers have no names, and may do everything that an operator may. So
    each is limited as a client."""
    return CallerIdentity(Role.ADMIN, (b"", machine_of(context.peer())))


class Access:
    """What the callers of a server with TLS may do; `tokens` is None if none are required."""

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
            elif key == FORWARDED_METADATA and _CLUSTER in (names() or ()):
                machine = _machine_before_gateway(value)
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
        if not forwarded and _CLUSTER in (names() or ()):
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


def _machine_before_gateway(value: str | bytes) -> str:
    """The machine whose call a gateway forwards; empty if the gateway does not name it."""
    # Earlier gateways send a 1.
    return "" if value == "1" or isinstance(value, bytes) else value
