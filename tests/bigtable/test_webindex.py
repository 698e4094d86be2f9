"""The document pipeline in a cluster whose cells are in Google's emulator, while a worker and the
oracle are killed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import percolator
from examples.webindex import tables
from examples.webindex.crawl import Crawl
from percolator.services.local.cluster import LocalCluster
from tests.bigtable.emulator_process import emulator
from tests.integration.test_webindex import crawl_among_kills

pytestmark = [pytest.mark.bigtable, pytest.mark.timeout(300)]

DOCUMENTS = 100
DELETIONS = 15


@pytest.fixture(scope="module", name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with emulator() as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGTABLE_EMULATOR_HOST", address)
        with LocalCluster(
            tmp_path_factory.mktemp("cluster"),
            store=f"bigtable://webindex/i{uuid.uuid4().hex[:20]}",
            tablet_servers=0,
            workers=2,
            observers=["examples.webindex.observers:observers"],
            start_seconds=60.0,
        ) as started:
            yield started


def test_a_crawl_is_served_although_a_worker_and_the_oracle_are_killed_in_the_middle(
    cluster: LocalCluster,
) -> None:
    options = ("--documents", str(DOCUMENTS), "--seed", "3", "--updates", "30")
    deletions = ("--deletions", str(DELETIONS))
    with percolator.connect(cluster.address) as db:
        tables.create_tables(db)
        documents = crawl_among_kills(
            cluster, db, *options, *deletions, loaded=40, killed=("oracle", "worker")
        )
    assert {one.url for one in documents} <= {one.url for one in Crawl(DOCUMENTS, seed=3)}
    assert DOCUMENTS - DELETIONS <= len(documents) < DOCUMENTS
