"""`kill -9` of a driver, with all that it has started, while it writes and while its streams run.

One driver has several writes and streams, each of which halts at another step. One kill strikes all
of them: each test of a step counts that it was struck there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import percolator
from percolator.services.local.cluster import LocalCluster
from tests.spark.driver_program import start_stream, write_batch
from tests.spark.drivers import Driver
from tests.spark.gates import Gates
from tests.spark.tables import CATALOG, Followed, Pages, Rows, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ROWS = 400
WRITE_STEPS = ("middle", "before", "after")
SOURCE_STEPS = ("asked", "planned", "noted")
SINK_STEPS = ("middle", "before", "after")
COMMITS = 4
KEEP_SECONDS = 15
"""The least. Only time tells others that a driver is dead."""


@dataclass
class Write:
    """An atomic write that replaces a table, and where it halts."""

    pages: Pages
    old: Rows
    plan: dict[str, Any]

    @property
    def new(self) -> Rows:
        return {url: (title, visits) for url, title, visits in self.plan["rows"]}


@dataclass
class Stream:
    """A stream from one table into another one, and where it halts."""

    source: Followed
    copy: Followed
    plan: dict[str, Any]


class Struck:
    """What the driver was doing when it was killed."""

    def __init__(self) -> None:
        self.writes: dict[str, Write] = {}
        self.streams: dict[str, Stream] = {}
        self.halted: dict[str, int] = {}
        """The process at each gate."""
        self.killed: set[int] = set()


def _write(db: percolator.Database, address: str, number: int) -> Write:
    pages = Pages(db, 8)
    rows = [(key, f"new {key}", number) for key in keys(ROWS)]
    options = {"address": address, "table": pages.name, "catalog": CATALOG, "atomic": "true"}
    options["keep_seconds"] = str(KEEP_SECONDS)
    return Write(pages, pages.stored(), {"rows": rows, "mode": "overwrite", "options": options})


def _stream(db: percolator.Database, address: str, checkpoint: Path) -> Stream:
    source, copy = Followed(db), Followed(db)
    given = {"address": address, "catalog": CATALOG}
    began = {"table": source.name, "starting_from": str(int(source.began))}
    sink = {
        "table": copy.name,
        "checkpointLocation": str(checkpoint),
        "keep_seconds": str(KEEP_SECONDS),
    }
    _commit_some(source)
    return Stream(source, copy, {"source": given | began, "sink": given | sink})


def _commit_some(source: Followed) -> None:
    """Each commit has eight rows of one tablet, of which a task locks the first before the last."""
    for number in range(COMMITS):
        with source.db.transaction() as tx:
            for row in range(number, number + 8):
                tx.set(f"a{row}", source.title, f"title {number}")
                tx.set(f"a{row}", source.visits, number)


@pytest.fixture(scope="module")
def struck(
    gates: Gates,
    db: percolator.Database,
    cluster: LocalCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Struck:
    directory, found, address = tmp_path_factory.mktemp("driver"), Struck(), cluster.address
    closed: list[str] = []
    for number, step in enumerate(WRITE_STEPS):
        write = found.writes[step] = _write(db, address, number)
        closed.append(f"{write.pages.name}.{step}")
    for place, steps in (("source", SOURCE_STEPS), ("sink", SINK_STEPS)):
        for step in steps:
            stream = _stream(db, address, directory / f"{place}-{step}")
            found.streams[f"{place} {step}"] = stream
            halts = stream.source if place == "source" else stream.copy
            closed.append(f"{halts.name}.{step}")
    for gate in closed:
        gates.close(gate)
    writes = [one.plan for one in found.writes.values()]
    streams = [one.plan for one in found.streams.values()]
    with Driver(gates, directory, writes=writes, streams=streams) as driver:
        for gate in closed:
            found.halted[gate] = driver.halted(gate)
        found.killed = driver.kill()
    for gate in closed:
        gates.open(gate)
    return found


def test_the_driver_was_struck_at_every_step(struck: Struck) -> None:
    assert len(struck.halted) == len(WRITE_STEPS) + len(SOURCE_STEPS) + len(SINK_STEPS)
    assert set(struck.halted.values()) <= struck.killed


@pytest.mark.parametrize("step", WRITE_STEPS)
def test_a_driver_that_is_killed_leaves_all_rows_or_none_and_its_job_can_be_run_again(
    step: str, struck: Struck, spark: SparkSession
) -> None:
    write = struck.writes[step]
    assert write.pages.stored() == (write.new if step == "after" else write.old)
    write_batch(spark, write.plan)
    assert write.pages.stored() == write.new


@pytest.mark.parametrize(
    "step", [f"source {s}" for s in SOURCE_STEPS] + [f"sink {s}" for s in SINK_STEPS]
)
def test_a_stream_that_is_killed_and_restarted_writes_each_commit_once(
    step: str, struck: Struck, spark: SparkSession
) -> None:
    stream = struck.streams[step]
    assert len(stream.copy.history()) < COMMITS
    _commit_some(stream.source)
    start_stream(spark, stream.plan).awaitTermination()
    assert stream.copy.history() == stream.source.history()
