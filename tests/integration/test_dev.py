"""`percolator dev`, as a user has it: one command, a program, a change, a kill, and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import percolator
from percolator import Table, codecs
from percolator.services.local.directory import running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

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


def test_observers_that_name_no_list_are_refused_before_anything_starts(here: Path) -> None:
    launcher = Launcher(here, "--observers", "shop")
    assert launcher.process.wait(60) == 2
    assert launcher.said().splitlines() == [
        "error: --observers: expected module:name, such as shop:observers, got 'shop'"
    ]
    assert not (here / ".percolator").exists()


def test_what_was_temporary_is_gone_after_sigterm(here: Path) -> None:
    with launched(here, "--temporary", "--tablet-servers", "0", "--gateways", "0") as launcher:
        launcher.hears("percolator dev ps --data ")
        data = Path(launcher.said().split("percolator dev ps --data ")[1].split()[0])
        assert data.is_dir()
        launcher.process.terminate()
        assert launcher.process.wait(60) == 0, launcher.said()
    assert not data.exists()
    assert not (here / ".percolator").exists()


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
        # Nobody may have asked for the exit codes of orphans yet.
        alive = [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        assert alive == []
        again.process.terminate()
        assert again.process.wait(60) == 0, again.said()


def test_a_store_of_a_later_release_names_the_releases_that_can_read_it(here: Path) -> None:
    store = here / ".percolator" / "store"
    store.mkdir(parents=True)
    identity = {"cluster_id": "c", "format": 99, "created_by": "9.9.9"}
    (store / "cluster.json").write_text(json.dumps(identity))
    launcher = Launcher(here, "--tablet-servers", "0")
    assert launcher.process.wait(60) == 2
    (line,) = (line for line in launcher.said().splitlines() if line.startswith("error: "))
    assert "has format 99, written by release 9.9.9" in line
    assert line.endswith("use a release that opens format 99")
