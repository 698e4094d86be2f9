"""The previous release and this one work together: programs with servers, servers with each other,
and this release with what the previous one has stored.

`previous` holds the wheel of the previous release. Whoever publishes a release replaces it with the
wheel of that release (CONTRIBUTING.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

import percolator
from percolator import Database, Table, codecs
from percolator.services.local import process
from percolator.services.local.cluster import LocalCluster
from tests.integration.command_line import CommandLine

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
(WHEEL,) = (HERE / "previous").glob("percolator_store-*.whl")
PREVIOUS = WHEEL.name.split("-")[1]
THIS = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
FORGOTTEN_SECONDS = 30.0
OBSERVERS = "watched_accounts:observers"

MODULE = """
from percolator import Table, codecs, observes

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)
doubled = accounts.column("doubled", codecs.integer)


@observes(balance)
async def double(tx, row):
    await tx.set(row, doubled, 2 * await tx.get(row, balance, default=0))


observers = [double]
"""

PROGRAM = """
import sys
import percolator
from watched_accounts import accounts, balance, doubled, observers

with percolator.connect(sys.argv[1]) as db:
    db.create_table(accounts, splits=["m"], exist_ok=True)
    db.register_observers(observers)  # the worker may not have noticed that the table exists
    with db.transaction() as tx:
        for row in ("bob", "zoe"):
            tx.set(row, balance, tx.get(row, balance, default=0) + 1)
    db.wait_for_observers(timeout=60)
    with db.snapshot() as snapshot:
        print(*((row.key, row[balance], row[doubled]) for row in snapshot.scan(accounts)))
"""

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)
doubled = accounts.column("doubled", codecs.integer)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the observers and the program of a user, and the previous release."""
    path = tmp_path_factory.mktemp("user")
    with zipfile.ZipFile(WHEEL) as archive:
        archive.extractall(path / "previous")
    (path / "watched_accounts.py").write_text(MODULE)
    (path / "program.py").write_text(PROGRAM)
    return path


class Releases:
    """Decides of which release the processes are that are started from now on."""

    def __init__(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._here = here
        self._patch = monkeypatch

    def use(self, directory: Path) -> None:
        self._patch.setattr(process, "_ROOT", directory)
        self._patch.setenv("PYTHONPATH", f"{directory}{os.pathsep}{self._here}")

    def use_previous(self) -> None:
        self.use(self._here / "previous")

    def use_this(self) -> None:
        self.use(ROOT)


@pytest.fixture
def releases(here: Path, monkeypatch: pytest.MonkeyPatch) -> Releases:
    return Releases(here, monkeypatch)


def _program(here: Path, address: str) -> str:
    """What the user's program prints."""
    done = subprocess.run(
        [sys.executable, "-P", here / "program.py", address],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _cluster(data: Path) -> LocalCluster:
    return LocalCluster(data, tablet_servers=2, workers=1, observers=[OBSERVERS])


def _is_of(cluster: LocalCluster, release: str) -> bool:
    """Whether all servers are of this release. Those that were stopped stay listed for seconds."""
    command = CommandLine(cluster.address)
    until = time.monotonic() + FORGOTTEN_SECONDS
    while True:
        found = {one["version"] for one in command.data("status")["servers"]}
        if found == {release} or time.monotonic() > until:
            return found == {release}


def _shown(number: int) -> str:
    return f"('bob', {number}, {2 * number}) ('zoe', {number}, {2 * number})"


def _add_one(db: Database) -> None:
    with db.transaction() as tx:
        for row in ("bob", "zoe"):
            tx.increment(row, balance)


def test_programs_of_this_release_work_with_servers_of_the_previous_one_and_with_its_store(
    here: Path, releases: Releases, tmp_path: Path
) -> None:
    releases.use_previous()
    with _cluster(tmp_path / "cluster") as cluster:
        assert _program(here, cluster.address) == _shown(1)
        assert _is_of(cluster, PREVIOUS)
        releases.use_this()
        assert _program(here, cluster.address) == _shown(2)
        command = CommandLine(cluster.address)
        assert command.data("observers", "stats")[0]["waiting"] == 0
        assert command.data("status")["problems"] == []
    with _cluster(tmp_path / "cluster") as upgraded:
        assert _is_of(upgraded, THIS)
        assert _program(here, upgraded.address) == _shown(3)
        releases.use_previous()
        assert _program(here, upgraded.address) == _shown(4)


def test_servers_are_replaced_one_after_another_while_programs_of_both_releases_work(
    here: Path, releases: Releases, tmp_path: Path
) -> None:
    releases.use_previous()
    with _cluster(tmp_path / "cluster") as cluster:
        assert _program(here, cluster.address) == _shown(1)
        assert _is_of(cluster, PREVIOUS)
        with percolator.connect(cluster.address) as db:
            for number, name in enumerate(sorted(cluster.processes), start=2):
                releases.use_this()
                cluster.processes[name].ask_to_stop()
                cluster.processes[name].wait_stopped()
                cluster.restart(name)
                cluster.wait_workers()
                _add_one(db)
                db.wait_for_observers(timeout=60)
                with db.snapshot() as snapshot:
                    assert (
                        snapshot.get("bob", doubled) == snapshot.get("zoe", doubled) == 2 * number
                    )
        releases.use_previous()
        assert _program(here, cluster.address) == _shown(len(cluster.processes) + 2)
        assert _is_of(cluster, THIS)
