"""The tokens that a cluster accepts: a TOML file of their hashes, so that reading it reveals none.

    [shop]                      # the owner, for people
    role = "client"             # or "admin"
    sha256 = "9f86d081884c..."  # of the token

The file is read again when it changes: removing an entry shuts its owner out within seconds.
"""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path

import structlog

from percolator.errors import InvalidArgument
from percolator.services.chassis.trouble import Trouble
from percolator.wire.renewal import FileState, file_state
from percolator.wire.roles import Role
from percolator.wire.tokens import NAME, ROLES
from percolator.world import Clock

_HASH = re.compile("[0-9a-f]{64}")
_LOOK_SECONDS = 2.0
_SHOWN_CHARACTERS_MAX = 20
_BEGINNING_CHARACTERS = 6
"""Of 43 characters of a token: the others cannot be guessed."""
_FIELD = "tokens"

_log = structlog.get_logger("percolator.tokens")


class Tokens:
    """The content of the file when it was last valid."""

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
