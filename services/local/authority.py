"""`percolator certs DIR`: an authority for development, and everything that it signs.

    DIR/authority/key.pem      signs; no running program needs it, so it is never mounted anywhere
    DIR/cluster/               for servers: ca.pem, certificate.pem, key.pem, tokens.toml
    DIR/client/                for programs: ca.pem, certificate.pem, key.pem, and a token of each
                               role: client.token, admin.token
    DIR/client.env             for shells: after `. DIR/client.env`, programs find all of these

Certificates are valid for a year. Running it again replaces all of them: from then on, anything
signed before is refused.
"""

from __future__ import annotations

import datetime
import os
import shlex
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from percolator.process import PRIVATE_DIRECTORY_MODE, private_opener
from percolator.wire.credentials import TLS_VARIABLES, TOKEN_VARIABLE
from percolator.wire.roles import Role
from percolator.wire.tls import CLUSTER_NAME, Tls
from percolator.wire.tokens import new_token, token_entry

CLIENT_NAME = "percolator.client"
_DAYS = 365
_CLOCKS_APART = datetime.timedelta(minutes=5)


def files_in(directory: Path) -> Tls:
    """The certificate files in one of the directories created here."""
    return Tls(*(str(directory / name) for name in ("ca.pem", "certificate.pem", "key.pem")))


class Authority:
    """Signs certificates with a new key."""

    def __init__(self, name: str = "percolator development authority") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = (
            _builder(self._name, self._name, self.key.public_key(), _DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            # Identify it by its key: while one authority replaces another, both have this name.
            .add_extension(self._identifier(), critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def _identifier(self) -> x509.SubjectKeyIdentifier:
        return x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())

    def issue(self, directory: Path, name: str, *, days: float = _DAYS) -> Tls:
        """Writes a certificate under this name, its key, and the authority's certificate."""
        _write(self.signed(directory, name, days=days))
        return files_in(directory)

    def signed(self, directory: Path, name: str, *, days: float = _DAYS) -> dict[Path, bytes]:
        """Contents of the files that `issue` writes."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if name == CLUSTER_NAME:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        certificate = (
            _builder(subject, self._name, key.public_key(), days)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier()),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        files = files_in(directory)
        return {
            Path(files.ca): _pem(self.certificate),
            Path(files.certificate): _pem(certificate),
            Path(files.key): _key_pem(key),
        }


def make_all(directory: Path) -> None:
    """Writes everything that a cluster and its clients need."""
    directory.mkdir(mode=PRIVATE_DIRECTORY_MODE, parents=True, exist_ok=True)
    authority, client = Authority(), directory / "client"
    contents = {
        **authority.signed(directory / "cluster", CLUSTER_NAME),
        **authority.signed(client, CLIENT_NAME),
        key_file(directory): _key_pem(authority.key),
    }
    entries = []
    for role in (Role.CLIENT, Role.ADMIN):
        name, token = role.name.lower(), new_token()
        contents[client / f"{name}.token"] = f"{token}\n".encode()
        entries.append(token_entry(name, role, token))
    contents[directory / "cluster" / "tokens.toml"] = "\n".join(entries).encode()
    contents[environment_file(directory)] = _environment(client.absolute()).encode()
    _write(contents)


def key_file(directory: Path) -> Path:
    """The key of the authority. If it exists, so does all the rest."""
    return directory / "authority" / "key.pem"


def environment_file(directory: Path) -> Path:
    """The environment of an operator, for shells."""
    return directory / "client.env"


def _environment(client: Path) -> str:
    """Variables of an operator; programs are given the other token."""
    files = files_in(client)
    values = {name: getattr(files, part) for part, name in TLS_VARIABLES.items()}
    values[TOKEN_VARIABLE] = str(client / "admin.token")
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Otherwise a machine whose clock is slightly slow would refuse it.
        .not_valid_before(now - max(_CLOCKS_APART, datetime.timedelta(days=-2 * days)))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(contents: dict[Path, bytes]) -> None:
    """Replaces files. None is replaced before all are written, so that a full disk leaves those
    that were there; each is private from the time that it exists."""
    written: list[tuple[Path, Path]] = []
    try:
        for path, content in contents.items():
            path.parent.mkdir(mode=PRIVATE_DIRECTORY_MODE, parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.new")
            new.unlink(missing_ok=True)
            written.append((new, path))
            with open(new, "xb", opener=private_opener) as file:
                file.write(content)
        for new, path in written:
            os.replace(new, path)
    finally:
        for new, _ in written:
            new.unlink(missing_ok=True)
