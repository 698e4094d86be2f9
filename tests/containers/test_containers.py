"""`make compose-test`: the cluster of deploy/compose.tls.yaml is hurt, and checked from outside.

Clients are processes of this machine that know the published port, a certificate and a token. One
kind of container after another is killed, and one is disconnected. At the end, the checker sees the
whole history, and the audit everything that is stored.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from percolator.services.local.authority import files_in, make_all
from percolator.wire.credentials import TLS_VARIABLES, TOKEN_VARIABLE
from tests.chaos.clients import Clients, lives
from tests.chaos.shop import Shop
from tests.chaos.supervisor import Verdict, supervising
from tests.containers.composed import KINDS, ComposedCluster, free_port, until_described
from tests.containers.container_faults import Scene, all_faults

FILES = ("compose.yaml", "deploy/compose.tls.yaml", "tests/containers/compose.orders.yaml")
TABLET_SERVERS = 3
CLIENTS = 2
SESSIONS_PER_CLIENT = 4
WORKS_AGAIN_SECONDS = 60.0

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

console = Console()


@pytest.fixture(name="certificates")
def _certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything that `make certs` makes; this process is an operator."""
    make_all(tmp_path / "certificates")
    client = tmp_path / "certificates" / "client"
    files = files_in(client)
    for part, name in TLS_VARIABLES.items():
        monkeypatch.setenv(name, getattr(files, part))
    monkeypatch.setenv(TOKEN_VARIABLE, str(client / "admin.token"))
    return tmp_path / "certificates"


@pytest.fixture(name="cluster")
def _cluster(certificates: Path) -> Iterator[ComposedCluster]:
    project = f"percolator-test-{os.getpid()}"
    variables = {"CERTIFICATES": str(certificates)}
    cluster = ComposedCluster(project, free_port(), FILES, variables=variables)
    try:
        cluster.up(tabletserver=TABLET_SERVERS, loader=0)
        yield cluster
    finally:
        cluster.down(even_data=True)


async def test_whatever_container_is_lost_nothing_else_is(
    cluster: ComposedCluster,
    certificates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recovery: dict[str, float] = {}
    faults = all_faults(TABLET_SERVERS)
    await until_described(cluster.address, dict.fromkeys(set(KINDS) - {"worker"}, 1))
    for container in cluster.containers():
        if container.service != "certificates":  # it has ended
            await asyncio.to_thread(container.require_contained)
    async with supervising(cluster, "bank", tmp_path) as supervisor:
        # From now on, processes that are started are clients, not operators.
        monkeypatch.setenv(TOKEN_VARIABLE, str(certificates / "client" / "client.token"))
        shop = Shop(supervisor.database)
        await shop.open()
        await until_described(cluster.address, {"worker": 1})
        orders = asyncio.create_task(shop.work())
        clients = Clients(
            lives(
                cluster.address,
                tmp_path / "clients",
                "bank",
                seed=1,
                count=CLIENTS,
                sessions=SESSIONS_PER_CLIENT,
            )
        )
        try:
            scene = Scene(cluster, supervisor)
            for fault in faults:
                await asyncio.to_thread(clients.wait_until_all_commit, WORKS_AGAIN_SECONDS)
                console.print(f"{fault.name}: ", end="")
                recovery[fault.name] = await fault.inject(scene)
                console.print(f"works again after {recovery[fault.name]:.2f} s")
            await asyncio.to_thread(clients.wait_until_all_commit, WORKS_AGAIN_SECONDS)
            await asyncio.to_thread(clients.stop)
            shop.stop()
            await orders
        finally:
            orders.cancel()
            clients.kill()
        problems = await shop.problems()
        verdict = await supervisor.judge(clients)
    show(recovery, verdict)
    console.print(f"{shop.placed} orders placed, each of which two observers had to handle once")
    verdict.require_clean(tmp_path)
    assert problems == []
    assert shop.placed > 10 * len(recovery)
    assert recovery.keys() == {fault.name for fault in faults}
    assert verdict.committed > CLIENTS * SESSIONS_PER_CLIENT * len(recovery)


def show(recovery: dict[str, float], verdict: Verdict) -> None:
    table = Table("fault", "works again after, s", box=None)
    for name, seconds in recovery.items():
        table.add_row(name, f"{seconds:.2f}")
    console.print(table)
    console.print(
        f"{len(verdict.history):,} transactions checked: {verdict.committed:,} committed writes, "
        f"{verdict.unknown:,} whose outcome no client was told"
    )
