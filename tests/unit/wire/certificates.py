"""Certificate files for tests, made once per test run: good ones, and each kind of bad one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from cryptography.hazmat.primitives import serialization

from percolator.services.local.authority import CLIENT_NAME, Authority
from percolator.wire.tls import CLUSTER_NAME, Tls


@dataclass(frozen=True)
class Certificates:
    cluster: Tls
    client: Tls
    foreign: Tls
    """Files of another authority, which also trust that one."""
    bad: dict[str, tuple[Tls, str, str]]
    """By what is wrong: the files, the field that the error names, and words that it contains."""


@pytest.fixture(scope="session", name="certificates")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    root = tmp_path_factory.mktemp("certificates")
    authority, other = Authority(), Authority("another authority")
    cluster = authority.issue(root / "cluster", CLUSTER_NAME)
    client = authority.issue(root / "client", CLIENT_NAME)
    foreign = other.issue(root / "foreign", CLUSTER_NAME)
    expired = authority.issue(root / "expired", CLUSTER_NAME, days=-1)
    text = root / "text.pem"
    text.write_text("nothing of that kind")
    secret = root / "encrypted.pem"
    secret.write_bytes(
        authority.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    bad = {
        "no authority": (replace(cluster, ca=str(root / "none")), "ca", "No such file"),
        "empty name": (replace(cluster, key=""), "key", "is empty"),
        "a directory": (replace(cluster, key=str(root)), "key", "Is a directory"),
        "text as authority": (replace(cluster, ca=str(text)), "ca", "no certificate in PEM"),
        "key as certificate": (
            replace(cluster, certificate=cluster.key),
            "certificate",
            "no certificate in PEM",
        ),
        "certificate as key": (
            replace(cluster, key=cluster.certificate),
            "key",
            "no private key in PEM",
        ),
        "another's key": (replace(cluster, key=client.key), "key", "does not belong"),
        "protected key": (replace(cluster, key=str(secret)), "key", "password"),
        "another authority": (replace(cluster, ca=foreign.ca), "certificate", "not accepted by"),
        "expired": (expired, "certificate", "expired"),
        "a client's": (client, "certificate", "not accepted by"),
    }
    return Certificates(cluster, client, foreign, bad)
