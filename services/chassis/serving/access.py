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
from percolator.wire.channels import SERVER_METADATA
from percolator.wire.credentials import AUTHORIZATION, SCHEME
from percolator.wire.roles import NO_ROLE, REQUIRED, Role
from percolator.wire.tls import CLUSTER_NAME
from services.chassis.serving.tokens import Tokens

_CLUSTER = CLUSTER_NAME.encode()

Check = Callable[[grpc.aio.ServicerContext], Role]
"""Returns the caller's role. Raises `Unauthenticated` or `PermissionDenied`."""


class Access:
    """What the callers of a server with TLS may do; `tokens` is None if none are required."""

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens

    def check_of(self, path: str) -> Check:
        """The check of one remote procedure."""
        required = REQUIRED.get(path)

        def check(context: grpc.aio.ServicerContext) -> Role:
            metadata, names = context.invocation_metadata(), context.peer_identities
            return self.require(path, required, metadata, names)

        return check

    def require(
        self,
        path: str,
        required: Role | None,
        metadata: Iterable[tuple[str, str | bytes]] | None,
        names: Callable[[], Iterable[bytes] | None],
    ) -> Role:
        """The caller's role. `names` returns the names in the caller's certificate."""
        role = self._role(path, metadata, names)
        if required is None or role < required:
            needed = NO_ROLE if required is None else f"it needs {required.name}"
            raise PermissionDenied(f"the caller has the role {role.name}, but {needed}", where=path)
        return role

    def _role(
        self,
        path: str,
        metadata: Iterable[tuple[str, str | bytes]] | None,
        names: Callable[[], Iterable[bytes] | None],
    ) -> Role:
        forwarded = False
        for key, value in metadata or ():
            if key == AUTHORIZATION:
                return self._role_of_token(path, value)
            forwarded = forwarded or key == SERVER_METADATA
        if not forwarded and _CLUSTER in (names() or ()):
            return Role.SERVER
        if self._tokens is None:
            return Role.ADMIN
        raise Unauthenticated("the call carries no token", where=path)

    def _role_of_token(self, path: str, value: str | bytes) -> Role:
        if self._tokens is None:
            return Role.ADMIN
        if isinstance(value, str) and value.startswith(SCHEME):
            role = self._tokens.role_of(value.removeprefix(SCHEME))
            if role is not None:
                return role
        # Does not show what was sent: a mistyped secret is nearly a secret.
        raise Unauthenticated("the cluster does not know the token of the call", where=path)
