"""Certificates, tokens and even the authority are replaced without restarting anything."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import percolator
from percolator import Table, aio, codecs
from percolator.errors import Unauthenticated
from percolator.services.local.authority import files_in, make_all
from percolator.services.local.cluster import LocalCluster
from percolator.wire.addresses import parse_host_port
from percolator.wire.credentials import TLS_VARIABLES, TOKEN_VARIABLE
from percolator.wire.tls import CLUSTER_NAME, Tls

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

WITHDRAWN_SECONDS = 15.0

things = Table("things")
number = things.column("number", codecs.integer)


@dataclass
class Renewing:
    """The files in use, and two complete sets, of two authorities, to copy them from."""

    used: Path
    sets: tuple[Path, Path]

    def use(self, name: str, *sources: int) -> None:
        """Installs a file from one of the sets, or the concatenation of both sets' versions."""
        text = "\n".join((self.sets[source] / name).read_text() for source in sources)
        new = self.used / f"{name}.new"
        new.write_text(text)
        new.replace(self.used / name)

    def use_both(self) -> None:
        """Step 1: accept whatever either authority has signed."""
        self.use("cluster/tokens.toml", 0, 1)
        for side in ("cluster", "client"):
            self.use(f"{side}/ca.pem", 0, 1)

    def show_new(self) -> None:
        """Step 2: present the new certificates and tokens, one file after another."""
        for side in ("cluster", "client"):
            for name in ("certificate.pem", "key.pem"):
                self.use(f"{side}/{name}", 1)
        self.use("client/admin.token", 1)

    def forget_old(self) -> None:
        """Step 3: accept only what the new authority has signed."""
        self.use("cluster/tokens.toml", 1)
        for side in ("cluster", "client"):
            self.use(f"{side}/ca.pem", 1)


@pytest.fixture(name="renewing")
def _renewing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Renewing:
    renewing = Renewing(tmp_path / "used", (tmp_path / "old", tmp_path / "new"))
    for directory in (*renewing.sets, renewing.used):
        make_all(directory)
    # One file cannot contain two entries with the same name.
    tokens = renewing.sets[1] / "cluster" / "tokens.toml"
    tokens.write_text(tokens.read_text().replace("[client]", "[c2]").replace("[admin]", "[a2]"))
    for side in ("cluster", "client"):
        for path in (renewing.sets[0] / side).iterdir():
            renewing.use(f"{side}/{path.name}", 0)
    for part, name in TLS_VARIABLES.items():
        monkeypatch.setenv(name, getattr(files_in(renewing.used / "client"), part))
    monkeypatch.setenv(TOKEN_VARIABLE, str(renewing.used / "client" / "admin.token"))
    return renewing


@pytest.fixture(name="cluster")
def _cluster(renewing: Renewing, tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path / "data", tablet_servers=1, gateways=1, certificates=renewing.used
    ) as cluster:
        yield cluster


def shown_at(address: str, files: Tls) -> str:
    """The serial number of the certificate presented to a new connection."""
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    at = parse_host_port(address, "address")
    with (
        socket.create_connection((at.host, at.port), timeout=10.0) as plain,
        context.wrap_socket(plain, server_hostname=CLUSTER_NAME) as secured,
    ):
        certificate = secured.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def shown(cluster: LocalCluster, renewing: Renewing) -> set[str]:
    """The serial numbers that all services present, on all their ports."""
    files = files_in(renewing.used / "client")
    ports = [one.wait_ready(10.0) for one in cluster.processes.values()]
    addresses = [
        address
        for one in ports
        for address in (one.address, one.frames_address, one.metrics_address)
    ]
    return {shown_at(address, files) for address in addresses if address}


async def test_everything_is_renewed_while_programs_keep_running(
    cluster: LocalCluster, renewing: Renewing
) -> None:
    async with (
        aio.connect(cluster.address) as direct,
        aio.connect(cluster.gateway_address) as behind,
    ):
        await direct.create_table(things)

        async def count(database: aio.Database) -> int:
            async def one_more(tx: aio.Transaction) -> int:
                found = (await tx.get("row", number) or 0) + 1
                await tx.set("row", number, found)
                return found

            return await database.run(one_more)

        assert await count(direct) == 1
        before = shown(cluster, renewing)
        assert len(before) == 1
        renewing.use_both()
        assert await count(behind) == 2
        renewing.show_new()
        after = shown(cluster, renewing)
        assert len(after) == 1
        assert after.isdisjoint(before)
        renewing.forget_old()
        assert await count(direct) == 3
        # The others have to reconnect to it, each with the current contents of its files.
        cluster.processes["tabletserver-1"].kill()
        cluster.restart("tabletserver-1")
        assert [await count(direct), await count(behind)] == [4, 5]
        await until_refused(cluster, renewing)
        assert [await count(direct), await count(behind)] == [6, 7]


async def until_refused(cluster: LocalCluster, renewing: Renewing) -> None:
    """Returns once the former token is no longer accepted."""
    token = (renewing.sets[0] / "client" / "admin.token").read_text().strip()
    files = files_in(renewing.used / "client")
    deadline = time.monotonic() + WITHDRAWN_SECONDS
    while True:
        try:
            async with aio.connect(cluster.address, tls=files, token=token):
                assert time.monotonic() < deadline, "a former token is still accepted"
        except Unauthenticated:
            return


def test_a_certificate_of_the_former_authority_is_no_longer_accepted(
    cluster: LocalCluster, renewing: Renewing
) -> None:
    renewing.use_both()
    renewing.show_new()
    renewing.forget_old()
    former = files_in(renewing.sets[0] / "client")
    trusting = Tls(files_in(renewing.used / "client").ca, former.certificate, former.key)
    token = (renewing.used / "client" / "admin.token").read_text().strip()
    with pytest.raises(percolator.errors.InvalidArgument, match="not accepted by"):
        percolator.connect(cluster.address, tls=trusting, token=token)
    for process in cluster.processes.values():
        with pytest.raises(OSError):  # noqa: PT011 (disconnected, with or without an alert)
            speak(process.address, trusting)


def speak(address: str, files: Tls) -> None:
    """Connects and reads: in TLS 1.3, only the first read tells a client that it was refused."""
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    at = parse_host_port(address, "address")
    with (
        socket.create_connection((at.host, at.port), timeout=10.0) as plain,
        context.wrap_socket(plain, server_hostname=CLUSTER_NAME) as secured,
    ):
        if not secured.recv(1):
            raise ConnectionResetError
