"""The example in Rust, built from the protos alone, against a cluster of processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import percolator
from percolator import Table, codecs
from percolator.services.local.cluster import LocalCluster

pytestmark = [pytest.mark.rust, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CRATE = ROOT / "examples/rust_client"
RUN_SECONDS = 100


@pytest.fixture(scope="module")
def bank() -> Path:
    """The built program."""
    cargo = shutil.which("cargo")
    assert cargo is not None, "cargo is not installed"
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "var/rust"))
    subprocess.run(
        [cargo, "build", "--locked", "--quiet"],
        cwd=CRATE,
        env={**os.environ, "CARGO_TARGET_DIR": str(target)},
        check=True,
    )
    return target / "debug/percolator-bank"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    data = tmp_path_factory.mktemp("cluster")
    with LocalCluster(data, tablet_servers=2, gateways=2) as started:
        yield started


def test_money_is_neither_made_nor_lost_and_the_library_reads_what_rust_wrote(
    bank: Path, cluster: LocalCluster
) -> None:
    done = subprocess.run(
        [bank, cluster.gateway_address, "200"],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    transfers, _, repeats, total, accounts = map(int, re.findall(r"\d+", done.stdout))
    assert (transfers, total, accounts) == (200, 1_000, 10)
    assert repeats >= 20
    table = Table("rust-accounts")
    balance = table.column("balance", codecs.integer)
    with percolator.connect(cluster.address) as db, db.snapshot() as snapshot:
        assert sum(row[balance] for row in snapshot.scan(table)) == 1_000


def test_a_gateway_that_is_killed_in_the_middle_loses_no_commit_and_doubles_none(
    bank: Path, cluster: LocalCluster
) -> None:
    victim = cluster.processes["gateway"]
    running = subprocess.Popen(
        [bank, cluster.gateway_address, "600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # Part of the transfers, since it ends by itself only when all of them are committed.
        with pytest.raises(subprocess.TimeoutExpired):
            running.communicate(timeout=0.5)
        victim.kill()
        output, errors = running.communicate(timeout=RUN_SECONDS)
    finally:
        running.kill()
    cluster.restart(victim.name)
    assert errors == ""
    assert running.returncode == 0
    assert "1000 in 10 accounts together" in output


def test_a_gateway_that_stands_still_is_left_for_the_next_one(
    bank: Path, cluster: LocalCluster
) -> None:
    still = cluster.processes["gateway"]
    still.pause()
    try:
        done = subprocess.run(
            [bank, cluster.gateway_address, "20"],
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
        )
    finally:
        still.resume()
    assert done.stderr == ""
    assert done.returncode == 0


def test_an_unreachable_address_is_an_error_and_no_panic(bank: Path) -> None:
    done = subprocess.run([bank], capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    done = subprocess.run(
        [bank, "127.0.0.1:1", "1"], capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert done.returncode == 1
    assert "panicked" not in done.stderr
