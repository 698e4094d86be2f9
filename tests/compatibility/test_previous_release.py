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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
IN_WHEEL = WHEEL.name.split("-")[1]
PREVIOUS = f"{IN_WHEEL}+previous"
"""The version that processes of the wheel report: not that of this tree, even while both have the
same number."""
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

LOAD = """
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import percolator
from percolator import OutcomeUnknown, RetryPolicy, Table, codecs
from watched_accounts import accounts, balance, observers

moves = Table("moves")
move = moves.column("move", codecs.json)
address, name, rows, full = sys.argv[1], sys.argv[2], sys.argv[3].split(","), int(sys.argv[4])
stopping, saying = threading.Event(), threading.Lock()


def say(line):
    with saying:
        print(line, flush=True)


def transfer(tx, key, source, target, amount):
    tx.set(source, balance, tx.get(source, balance, default=full) - amount)
    tx.set(target, balance, tx.get(target, balance, default=full) + amount)
    tx.set(key, move, [source, target, amount])


def transfers(db, thread):
    number = 0
    while not stopping.is_set():
        number += 1
        key = f"{thread}-{name}-{number}"
        source, target = random.sample(rows, 2)
        try:
            db.run(transfer, key, source, target, random.randint(1, 9))
        except OutcomeUnknown:
            continue  # not acknowledged: whether there is a move says whether money was moved
        say(key)


say(version("percolator-store"))
with percolator.connect(address, retry=RetryPolicy(deadline_seconds=60.0)) as db:
    db.create_table(accounts, splits=["m"], exist_ok=True)
    db.create_table(moves, splits=["2"], exist_ok=True)
    db.register_observers(observers)
    with ThreadPoolExecutor() as pool:
        working = [pool.submit(transfers, db, thread) for thread in range(4)]
        sys.stdin.read()
        stopping.set()
    for one in working:
        one.result()
"""

ROWS = "abcdwxyz"
FULL = 1_000
"""The balance of an account that was never written."""
STEP_SECONDS = 60.0
STEP_COMMITS = 20
"""So many acknowledged transfers show that the cluster works with the processes that it has."""
UPGRADED = (
    "lockservice",
    "oracle-2",
    "oracle",
    "master",
    "tabletserver-1",
    "tabletserver-2",
    "worker",
)

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)
doubled = accounts.column("doubled", codecs.integer)
moves = Table("moves")
move = moves.column("move", codecs.json)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the observers and the program of a user, and the previous release."""
    path = tmp_path_factory.mktemp("user")
    with zipfile.ZipFile(WHEEL) as archive:
        archive.extractall(path / "previous")
    metadata = path / "previous" / f"percolator_store-{IN_WHEEL}.dist-info" / "METADATA"
    text = metadata.read_text()
    assert f"\nVersion: {IN_WHEEL}\n" in text
    metadata.write_text(text.replace(f"\nVersion: {IN_WHEEL}\n", f"\nVersion: {PREVIOUS}\n", 1))
    (path / "watched_accounts.py").write_text(MODULE)
    (path / "program.py").write_text(PROGRAM)
    (path / "load.py").write_text(LOAD)
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
    """Output of the user's program."""
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
    """True if all servers are of this release. Those that were stopped stay listed for seconds."""
    command = CommandLine(cluster.address)
    until = time.monotonic() + FORGOTTEN_SECONDS
    while True:
        found = {one["version"] for one in command.data("status")["servers"]}
        if found == {release} or time.monotonic() > until:
            return found == {release}


def _shown(number: int) -> str:
    return f"('bob', {number}, {2 * number}) ('zoe', {number}, {2 * number})"


def _until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + STEP_SECONDS
    while not holds():
        assert time.monotonic() < until, f"not within {STEP_SECONDS:g} s: {what}"
        time.sleep(0.05)


class Load:
    """A program that transfers money until it is stopped, of the release that is in use when it
    starts."""

    def __init__(self, here: Path, address: str, release: str, name: str) -> None:
        self._said = here / f"{name}.out"
        self._errors = here / f"{name}.err"
        arguments = [address, name, ",".join(ROWS), str(FULL)]
        with open(self._said, "wb") as said, open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", here / "load.py", *arguments],
                cwd=here,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=errors,
            )
        _until(lambda: bool(self._lines()), f"{name} begins")
        assert self._lines()[0] == release

    def acknowledged(self) -> set[str]:
        """The transfers whose commits were acknowledged."""
        return set(self._lines()[1:])

    def works(self, where: str) -> None:
        """Returns once some more transfers have committed."""
        enough = len(self.acknowledged()) + STEP_COMMITS

        def has_worked() -> bool:
            assert self._process.poll() is None, self._errors.read_text()
            return len(self.acknowledged()) >= enough

        _until(has_worked, f"{STEP_COMMITS} transfers {where}")

    def stop(self) -> None:
        self._process.communicate(timeout=STEP_SECONDS)
        assert self._process.returncode == 0, self._errors.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _lines(self) -> list[str]:
        # The last line may not be complete.
        return self._said.read_text().split("\n")[:-1]


@contextmanager
def _load(here: Path, address: str, release: str, name: str) -> Iterator[Load]:
    load = Load(here, address, release, name)
    try:
        yield load
        load.stop()
    finally:
        load.kill()


def _replace(cluster: LocalCluster, names: tuple[str, ...], load: Load) -> None:
    """Replaces one process after another, while the cluster is in use."""
    for name in names:
        cluster.processes[name].ask_to_stop()
        assert cluster.processes[name].wait_stopped() == 0
        cluster.restart(name)
        load.works(f"with another {name}")


def _require_all_kept(db: Database, acknowledged: set[str]) -> None:
    """Every acknowledged transfer is there, the balances are what all transfers make of them, and
    the observer has handled each."""
    db.wait_for_observers(timeout=60)
    expected = Counter(dict.fromkeys(ROWS, FULL))
    with db.snapshot() as snapshot:
        found = {row.key: row[move] for row in snapshot.scan(moves)}
        for source, target, amount in found.values():
            expected[source] -= amount
            expected[target] += amount
        balances = {row.key: row[balance] for row in snapshot.scan(accounts)}
        results = {row.key: row[doubled] for row in snapshot.scan(accounts)}
    assert acknowledged - found.keys() == set()
    assert balances == expected
    assert sum(balances.values()) == len(ROWS) * FULL
    assert results == {row: 2 * money for row, money in balances.items()}


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


def test_a_cluster_in_use_is_upgraded_process_by_process_and_goes_back_without_losing_a_commit(
    here: Path, releases: Releases, tmp_path: Path
) -> None:
    data = tmp_path / "cluster"
    releases.use_previous()
    with LocalCluster(
        data, tablet_servers=2, oracles=2, workers=1, observers=[OBSERVERS]
    ) as cluster:
        assert set(UPGRADED) == set(cluster.processes)
        identity = (data / "store" / "cluster.json").read_text()
        with _load(here, cluster.address, PREVIOUS, "old") as old:
            old.works("in a cluster of the previous release")
            cluster.wait_workers()
            assert _is_of(cluster, PREVIOUS)
            releases.use_this()
            _replace(cluster, UPGRADED, old)
            assert _is_of(cluster, THIS)
        with percolator.connect(cluster.address) as db:
            _require_all_kept(db, old.acknowledged())
        with _load(here, cluster.address, THIS, "new") as new:
            new.works("in a cluster of this release")
            # Back, as long as the format of the store is that of the previous release.
            assert (data / "store" / "cluster.json").read_text() == identity
            releases.use_previous()
            _replace(cluster, UPGRADED[::-1], new)
            assert _is_of(cluster, PREVIOUS)
        with _load(here, cluster.address, PREVIOUS, "again") as again:
            again.works("after the way back")
        with percolator.connect(cluster.address) as db:
            acknowledged = old.acknowledged() | new.acknowledged() | again.acknowledged()
            _require_all_kept(db, acknowledged)
