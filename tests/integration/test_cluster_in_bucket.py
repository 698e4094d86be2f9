"""A cluster in a bucket: what is damaged there is named and served by nobody, and nothing is lost.

All tests share one cluster: each leaves it whole.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import Result

import percolator
from percolator import Table, codecs
from percolator.bucket.place import UNFINISHED
from percolator.cli.app import app
from percolator.errors import PercolatorError
from percolator.limits import Limits
from percolator.services.local.cluster import LocalCluster
from tests.command_line import CliRunner
from tests.doubles.s3_server import Answer, S3Server, s3_server, set_credentials

run = CliRunner()
PREFIX = "some/prefix/"
ROWS = 70
"""More entries than an owner leaves to the next one without a checkpoint."""
NAMES = ("entry", "checkpoint", "file", "floor", "whole")
TABLES = {name: Table(name) for name in NAMES}
COLUMNS = {name: table.column("text", codecs.text) for name, table in TABLES.items()}
SECONDS = 3.0
WAIT_SECONDS = 60.0


@dataclass
class Cluster:
    """A cluster that is not running, and its bucket."""

    server: S3Server
    data: Path

    @contextmanager
    def running(self) -> Iterator[LocalCluster]:
        """With empty caches: everything comes from the bucket."""
        shutil.rmtree(self.data, ignore_errors=True)
        with LocalCluster(self.data, store=self.server.address, tablet_servers=1) as cluster:
            yield cluster

    def keys(self, part: str) -> list[str]:
        return sorted(key for key in self.server.objects if part in key)

    @contextmanager
    def damaged(self, key: str, data: bytes | None) -> Iterator[None]:
        """The object has these bytes, or is missing, until the block ends."""
        objects = self.server.objects
        before = objects.pop(key, None)
        if data is not None:
            objects[key] = data
        try:
            yield
        finally:
            objects.pop(key, None)
            if before is not None:
                objects[key] = before

    def audit(self, *options: str) -> Result:
        return run.invoke(
            app, ["--json", "--timeout", "60", "store", "audit", self.server.address, *options]
        )

    def requires_of_master(self, said: str, store: str = "") -> None:
        """Starts a master, which is to say this, whether it ends or tries again, and to change
        nothing."""
        before = dict(self.server.objects)
        log = self.data.with_name("master.log")
        command = [sys.executable, "-m", "percolator.cli", "serve", "master"]
        options = ["--store", store or self.server.address, "--listen", "127.0.0.1:0"]
        with (
            log.open("wb") as output,
            subprocess.Popen([*command, *options], stdout=output, stderr=output) as master,
        ):
            try:
                until = time.monotonic() + WAIT_SECONDS
                while said not in (found := log.read_text()):
                    is_over = master.poll() is not None and log.read_text() == found
                    assert not is_over, found
                    assert time.monotonic() < until, found
                    time.sleep(0.1)
            finally:
                master.terminate()
        assert self.server.objects == before


@pytest.fixture(scope="module", name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as server:
        set_credentials(patch)
        patch.setenv(UNFINISHED, "1")
        made = Cluster(server, tmp_path_factory.mktemp("bucket") / "cluster")
        with made.running() as running, percolator.connect(running.address) as database:
            for name in NAMES:
                database.create_table(TABLES[name])
                for row in range(ROWS):
                    with database.transaction() as tx:
                        tx.set(f"row {row:03}", COLUMNS[name], name)
        yield made


def folder(cluster: Cluster, name: str) -> str:
    """The folder of the tablet of a table."""
    tablets = json.loads(cluster.audit().stdout)["tablets"]
    (found,) = [one for one in tablets if one["place"] == f"table {name}"]
    return f"{PREFIX}tablets/{found['tablet_id']:020d}"


def rows(database: percolator.Database, name: str) -> int:
    with database.snapshot() as snapshot:
        return sum(1 for _ in snapshot.scan(TABLES[name]))


def test_an_audit_finds_nothing_wrong_and_tells_what_is_there(cluster: Cluster) -> None:
    before, writes = dict(cluster.server.objects), cluster.server.requests["PUT"]
    result = cluster.audit("--deep", "--commits-per-second", "10")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["problems"] == []
    assert found["unnamed"] == {"swept": {}, "may_be_published": [], "logs_cleared": []}
    assert {role["role"] for role in found["roles"]} == {"master", "oracle"}
    assert len(found["tablets"]) == len(NAMES)
    assert all(tablet["checkpoint"] and not tablet["holes"] for tablet in found["tablets"])
    size = sum(map(len, cluster.server.objects.values()))
    assert found["total"] == {"objects": len(cluster.server.objects), "bytes": size}
    # 10 a second, in 730 hours, at 5 dollars for a million, in 5 tablets.
    assert round(found["dollars_per_month"]["entries"]) == 657
    assert (cluster.server.objects, cluster.server.requests["PUT"]) == (before, writes)


def test_a_sweep_without_dry_run_is_refused_and_a_dry_one_deletes_nothing(cluster: Cluster) -> None:
    sweep = ["--json", "--timeout", "60", "store", "sweep", cluster.server.address]
    refused = run.invoke(app, sweep)
    assert refused.exit_code == 2
    assert "--dry-run: is needed: only the leading master sweeps" in refused.stderr
    foreign = f"{folder(cluster, 'whole')}/table/{'0' * 32}-1-{'0' * 16}-1-000001.ldb"
    with cluster.damaged(foreign, b"of a former owner"):
        told = json.loads(run.invoke(app, [*sweep, "--dry-run"]).stdout)
        assert told["swept"] == {
            foreign.removeprefix(PREFIX): (
                "a former owner has uploaded it, and only the present one can publish"
            )
        }
        assert foreign in cluster.server.objects
        assert json.loads(cluster.audit().stdout)["unnamed"] == told


def test_what_is_damaged_is_named_and_not_served_until_it_is_whole_again(cluster: Cluster) -> None:
    (file,) = cluster.keys(f"{folder(cluster, 'file')}/table/")
    (checkpoint,) = cluster.keys(f"{folder(cluster, 'checkpoint')}/checkpoint/")
    entry = cluster.keys(f"{folder(cluster, 'entry')}/log/")[-1]
    floor = f"{folder(cluster, 'floor')}/floor"
    objects = cluster.server.objects
    altered = objects[checkpoint][:-1] + bytes([objects[checkpoint][-1] ^ 1])
    with (
        cluster.running() as running,
        percolator.connect(running.address) as database,
    ):
        assert rows(database, "whole") == ROWS
    entry = cluster.keys(f"{folder(cluster, 'entry')}/log/")[-1]
    with (
        cluster.damaged(entry, objects[entry][:-1]),
        cluster.damaged(checkpoint, altered),
        cluster.damaged(file, objects[file][:-1]),
        cluster.damaged(floor, b'{"floor": 3'),
    ):
        result = cluster.audit()
        assert result.exit_code == 3
        problems = "\n".join(json.loads(result.stdout)["problems"])
        for key, why in (
            (entry, "is damaged: it is not entry"),
            (checkpoint, "is damaged: it is no checkpoint"),
            (file, f"is damaged: {len(objects[file])} bytes instead of {len(objects[file]) + 1}"),
            (floor, "is damaged: b'{\"floor\": 3'"),
        ):
            assert f"{key.removeprefix(PREFIX)} {why}" in problems
        with (
            cluster.running() as running,
            percolator.connect(running.address, limits=Limits(call_seconds=SECONDS)) as database,
        ):
            assert rows(database, "whole") == ROWS
            for name in NAMES[:-1]:
                with pytest.raises(PercolatorError):
                    rows(database, name)
            said = (cluster.data / "logs" / "master.log").read_text()
            for key in (entry, checkpoint, file, floor):
                assert f"{key.removeprefix(PREFIX)} is damaged" in said
    with cluster.running() as running, percolator.connect(running.address) as database:
        assert {name: rows(database, name) for name in NAMES} == dict.fromkeys(NAMES, ROWS)
    assert cluster.audit("--deep").exit_code == 0


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("cluster.json", b'{"cluster_id"', "is damaged"),
        ("cluster.json", None, "has no cluster.json: a cluster begins in an empty bucket"),
        ("coordinator/role/master", b"percolator-value 1 9", "is damaged"),
        ("coordinator/role/master", None, "the record of the role 'master' is missing"),
    ],
    ids=["identity damaged", "identity missing", "role damaged", "role missing"],
)
def test_no_master_leads_by_a_damaged_identity_or_record(
    cluster: Cluster, name: str, data: bytes | None, said: str
) -> None:
    with cluster.damaged(PREFIX + name, data):
        cluster.requires_of_master(said)
        result = cluster.audit()
        assert result.exit_code != 0
        assert name in result.output


def test_masters_say_what_is_wrong_with_a_store(cluster: Cluster) -> None:
    inner = cluster.server.address.replace("some/prefix", "some/prefix/inner")
    cluster.requires_of_master("is inside s3://some-bucket/some/prefix", inner)
    outer = cluster.server.address.replace("some/prefix", "some")
    cluster.requires_of_master("is not empty (it holds 'prefix/cluster.json')", outer)
    for answer, said in (
        (Answer(301, "PermanentRedirect"), "the bucket is in another region"),
        (Answer(403, "ExpiredToken"), "the credentials are wrong or have expired"),
        (Answer(403, "RequestTimeTooSkewed"), "the clocks of this machine and of the store"),
        (Answer(404, "NoSuchBucket"), "there is no such bucket"),
    ):
        cluster.server.always = answer
        try:
            cluster.requires_of_master(said)
        finally:
            cluster.server.always = None


def test_a_first_master_refuses_a_careless_bucket(cluster: Cluster) -> None:
    new = cluster.server.address.replace("some/prefix", "new")
    for header in ("if-none-match", "if-match"):
        cluster.server.ignores.add(header)
        try:
            cluster.requires_of_master("a cluster would lose data there", new)
        finally:
            cluster.server.ignores.clear()
    cluster.server.settings["lifecycle"] = (
        "<LifecycleConfiguration><Rule><ID>old</ID><Status>Enabled</Status>"
        "<Expiration><Days>7</Days></Expiration></Rule></LifecycleConfiguration>"
    )
    try:
        cluster.requires_of_master("would lose objects: the rule 'old'", new)
    finally:
        cluster.server.settings.clear()
    assert cluster.keys("new/") == []
