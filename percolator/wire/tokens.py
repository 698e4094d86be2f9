"""How a token is made, and the servers' token file: what each token grants, never the token itself.

[shop]                            # the owner, for people and the audit file
role = "client"                   # or "admin"
sha256 = "9f86d081884c..."        # of the token
expires = 2027-01-31T00:00:00Z    # optional
former_sha256 = "60303ae22b..."   # after a rotation: the token before,
former_expires = 2026-12-24T12:00:00Z    # and when it ends
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from percolator.codecs.readable import row_bytes, row_text
from percolator.codecs.values import after_prefix
from percolator.errors import InvalidArgument
from percolator.wire.roles import Role

ROLES = {"client": Role.CLIENT, "admin": Role.ADMIN}
"""The roles that a token can grant."""

NAME = re.compile("[A-Za-z0-9_-]{1,64}")
_HASH = re.compile("[0-9a-f]{64}")
_TWICE = re.compile(r"Cannot declare \('([A-Za-z0-9_-]+)',\) twice")
_TOKEN_BYTES = 32
_SHOWN_CHARACTERS_MAX = 20
_BEGINNING_CHARACTERS = 6
"""A token has 43 characters: the others cannot be guessed."""


def new_token() -> str:
    """A new secret: 256 random bits, which are unique and cannot be guessed."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def token_hash(token: str) -> bytes:
    """The hash that servers store. A plain hash is enough for what cannot be guessed, and costs
    each call about a microsecond."""
    return hashlib.sha256(token.encode()).digest()


def require_name(name: str) -> None:
    """Refuses a name that no entry can have."""
    if not NAME.fullmatch(name):
        raise InvalidArgument("name", "expected 1 to 64 letters, digits, - and _")


@dataclass(frozen=True, slots=True)
class Right:
    """The right to rows of a table: those that begin with the prefix."""

    table: str
    prefix: bytes = b""

    @classmethod
    def parse(cls, text: str, field: str = "right") -> Right:
        """Reads "TABLE", "TABLE:PREFIX" or "TABLE:hex:00ff". Raises `InvalidArgument`."""
        table, colon, shown = text.partition(":")
        prefix = row_bytes(field, shown)
        # An empty prefix, perhaps of a variable that is not set, would mean all rows.
        if not table or (colon and not prefix) or not text.isprintable():
            raise InvalidArgument(field, f"expected TABLE or TABLE:PREFIX, found {text[:100]!r}")
        return cls(table, prefix)

    def __str__(self) -> str:
        return f"{self.table}:{row_text(self.prefix)}" if self.prefix else self.table

    def covers(self, table: str, start: bytes, end: bytes) -> bool:
        """True if all rows from `start` to below `end`, if it is not empty, belong to it."""
        if table != self.table:
            return False
        last = after_prefix(self.prefix)
        return start >= self.prefix and (not last or (end != b"" and end <= last))


class Rights(NamedTuple):
    """Rights of a token that is restricted to some tables."""

    read: tuple[Right, ...] = ()
    write: tuple[Right, ...] = ()
    administer: tuple[Right, ...] = ()
    """Whole tables, which it may create, change and delete."""

    def may_read(self, table: str, start: bytes, end: bytes) -> bool:
        """True if it may read these rows; with two empty bounds, the whole table."""
        return any(right.covers(table, start, end) for right in self.read)

    def may_write(self, table: str, row: bytes) -> bool:
        return any(right.covers(table, row, row + b"\0") for right in self.write)

    def may_write_all(self, table: str) -> bool:
        return any(right.covers(table, b"", b"") for right in self.write)

    def may_write_some(self, table: str) -> bool:
        return any(right.table == table for right in self.write)

    def may_administer(self, table: str) -> bool:
        return any(right.table == table for right in self.administer)

    def may_know(self, table: str) -> bool:
        """True if it has any right to the table: then it may know what is in its schema."""
        return any(right.table == table for rights in self for right in rights)

    def texts(self) -> dict[str, list[str]]:
        """As in the file."""
        return {key: [str(one) for one in rights] for key, rights in self._asdict().items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of one name."""

    name: str
    role: Role
    digest: bytes
    expires: datetime | None = None
    former_digest: bytes = b""
    """The token that `digest` has replaced; empty if there is none."""
    former_expires: datetime | None = None
    rights: Rights | None = None
    """None if it may do what its role may, in all tables."""

    def text(self) -> str:
        """Its section of the file."""
        role = next(text for text, role in ROLES.items() if role is self.role)
        lines = [f"[{self.name}]", f'role = "{role}"', f'sha256 = "{self.digest.hex()}"']
        if self.expires is not None:
            lines.append(f"expires = {time_text(self.expires)}")
        if self.former_expires is not None:
            lines.append(f'former_sha256 = "{self.former_digest.hex()}"')
            lines.append(f"former_expires = {time_text(self.former_expires)}")
        if self.rights is not None:
            # A list of JSON is one of TOML.
            lines += [f"{key} = {json.dumps(one)}" for key, one in self.rights.texts().items()]
        return "\n".join(lines) + "\n"


def token_entry(name: str, role: Role, token: str, expires: datetime | None = None) -> str:
    """The section of a new token."""
    require_name(name)
    return Entry(name, role, token_hash(token), expires).text()


def time_text(time: datetime) -> str:
    """In UTC, to the second."""
    return f"{time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='seconds')}Z"


def parse(text: str, where: str, field: str = "tokens") -> dict[str, Entry]:
    """The entries of a token file, by name. `InvalidArgument` says which entry of `where` is
    wrong, and how."""
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        twice = _TWICE.match(str(error))
        # Leave out any other reason, which may show a part of the file.
        reason = f"[{_shown(twice[1])}] appears twice" if twice else "not TOML"
        raise InvalidArgument(field, f"{where}: {reason}") from None
    entries: dict[str, Entry] = {}
    digests: set[bytes] = set()
    for name, content in found.items():
        if not NAME.fullmatch(name):
            raise InvalidArgument(field, f"{where}: a name: expected letters, digits, - and _")
        try:
            entries[name] = _entry(name, content, digests)
        except _Wrong as wrong:
            raise InvalidArgument(field, f"{where}: [{_shown(name)}]: {wrong}") from None
    return entries


class _Wrong(Exception):
    """Error in an entry. Never shows a value: it may be the token itself, put there by
    mistake."""


_KEYS = {"role", "sha256"}
_OPTIONAL_KEYS = {"expires", "former_sha256", "former_expires", *Rights._fields}


def _entry(name: str, content: object, digests: set[bytes]) -> Entry:
    """`digests`: of all tokens before, to which it adds its own."""
    if not isinstance(content, dict) or not content.keys() >= _KEYS:
        raise _Wrong("expected role and sha256")
    if content.keys() - _KEYS - _OPTIONAL_KEYS:
        raise _Wrong(f"expected role, sha256, {', '.join(sorted(_OPTIONAL_KEYS))}, nothing else")
    role = content["role"]
    if not isinstance(role, str) or role not in ROLES:
        raise _Wrong("role: expected client or admin")
    if ("former_sha256" in content) != ("former_expires" in content):
        raise _Wrong("expected both former_sha256 and former_expires, or neither")
    return Entry(
        name,
        ROLES[role],
        _digest(content, "sha256", digests),
        _time(content, "expires"),
        _digest(content, "former_sha256", digests) if "former_sha256" in content else b"",
        _time(content, "former_expires"),
        _rights(content),
    )


def _rights(content: Mapping[str, object]) -> Rights | None:
    if content.keys().isdisjoint(Rights._fields):
        return None
    if content["role"] != "client":
        raise _Wrong("rights to tables restrict clients only; administrators may do everything")
    rights = Rights(*(_right(content, key) for key in Rights._fields))
    if any(right.prefix for right in rights.administer):
        raise _Wrong("administer: expected whole tables, without a prefix")
    return rights


def _right(content: Mapping[str, object], key: str) -> tuple[Right, ...]:
    value = content.get(key, [])
    try:
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return tuple(map(Right.parse, value))
    except InvalidArgument:
        pass
    raise _Wrong(f'{key}: expected a list of TABLE or TABLE:PREFIX: ["orders", "stock:eu/"]')


def _digest(content: Mapping[str, object], key: str, others: set[bytes]) -> bytes:
    value = content[key]
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise _Wrong(f"{key}: expected 64 hexadecimal digits")
    digest = bytes.fromhex(value)
    if digest in others:
        raise _Wrong("sha256: another token has the same")
    others.add(digest)
    return digest


def _time(content: Mapping[str, object], key: str) -> datetime | None:
    value = content.get(key)
    if value is None:
        return None
    # Without a zone it would end at another time on another machine.
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise _Wrong(f"{key}: expected a time with its zone: 2027-01-31T00:00:00Z, without quotes")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise _Wrong(f"{key}: in UTC, it is before year 1 or after year 9999") from None


def _shown(name: str) -> str:
    """The name, or its beginning: a long one may be the token itself, put there by mistake."""
    return name if len(name) <= _SHOWN_CHARACTERS_MAX else f"{name[:_BEGINNING_CHARACTERS]}..."


def with_entry(text: str, entry: Entry) -> str:
    """A token file with one more section; comments and other sections stay as they are."""
    return f"{text.rstrip()}\n\n{entry.text()}".lstrip("\n")


def without_entry(text: str, name: str, where: str, field: str = "tokens") -> str:
    """A token file without a section that it has."""
    expected = parse(text, where, field)
    del expected[name]
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            inside = line.strip().partition("#")[0].strip() in (f"[{name}]", f'["{name}"]')
        if not inside:
            kept.append(line)
    # Written in another way (`shop = { role = ... }`), it is better edited by the one who wrote it.
    edited = "".join(kept)
    if parse(edited, where, field) != expected:
        raise InvalidArgument(field, f"{where}: [{name}] is no section of its own; edit the file")
    return edited
