"""A `Database` in this process, one over real servers, one through their gateway, and one whose
cells are in a row store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import percolator
import percolator.testing
from percolator import Database, Limits, Table, codecs
from percolator.schema import Column
from percolator.testing.row_database import connect_over_model
from services.local.cluster import LocalCluster

IN_PROCESS = "in this process"
ROWS = "over a row store"
CLUSTER = "cluster"
THROUGH = "through a gateway"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2, gateways=1) as started:
        yield started


ON_TABLETS = [
    IN_PROCESS,
    pytest.param(CLUSTER, marks=pytest.mark.integration),
    pytest.param(THROUGH, marks=pytest.mark.integration),
]
needs_tablets = pytest.mark.parametrize("db", ON_TABLETS, indirect=True, scope="module")
"""For what a row store does not have: tests/unit/rowstore/test_not_there_yet.py says so."""


@pytest.fixture(scope="module", params=[*ON_TABLETS, ROWS])
def db(request: pytest.FixtureRequest) -> Iterator[Database]:
    if request.param == IN_PROCESS:
        # As patient as over servers: some of these tests leave locks of clients that died.
        with percolator.testing.connect(limits=Limits()) as database:
            yield database
        return
    if request.param == ROWS:
        with connect_over_model() as database:
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
