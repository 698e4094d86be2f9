"""A tablet server whose disk is full as far as it allows: real processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import percolator
from percolator import Table, codecs
from percolator.cli.app import app
from percolator.errors import OutcomeUnknown
from percolator.limits import Limits
from percolator.services.local.cluster import LocalCluster
from tests.command_line import CliRunner

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SECONDS = 30.0
WRONG = 3


def all_in_reserve(name: str, service: str) -> Sequence[str]:
    """The first tablet server keeps more in reserve than any disk has."""
    return (
        (service, "--disk-reserve-bytes", str(10**15)) if name == "tabletserver-1" else (service,)
    )


@pytest.fixture(name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    data = tmp_path_factory.mktemp("cluster")
    with LocalCluster(data, tablet_servers=1, program=all_in_reserve) as cluster:
        yield cluster


def run(address: str, *arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(app, ["--json", "--address", address, *arguments])
    return done.exit_code, json.loads(done.stdout)


def test_a_server_that_refuses_writes_is_found_by_status_and_servers(cluster: LocalCluster) -> None:
    table = Table("people")
    name = table.column("name", codecs.text)
    full = cluster.processes["tabletserver-1"].address
    with percolator.connect(cluster.address, limits=Limits(call_seconds=2.0)) as db:
        db.create_table(table)
        # Not even the marker that would roll it back can be stored.
        with pytest.raises(OutcomeUnknown, match="kept in reserve"), db.transaction() as tx:
            tx.set("ada", name, "Ada")
    deadline = time.monotonic() + SECONDS
    while True:
        code, found = run(cluster.address, "status", "--check")
        wanted = f"tablet server {full} takes no writes: "
        if any(one.startswith(wanted) for one in found["problems"]):
            break
        assert time.monotonic() < deadline, found["problems"]
    assert code == WRONG
    shown = {one["address"]: one["writes_refused"] for one in found["servers"]}
    assert "kept in reserve" in shown.pop(full)
    assert not any(shown.values())
    _, [server] = run(cluster.address, "servers")
    assert "kept in reserve" in server["writes_refused"]
    text = CliRunner().invoke(app, ["--address", cluster.address, "status"]).stdout
    assert "1, takes no writes" in text
