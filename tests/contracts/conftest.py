"""A `Database` in this process, one over real servers, and one through their gateway."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import percolator
import percolator.testing
from percolator import Database, Limits, Table, codecs
from percolator.schema import Column
from services.local.cluster import LocalCluster

IN_PROCESS = "in this process"
CLUSTER = "cluster"
THROUGH = "through a gateway"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2, gateways=1) as started:
        yield started


@pytest.fixture(
    scope="module",
    params=[
        IN_PROCESS,
        pytest.param(CLUSTER, marks=pytest.mark.integration),
        pytest.param(THROUGH, marks=pytest.mark.integration),
    ],
)
def db(request: pytest.FixtureRequest) -> Iterator[Database]:
    if request.param == IN_PROCESS:
        # As patient as over servers: some of these tests leave locks of clients that died.
        with percolator.testing.connect(limits=Limits()) as database:
            yield database
        return
    cluster: LocalCluster = request.getfixturevalue("cluster")
    address = cluster.address if request.param == CLUSTER else cluster.gateway_address
    with percolator.connect(address) as database:
        yield database


class Accounts:
    """A separate table for each test, in three tablets."""

    def __init__(self, db: Database) -> None:
        self.table = Table(f"accounts-{uuid.uuid4()}")
        self.balance: Column[int] = self.table.column("balance", codecs.integer)
        self.owner: Column[str] = self.table.column("owner", codecs.text)
        db.create_table(self.table, splits=["g", "p"])


@pytest.fixture
def accounts(db: Database) -> Accounts:
    return Accounts(db)
