"""`docker-compose --profile demo up`: plain text, workers with the document pipeline, a loader."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from examples.webindex import tables
from percolator import aio
from percolator.errors import SchemaError
from percolator.wire.credentials import TLS_VARIABLES, TOKEN_VARIABLE
from tests.containers.composed import ComposedCluster, free_port, until_described

TABLET_SERVERS = 2
SERVED_SECONDS = 120.0
PAGES = 10

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

console = Console()


@pytest.fixture(name="cluster")
def _cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[ComposedCluster]:
    for name in (*TLS_VARIABLES.values(), TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    cluster = ComposedCluster(f"percolator-demo-{os.getpid()}", free_port(), ["compose.yaml"])
    try:
        cluster.up(tabletserver=TABLET_SERVERS)
        yield cluster
    finally:
        cluster.down(even_data=True)


async def until_served(database: aio.Database, pages: int) -> None:
    """Returns when this many pages are in the serving table."""
    deadline = time.monotonic() + SERVED_SECONDS
    while True:
        try:
            async with database.snapshot() as snapshot:
                found = [page.key async for page in snapshot.scan(tables.serving)]
        except SchemaError:
            found = []  # the loader creates the tables
        if len(found) >= pages:
            return
        assert time.monotonic() < deadline, f"{len(found)} of {pages} pages are served"
        await asyncio.sleep(0.2)


async def test_documents_are_loaded_and_served_by_as_many_workers_as_one_likes(
    cluster: ComposedCluster,
) -> None:
    began = time.monotonic()
    await until_described(cluster.address, {"worker": 2, "tabletserver": TABLET_SERVERS})
    async with aio.connect(cluster.address) as database:
        await until_served(database, PAGES)
        console.print(f"{PAGES} pages are served {time.monotonic() - began:.1f} s after `up`")
        cluster.up(tabletserver=TABLET_SERVERS, worker=4)
        await until_described(cluster.address, {"worker": 4})
        async with database.snapshot() as snapshot:
            before = len([page.key async for page in snapshot.scan(tables.serving)])
        await until_served(database, before + PAGES)
    loader = cluster.containers("loader")
    assert [one.is_running() for one in loader] == [True]
