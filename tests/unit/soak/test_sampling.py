"""What is sampled besides metrics: the files of LevelDB, and what the client reports."""

from __future__ import annotations

import json
import os
from pathlib import Path

from percolator.services.local.cluster import LocalCluster
from tests.soak.sampling import Sampler, leveldb_files
from tests.soak.series import Samples

REPORT = {
    "at": 110.0,
    "memory": 50.0,
    "descriptors": 20,
    "tasks": 30,
    "threads": 8,
    "milliseconds": {"read": {"median": 1.5, "p99": 9.0}, "table": {"median": 80.0}},
    "done": {"read": 100, "table": 1},
    "failed": {"read: Unavailable": 2},
}


def test_a_file_that_a_clone_shares_counts_once(tmp_path: Path) -> None:
    for directory in ("e1.sealed", "e2"):
        (tmp_path / "3" / "7" / directory).mkdir(parents=True)
    table = tmp_path / "3" / "7" / "e1.sealed" / "000005.ldb"
    table.write_bytes(b"x" * 1000)
    os.link(table, tmp_path / "3" / "7" / "e2" / "000005.ldb")
    (tmp_path / "3" / "7" / "e2" / "000006.log").write_bytes(b"x" * 10)
    (tmp_path / "3" / "7" / "e2" / "MANIFEST-000002").write_bytes(b"x")
    (tmp_path / "cluster.json").write_bytes(b"x" * 100)
    assert leveldb_files(tmp_path) == (3, 1011)


def test_a_report_of_the_client_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    report, samples = tmp_path / "client.jsonl", Samples()
    (tmp_path / "cluster" / "store").mkdir(parents=True)
    sampler = Sampler(LocalCluster(tmp_path / "cluster"), report, samples, began=100.0)
    line = json.dumps(REPORT) + "\n"
    sampler.sample(0.0)
    report.write_text(line + line[:50])
    sampler.sample(1.0)
    report.write_text(line + line)
    sampler.sample(2.0)
    found = {str(one.key): one.points for one in samples.judged()}
    assert found["read: p99"] == [(10.0, 9.0)] * 2
    assert found["table: median"] == [(10.0, 80.0)] * 2
    assert found["client: tasks"] == [(10.0, 30)] * 2
    assert found["store: files"] == [(0.0, 0), (1.0, 0), (2.0, 0)]
    assert sampler.failed == {"read: Unavailable": 2}
