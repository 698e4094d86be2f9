"""How a token is made, and its entry in the servers' token file: never the token itself."""

from __future__ import annotations

import hashlib
import re
import secrets

from percolator.errors import InvalidArgument
from percolator.wire.roles import Role

ROLES = {"client": Role.CLIENT, "admin": Role.ADMIN}
"""The roles that a token can grant."""

NAME = re.compile("[A-Za-z0-9_-]{1,64}")
_TOKEN_BYTES = 32


def new_token() -> str:
    """A new secret: 256 random bits, which are unique and cannot be guessed."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def token_hash(token: str) -> bytes:
    """The hash that servers store. A plain hash is enough for what cannot be guessed, and costs
    each call about a microsecond."""
    return hashlib.sha256(token.encode()).digest()


def token_entry(name: str, role: Role, token: str) -> str:
    """The entry of a token in that file."""
    if not NAME.fullmatch(name):
        raise InvalidArgument("name", "expected 1 to 64 letters, digits, - and _")
    given = next(text for text, one in ROLES.items() if one is role)
    return f'[{name}]\nrole = "{given}"\nsha256 = "{token_hash(token).hex()}"\n'
