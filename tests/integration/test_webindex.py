"""The document pipeline on a cluster of processes, as in docs/webindex.md, and under kills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import percolator
from examples.webindex import tables
from examples.webindex.definition import served
from examples.webindex.documents import Document
from examples.webindex.served import served_table
from percolator import Database
from percolator.services.local.cluster import LocalCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "webindex.md"
WAIT_SECONDS = 120.0
_LOOK_SECONDS = 0.05
"""Between two looks at how far a loader, which is another process, has come."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"),
        tablet_servers=2,
        workers=2,
        observers=["examples.webindex.observers:observers"],
    ) as started:
        yield started


@pytest.fixture(scope="module")
def db(cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(cluster.address) as database:
        yield database


def load(cluster: LocalCluster, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.webindex.load", "--address", cluster.address, *options],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def crawled(db: Database) -> list[Document]:
    with db.snapshot() as snapshot:
        rows = snapshot.scan(tables.documents, columns=[tables.body])
        return [Document(row.key, row[tables.body]) for row in rows]


def crawl_among_kills(
    cluster: LocalCluster, db: Database, *options: str, loaded: int, killed: Sequence[str]
) -> list[Document]:
    """Loads a crawl, kills these processes when that many documents are there, and compares what
    is served in the end with its definition. Returns the documents."""
    # At no more than this rate, so that it is still at work when they are killed.
    with load(cluster, "--rate", "60", *options) as loading:
        deadline = time.monotonic() + WAIT_SECONDS
        while len(crawled(db)) < loaded:
            assert time.monotonic() < deadline
            time.sleep(_LOOK_SECONDS)
        assert loading.poll() is None, "everything was written before anything was killed"
        for name in killed:
            cluster.processes[name].kill()
        for name in killed:
            cluster.restart(name)
        _, told = loading.communicate(timeout=WAIT_SECONDS)
        assert loading.returncode == 0, told
    quiet = db.wait_for_observers(timeout=WAIT_SECONDS)
    assert not quiet.dead_letters
    documents = crawled(db)
    assert served_table(db) == served(documents)
    return documents


def test_a_crawl_is_served_although_a_worker_and_a_tablet_server_are_killed_in_the_middle(
    cluster: LocalCluster, db: Database
) -> None:
    tables.create_tables(db, ["http://site1", "http://site2"])
    options = ("--documents", "180", "--updates", "60", "--deletions", "30")
    killed = ("worker", "tabletserver-1")
    documents = crawl_among_kills(cluster, db, *options, loaded=80, killed=killed)
    assert 150 < len(documents) < 180


def test_the_program_in_the_guide_shows_what_is_served(cluster: LocalCluster, db: Database) -> None:
    with load(cluster, "--documents", "20", "--seed", "7") as loading:
        _, told = loading.communicate(timeout=WAIT_SECONDS)
    assert loading.returncode == 0, told
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PERCOLATOR_ADDRESS": cluster.address},
    ).stdout.splitlines()
    urls = [line.split()[0] for line in shown]
    assert urls == sorted(served_table(db))[:5]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rate", "0"], "must be above 0"),
        (["--documents", "0", "--forever"], "only synthetic documents can change"),
        (["--text", "no-such-file"], "no-such-file"),
        (["--text", str(GUIDE)], "a document begins with"),
    ],
)
def test_the_loader_says_what_is_wrong(
    cluster: LocalCluster, options: list[str], told: str
) -> None:
    with load(cluster, *options) as loading:
        _, errors = loading.communicate(timeout=WAIT_SECONDS)
    assert loading.returncode
    assert told in errors
    assert "Traceback" not in errors
