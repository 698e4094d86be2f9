"""A `Database` in this process, one over real servers, one through their gateway, and two whose
cells are in a row store: in the model of Bigtable, and in Google's emulator of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import percolator
import percolator.testing
from percolator import Database, Limits, Table, codecs
from percolator.bigtable.connection import BigtableNetwork
from percolator.bigtable.place import Place
from percolator.schema import Column
from percolator.services.local.cluster import LocalCluster
from percolator.testing.row_database import connect_over, connect_over_model
from tests.bigtable.emulator_process import emulator

IN_PROCESS = "in this process"
ROWS = "over a row store"
EMULATOR = "over Bigtable's emulator"
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
"""For what a row store does not have: tests/unit/rowstore/test_refused_input.py says so."""


needs_backward_scans = pytest.mark.parametrize(
    "db", [*ON_TABLETS, ROWS], indirect=True, scope="module"
)
"""For what the service has, and Debian's release of the emulator does not."""


@pytest.fixture(scope="session")
def emulator_address() -> Iterator[str]:
    with emulator() as address:
        yield address


ENGINES = [
    IN_PROCESS,
    pytest.param(CLUSTER, marks=pytest.mark.integration),
    ROWS,
    pytest.param(EMULATOR, marks=pytest.mark.bigtable),
]


@pytest.fixture(
    scope="module", params=[*ENGINES, pytest.param(THROUGH, marks=pytest.mark.integration)]
)
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
    if request.param == EMULATOR:
        address = request.getfixturevalue("emulator_address")
        place = Place(address, "contracts", f"i{uuid.uuid4().hex}", scans_backwards=False)
        with connect_over(BigtableNetwork, place) as database:
            yield database
        return
    cluster: LocalCluster = request.getfixturevalue("cluster")
    address = cluster.address if request.param == CLUSTER else cluster.gateway_address
    with percolator.connect(address) as database:
        yield database


def put(db: Database, column: Column[Any], /, **values: object) -> None:
    """Sets cells of a column, by row, in one transaction."""
    with db.transaction() as tx:
        for row, value in values.items():
            tx.set(row, column, value)


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
