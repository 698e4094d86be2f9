"""The local launcher: one per data directory, all or nothing, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import percolator
from percolator import Table, codecs
from percolator.errors import InvalidArgument, StoreUnusable
from percolator.services.chassis.files import DiskThreads
from percolator.services.local import process as process_module
from percolator.services.local.cluster import START_SECONDS, LocalCluster
from percolator.services.local.directory import Ownership, running
from percolator.services.local.process import LocalClusterError, NotReadyInTime, ServiceProcess
from percolator.services.tabletserver.storage import LevelDBStorage
from percolator.v1 import cluster_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from tests.integration.command_line import CommandLine
from tests.unit.percolator.test_private_files import wider_than_private


@dataclass(frozen=True)
class Stopped:
    """A cluster that has run and was stopped."""

    data: Path
    cluster_id: str


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=0) as cluster:
        return Stopped(cluster.data, cluster_id_of(cluster))


def cluster_id_of(cluster: LocalCluster) -> str:
    return str(CommandLine(cluster.address).data("status")["cluster_id"])


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Processes that run. Nobody may have asked for the exit codes of orphans yet, and in a
    container without an init process, nobody ever does."""
    alive = []
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                alive.append(one)
    return alive


def wait_until(condition: Any, seconds: float = 15) -> None:
    """Polls another process's state: virtual time does not work across processes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_restarted_cluster_keeps_its_identity_and_no_second_launcher_runs_on_its_data(
    stopped: Stopped,
) -> None:
    with LocalCluster(stopped.data, tablet_servers=0) as again:
        assert cluster_id_of(again) == stopped.cluster_id
        with pytest.raises(LocalClusterError, match="already running on"):
            LocalCluster(stopped.data, tablet_servers=0).start()
        assert again.processes["master"].exit_code is None


def test_whatever_the_umask_a_cluster_and_its_exports_are_for_their_owner_only(
    tmp_path: Path,
) -> None:
    """Also what LevelDB makes, which knows no modes."""
    data, out = tmp_path / "cluster", tmp_path / "out"
    before = os.umask(0)
    try:
        with LocalCluster(data, tablet_servers=1, gateways=1) as cluster:
            operator = CommandLine(cluster.address)
            operator.run("tables", "create", "notes")
            operator.run("set", "notes", "row", "column=value")
            operator.run("export", str(out))
            assert wider_than_private(tmp_path) == {}
        # As `mkdir` makes it, and then with a group for somebody who copies the store.
        for given, kept in ((0o755, 0o700), (0o750, 0o750)):
            (data / "store").chmod(given)
            with LocalCluster(data, tablet_servers=1) as cluster:
                CommandLine(cluster.address).run("set", "notes", "row", f"column={given}")
            assert stat.S_IMODE((data / "store").stat().st_mode) == kept
    finally:
        os.umask(before)
    found = {path.stat().st_mode & 0o077 for path in (data / "store").rglob("*")}
    assert found == {0o000, 0o040, 0o050}, "made before and after the group was given"


def test_while_a_process_is_dead_no_other_one_gets_its_ports(tmp_path: Path) -> None:
    arguments = ["--store", str(tmp_path / "store")]
    master = ServiceProcess("master", "master", arguments, logs=tmp_path, run=tmp_path)
    master.start()
    try:
        before = master.wait_ready(START_SECONDS)
        master.kill()
        for address in (before.address, before.metrics_address):
            with socket.socket() as thief, pytest.raises(OSError, match="in use"):
                thief.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        master.start()
        after = master.wait_ready(START_SECONDS)
    finally:
        master.ask_to_stop()
        master.wait_stopped()
    assert (after.address, after.metrics_address) == (before.address, before.metrics_address)


def test_a_start_is_waited_for_while_the_process_works_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "TELL_SECONDS", 0.05)
    arguments = ["--store", str(tmp_path / "store")]
    master = ServiceProcess("master", "master", arguments, logs=tmp_path, run=tmp_path)
    master.log.write_text("what an earlier process logged\n")
    master.start()
    master.pause()
    said: list[str] = []
    try:
        with pytest.raises(NotReadyInTime, match=r"has done nothing for 0\.5 s: it logged nothing"):
            master.wait_ready(START_SECONDS, idle_seconds=0.5, say=said.append)
        assert said
        assert said[0].startswith("master is still starting after 0 s, ")
        with pytest.raises(NotReadyInTime, match=r"was not ready within 0\.1 s: it logged nothing"):
            master.wait_ready(0.1)
        master.resume()
        master.wait_ready(START_SECONDS, idle_seconds=30.0)
    finally:
        master.ask_to_stop()
        master.wait_stopped()


def test_a_launcher_that_cannot_start_everything_leaves_nothing_behind(tmp_path: Path) -> None:
    Ownership(tmp_path, print).release()
    (tmp_path / "store" / "somebody-elses-file").write_text("precious")
    failing = LocalCluster(tmp_path, tablet_servers=0)
    with pytest.raises(LocalClusterError, match="master exited with 2"):
        failing.start()
    assert failing.processes["master"].exit_code == 2
    assert running(tmp_path) is None
    assert (tmp_path / "store" / "somebody-elses-file").read_text() == "precious"


def test_killing_the_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "percolator.cli",
        "dev",
        "--data",
        str(tmp_path),
        "--port",
        "0",
    ]
    command += ["--tablet-servers", "0", "--gateways", "0"]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: bool(running(tmp_path)), seconds=30)
        state: Any = running(tmp_path)
        services = [psutil.Process(process["pid"]) for process in state["processes"]]
        assert len(services) == 3
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not living(services), seconds=20)


def test_a_detached_cluster_is_stopped_by_down(tmp_path: Path) -> None:
    base = [sys.executable, "-m", "percolator.cli", "dev"]
    up = [*base, "--data", str(tmp_path), "--port", "0", "--tablet-servers", "0", "--detach"]
    started = subprocess.run(up, check=True, capture_output=True, text=True, timeout=40)
    state: Any = running(tmp_path)
    try:
        assert started.stdout.strip() == state["address"]
        down = [*base, "down", "--data", str(tmp_path)]
        subprocess.run(down, check=True, capture_output=True, timeout=40)
    finally:
        if running(tmp_path):
            os.kill(state["pid"], signal.SIGKILL)
    assert running(tmp_path) is None
    assert not any(psutil.pid_exists(process["pid"]) for process in state["processes"])


def test_the_reason_why_a_detached_cluster_did_not_start_is_one_line(tmp_path: Path) -> None:
    Ownership(tmp_path, print).release()
    (tmp_path / "store" / "somebody-elses-file").touch()
    command = [
        sys.executable,
        "-m",
        "percolator.cli",
        "dev",
        "--data",
        str(tmp_path),
        "--port",
        "0",
    ]
    command += ["--detach"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: master exited with 2 while starting: master: store: ")


# Real processes tell the master which kind they are, when two claim one address.


SECONDS = 10.0


@pytest.fixture(name="cluster")
def _cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", tablet_servers=1, gateways=1) as started:
        yield started


async def kinds_at(cluster: LocalCluster, network: GrpcNetwork, address: str) -> list[int]:
    describe = network.unary(cluster.address, methods.DESCRIBE)
    found = await describe(pb.DescribeRequest(), SECONDS)
    return [one.kind for one in found.servers if one.address == address]


async def test_no_kind_is_listed_at_the_address_of_another_that_answers_there(
    network: GrpcNetwork, cluster: LocalCluster
) -> None:
    describe = network.unary(cluster.address, methods.DESCRIBE)
    servers = (await describe(pb.DescribeRequest(), SECONDS)).servers
    assert len(servers) == 5
    register = network.unary(cluster.address, methods.REGISTER)
    for one in servers:
        for name in pb.ServiceKind.keys():  # noqa: SIM118 (it is no dict)
            if pb.ServiceKind.Value(name) in (one.kind, pb.SERVICE_KIND_UNSPECIFIED):
                continue
            false = pb.Server()
            false.CopyFrom(one)
            false.MergeFrom(pb.Server(kind=name, server_id="another"))
            is_master = pb.ServiceKind.Value(name) == pb.SERVICE_KIND_MASTER
            why = "masters do not register" if is_master else ".* answers as a "
            with pytest.raises(InvalidArgument, match=rf"server\.kind: {why}"):
                await register(pb.RegisterRequest(server=false), SECONDS)
        assert await kinds_at(cluster, network, one.address) == [one.kind]


# A store that another process has open is refused, and the error names that process.


HOLD = (
    "import sys; from percolator.services.tabletserver.leveldb import DB; "
    "db = DB(sys.argv[1], create_if_missing=True); print(); input()"
)


def test_the_process_that_has_a_tablet_open_is_named(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        with pytest.raises(StoreUnusable, match=f"{tmp_path}: process {holder.pid} has it open"):
            LevelDBStorage(tmp_path, DiskThreads(0, "none"))
        holder.communicate(b"\n")


# `percolator dev`, as a user has it: one command, a program, a change, a kill, and Ctrl-C.

notes = Table("notes")
text = notes.column("text", codecs.text)
words = notes.column("words", codecs.integer)

# As the installed script: the working directory is not where Python looks for modules.
COMMAND = [sys.executable, "-P", "-m", "percolator.cli"]

OBSERVERS = """
from percolator import Table, Transaction, codecs, observes

notes = Table("notes")
text = notes.column("text", codecs.text)
words = notes.column("words", codecs.integer)


@observes(text)
def count(tx: Transaction, row: str) -> None:
    tx.set(row, words, len(tx.get(row, text, default="").split()))


observers = [count]
"""


class Launcher:
    """`percolator dev` in a directory, and what it has said so far."""

    def __init__(self, here: Path, *arguments: str) -> None:
        self._said = here.parent / f"{here.name}.said"
        command = [*COMMAND, "dev", "--port", "0", *arguments]
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                command, cwd=here, stdout=subprocess.DEVNULL, stderr=said
            )
        self._here = here

    def said(self) -> str:
        return self._said.read_text()

    def until(self, condition: Callable[[], object]) -> None:
        """Polls another process, which has no virtual time."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.said()
            assert self.process.poll() is None, self.said()
            time.sleep(0.02)

    def hears(self, line: str, times: int = 1) -> None:
        self.until(lambda: self.said().count(line) >= times)

    def dev(self, *arguments: str) -> str:
        """Another `percolator dev` command in the same directory."""
        done = subprocess.run(
            [*COMMAND, "dev", *arguments],
            cwd=self._here,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout + done.stderr


@contextmanager
def launched(here: Path, *arguments: str) -> Iterator[Launcher]:
    launcher = Launcher(here, *arguments)
    try:
        yield launcher
    finally:
        launcher.process.kill()
        launcher.process.wait()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A project whose observers are in a package called `services`, as many have."""
    project = tmp_path / "project"
    (project / "services").mkdir(parents=True)
    (project / "services" / "__init__.py").touch()
    (project / "services" / "shop.py").write_text(OBSERVERS)
    return project


@pytest.mark.timeout(180)
def test_from_the_first_line_to_ctrl_c(here: Path) -> None:
    with launched(here, "--tablet-servers=2", "--observers=services.shop:observers") as launcher:
        launcher.hears("percolator dev ps")
        state = running(here / ".percolator")
        assert state
        program = re.findall(
            r"^    (import percolator\n(?:    .*\n)+)", launcher.said(), re.MULTILINE
        )[0]
        program = program.replace("\n    ", "\n")
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
        launcher.hears("worker runs its observers")
        with percolator.connect(state["address"]) as db:
            db.run(lambda tx: tx.set("second", text, "two words"))
            db.wait_for_observers(timeout=60)
            assert db.get("second", words) == 2
            assert db.get("first", text) == "hello"

            (here / "services" / "shop.py").write_text(
                OBSERVERS.replace(".split())", ".split()) + 100")
            )
            launcher.hears("shop.py changed: workers restart")
            launcher.hears("worker runs its observers", times=2)
            db.run(lambda tx: tx.set("third", text, "three more words"))
            db.wait_for_observers(timeout=60)
            assert db.get("third", words) == 103

            assert launcher.dev("kill", "tabletserver-2").startswith("killed tabletserver-2")
            assert re.search(r"tabletserver-2 +\d+ +exited with -9", launcher.dev("ps"))
            assert launcher.dev("restart", "tabletserver-2").startswith("tabletserver-2 runs as")
            assert "exited" not in launcher.dev("ps")
            db.run(lambda tx: tx.set("fourth", text, "still here"))
            db.wait_for_observers(timeout=60)
            assert db.get("fourth", words) == 102
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.wait(60) == 0, launcher.said()
    assert running(here / ".percolator") is None


@pytest.mark.timeout(180)
def test_a_broken_module_is_told_and_the_corrected_one_runs(here: Path) -> None:
    (here / "services" / "shop.py").write_text("from percolator import nothing_of_that_name\n")
    options = ["--tablet-servers", "1", "--gateways", "0", "--observers", "services.shop:observers"]
    with launched(here, *options) as launcher:
        launcher.hears("worker exited with 2: ")
        assert "nothing_of_that_name" in launcher.said()
        state = running(here / ".percolator")
        assert state
        with percolator.connect(state["address"]) as db:
            db.create_table(notes)
        (here / "services" / "shop.py").write_text(OBSERVERS)
        launcher.hears("worker runs its observers")


@pytest.mark.timeout(180)
def test_observers_that_name_no_list_are_refused_before_anything_starts(here: Path) -> None:
    launcher = Launcher(here, "--observers", "shop")
    assert launcher.process.wait(60) == 2
    assert launcher.said().splitlines() == [
        "error: --observers: expected module:name, such as shop:observers, got 'shop'"
    ]
    assert not (here / ".percolator").exists()


@pytest.mark.timeout(180)
def test_what_was_temporary_is_gone_after_sigterm(here: Path) -> None:
    with launched(here, "--temporary", "--tablet-servers", "0", "--gateways", "0") as launcher:
        launcher.hears("percolator dev ps --data ")
        data = Path(launcher.said().split("percolator dev ps --data ")[1].split()[0])
        assert data.is_dir()
        launcher.process.terminate()
        assert launcher.process.wait(60) == 0, launcher.said()
    assert not data.exists()
    assert not (here / ".percolator").exists()


@pytest.mark.timeout(180)
def test_a_start_after_a_killed_launcher_is_not_confused_by_what_it_left(here: Path) -> None:
    options = ["--tablet-servers", "0", "--gateways", "0"]
    lock = here / ".percolator" / "run" / "processes"
    with launched(here, *options) as killed:
        killed.hears("percolator dev ps")
        state = running(here / ".percolator")
        assert state
        left = [psutil.Process(process["pid"]) for process in state["processes"]]
        # What the next launcher waits for: each process has the lock open for as long as it lives.
        for process in left:
            assert lock in {one.resolve() for one in Path(f"/proc/{process.pid}/fd").iterdir()}
    with launched(here, *options) as again:
        again.hears("percolator dev ps")
        assert living(left) == []
        again.process.terminate()
        assert again.process.wait(60) == 0, again.said()
