"""How this process proves its identity: by a certificate and, for clients, a bearer token.

A token is a secret. It is read from a file or given by a program, never taken from a command line,
where every user of the machine can read it, and it appears in no error and no log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from percolator.errors import InvalidArgument
from percolator.wire import tls
from percolator.wire.renewal import Renewal
from percolator.wire.tls import Tls, TlsMaterial

TLS_VARIABLES = {
    "ca": "PERCOLATOR_TLS_CA",
    "certificate": "PERCOLATOR_TLS_CERTIFICATE",
    "key": "PERCOLATOR_TLS_KEY",
}
TOKEN_VARIABLE = "PERCOLATOR_TOKEN_FILE"  # noqa: S105 (the name of a variable)

AUTHORIZATION = "authorization"
SCHEME = "Bearer "
"""The metadata of a call with a token: `authorization: Bearer TOKEN`."""

TOKEN_CHARACTERS_MAX = 1024
_TOKEN = re.compile(rf"[!-~]{{1,{TOKEN_CHARACTERS_MAX}}}")


@dataclass(frozen=True)
class Credentials:
    """A certificate and perhaps a token; by default neither: plain text, without authentication."""

    tls: TlsMaterial | None = None
    token: str = field(default="", repr=False)
    renewal: Renewal[Credentials] | None = field(default=None, repr=False, compare=False)
    """Reads them again when their files change; None if they never change."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """The metadata that every call carries."""
        return ((AUTHORIZATION, SCHEME + self.token),) if self.token else None


PLAIN_TEXT = Credentials()


def client_credentials(
    tls_files: Tls | None = None,
    token: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Credentials:
    """The credentials from the arguments, or else from the files that PERCOLATOR_TLS_CA,
    ..._CERTIFICATE, ..._KEY and PERCOLATOR_TOKEN_FILE name.

    `InvalidArgument` names the argument or the variable, and the file.
    """
    if tls_files is not None and not isinstance(tls_files, Tls):
        raise InvalidArgument("tls", f"expected a Tls, got {type(tls_files).__name__}")
    if token is not None and not isinstance(token, str):
        raise InvalidArgument("token", f"expected a str, got {type(token).__name__}")
    environment = os.environ if environment is None else environment
    files = _files_of(environment) if tls_files is None else tls_files

    def read() -> Credentials:
        return _read(tls_files, token, environment)

    if files is None:
        return read()
    paths = [files.ca, files.certificate, files.key, environment.get(TOKEN_VARIABLE, "")]
    renewal = Renewal(read, [path for path in paths if path])
    return replace(renewal.current(), renewal=renewal)


def _read(tls_files: Tls | None, token: str | None, environment: Mapping[str, str]) -> Credentials:
    names = "tls.{}".format if tls_files is not None else TLS_VARIABLES.__getitem__
    files = _files_of(environment) if tls_files is None else tls_files
    token_name = "token"  # noqa: S105
    if token is None:
        token, token_name = _token_of(environment), TOKEN_VARIABLE
    elif not _TOKEN.fullmatch(token):
        raise InvalidArgument(token_name, "expected visible ASCII characters, without spaces")
    if token and files is None:
        raise InvalidArgument(token_name, "needs TLS: it would travel in plain text")
    material = tls.load(files, names, serves=False) if files is not None else None
    return Credentials(material, token)


def _files_of(environment: Mapping[str, str]) -> Tls | None:
    found = {part: environment.get(name, "") for part, name in TLS_VARIABLES.items()}
    if not any(found.values()):
        return None
    given = next(TLS_VARIABLES[part] for part, value in found.items() if value)
    for part, value in found.items():
        if not value:
            raise InvalidArgument(TLS_VARIABLES[part], f"is not set, although {given} is")
    return Tls(**found)


def _token_of(environment: Mapping[str, str]) -> str:
    path = environment.get(TOKEN_VARIABLE, "")
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise InvalidArgument(TOKEN_VARIABLE, f"{path}: {error.strerror}") from None
    except ValueError:
        token = ""
    if not _TOKEN.fullmatch(token):
        raise InvalidArgument(
            TOKEN_VARIABLE, f"{path}: holds no token; expected one line of visible ASCII characters"
        )
    return token
