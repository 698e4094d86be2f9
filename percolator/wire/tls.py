"""Mutual TLS: the files of one party, read and tried out before any connection is made.

All servers of a cluster share one certificate name, which every client verifies whatever address it
dialled: a replica started on any machine needs no name of its own. Clients present a certificate of
the same authority, under any other name.

With a wrong file, all that gRPC reports is a failed handshake, later, on both sides. So the files
are tried out here: this party shakes hands with itself, in memory, and an error names the setting
and the file.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from percolator.errors import InvalidArgument

CLUSTER_NAME = "percolator.cluster"
"""The subject alternative name in the certificate of every server."""

_HANDSHAKE_STEPS_MAX = 10

FieldNames = Callable[[str], str]
"""Returns the name of the setting for "ca", "certificate" or "key", as the user knows it."""


@dataclass(frozen=True)
class Tls:
    """PEM files: the authority that both sides trust, and the certificate and key of this process.

    >>> percolator.connect("db:7100", tls=percolator.Tls("ca.pem", "certificate.pem", "key.pem"))
    """

    ca: str
    certificate: str
    """The certificate of this process, and any between it and the authority's."""
    key: str
    """The private key of that certificate, without a password."""


@dataclass(frozen=True)
class TlsMaterial:
    """The content of the files, in the form that gRPC takes, and in that of Python's own TLS."""

    files: Tls
    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    expires_seconds: int = 0
    """When the certificate expires, in seconds since 1970."""
    server_context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    """For a server that does not speak gRPC, with the same content of the files."""
    client_context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    """Likewise for a client; it accepts only servers that show `CLUSTER_NAME`."""


def load(files: Tls, name: FieldNames, *, serves: bool) -> TlsMaterial:
    """Reads and tries the files; `serves` if others dial this process as a part of the cluster.

    `InvalidArgument` names the setting and the file, and never shows the file's content.
    """
    ca = _read(files.ca, name("ca"))
    certificate = _read(files.certificate, name("certificate"))
    key = _read(files.key, name("key"))
    _require_certificate(ca, files.ca, name("ca"))
    _require_certificate(certificate, files.certificate, name("certificate"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.load_verify_locations(cadata=ca.decode("ascii"))
        _load_key(context, files, name("key"))
    server.verify_mode = ssl.CERT_REQUIRED
    if not serves:
        # Then only the server's half of the check concerns this certificate.
        client.check_hostname = False
        client.verify_mode = ssl.CERT_NONE
    try:
        expires = _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message.rstrip(".")
        raise InvalidArgument(
            name("certificate"), f"{files.certificate}: not accepted by {files.ca}: {reason}"
        ) from None
    except ssl.SSLError as error:
        reason = error.reason or "the handshake fails"
        raise InvalidArgument(name("certificate"), f"{files.certificate}: {reason}") from None
    client.verify_mode = ssl.CERT_REQUIRED
    client.check_hostname = True
    return TlsMaterial(files, ca, certificate, key, expires, server, client)


def _read(path: str, field_name: str) -> bytes:
    if not path:
        raise InvalidArgument(field_name, "is empty; expected the name of a PEM file")
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgument(field_name, f"{path}: {reason}") from None


def _require_certificate(content: bytes, path: str, field_name: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=content.decode("ascii")
        )
    except (ValueError, ssl.SSLError):
        raise InvalidArgument(field_name, f"{path}: holds no certificate in PEM form") from None


def _load_key(context: ssl.SSLContext, files: Tls, field_name: str) -> None:
    asked: list[bool] = []

    def no_password() -> str:
        # Without this, OpenSSL would ask for it on the terminal.
        asked.append(True)
        return ""

    try:
        context.load_cert_chain(files.certificate, files.key, no_password)
    except OSError as error:
        if asked:
            reason = "is protected by a password; expected a key without one"
        elif isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            reason = f"does not belong to the certificate in {files.certificate}"
        else:
            reason = "holds no private key in PEM form"
        raise InvalidArgument(field_name, f"{files.key}: {reason}") from None


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> int:
    """Returns when the certificate expires; `SSLError` has the reason why a side refuses it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=CLUSTER_NAME),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_HANDSHAKE_STEPS_MAX):
        # Drive both sides each time: in TLS 1.3, the client is done before the server has checked
        # its certificate.
        done = [_is_done(side) for side in sides]
        if all(done):
            shown = sides[1].getpeercert() or {}
            return ssl.cert_time_to_seconds(str(shown["notAfter"]))
    raise ssl.SSLError("the handshake did not end")


def _is_done(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
