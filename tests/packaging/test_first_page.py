"""The first page of README.md, from `pip install` to an observer that runs: every command and
every program as they are there, in a fresh clone and an empty environment, within a minute.

Only the port is another one: something else may have the usual one on a machine that runs tests.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.documents.commands import ROOT, Block, blocks
from tests.packaging.conftest import empty_environment

pytestmark = pytest.mark.timeout(400)  # for fetching, which is done before and is not timed

SECONDS_MAX = 60.0
SHELL = ["bash", "-euo", "pipefail", "-c"]
LAUNCH = "percolator dev"


def first_page() -> list[Block]:
    """The blocks below "Begin here"."""
    lines = (ROOT / "README.md").read_text().splitlines()
    begin = lines.index("## Begin here") + 1
    end = next(n for n, line in enumerate(lines, 1) if n > begin and line.startswith("#"))
    return [block for block in blocks(ROOT / "README.md") if begin < block.line < end]


def free_port() -> int:
    """One that is free for a master, with the gateway's, ten above, free as well."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", port + 10))
            except (OSError, OverflowError):
                continue
            return port


@dataclass
class Reader:
    """Has a terminal for the cluster, and another for everything else."""

    here: Path
    environment: dict[str, str]
    port: int
    printed: str = ""
    launcher: subprocess.Popen[str] | None = None
    lines: list[str] = field(default_factory=list)

    def take(self, block: Block) -> None:
        if block.told("not run:") or block.language == "text":
            return
        if path := block.told("file:"):
            (self.here / path).write_text(self._here(block.text))
        elif block.language == "output":
            assert self.printed.strip() == block.text.strip(), block.place
        elif block.text.startswith(LAUNCH):
            self._launch(block.text.strip())
        else:
            self._run(block)

    def stop(self) -> None:
        """Presses Ctrl-C where the cluster runs."""
        if self.launcher is None:
            return
        self.launcher.send_signal(signal.SIGINT)
        said, _ = self.launcher.communicate(timeout=60)
        assert self.launcher.returncode == 0, said
        self.launcher = None

    def end(self) -> None:
        """Whatever happened, nothing stays behind: the services end with their launcher."""
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.communicate()

    def _launch(self, command: str) -> None:
        self.stop()
        self.launcher = subprocess.Popen(
            [*SHELL, f"exec {command} --port {self.port}"],
            cwd=self.here,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with_worker = "--observers" in command
        awaited = "worker runs its observers" if with_worker else "Percolator runs at"
        for line in self.launcher.stderr or ():
            self.lines.append(line)
            if awaited in line:
                return
        raise AssertionError("".join(self.lines))

    def _run(self, block: Block) -> None:
        done = subprocess.run(
            [*SHELL, self._here(block.text)],
            cwd=self.here,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{block.place}\n{done.stdout}{done.stderr}"
        self.printed = done.stdout

    def _here(self, text: str) -> str:
        return text.replace("localhost:7100", f"localhost:{self.port}")


def fresh_clone(directory: Path) -> Path:
    """The files of this checkout, as they are now, without anything that was built in it."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in tracked.rstrip("\0").split("\0"):
        if os.path.lexists(ROOT / name):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)
    return directory


def test_from_pip_install_to_an_observer_takes_at_most_a_minute(
    constraints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = {"PYTHONPATH", "PIP_FIND_LINKS"}  # other places of the package: a reader has none
    pip_only = {
        **{name: value for name, value in os.environ.items() if name not in hidden},
        "PIP_CONSTRAINT": str(constraints),
    }
    # pip keeps downloads: the time does not depend on the network.
    warm = empty_environment(tmp_path / "warm")
    install = [str(warm / "pip"), "install", "--quiet", ".[server]"]
    subprocess.run(install, check=True, env=pip_only, cwd=fresh_clone(tmp_path / "first"))
    bin_directory = empty_environment(tmp_path / "environment")
    port = free_port()
    here = fresh_clone(tmp_path / "here")
    reader = Reader(
        here,
        {
            **pip_only,
            "PATH": f"{bin_directory}:/usr/bin:/bin",
            "PERCOLATOR_ADDRESS": f"localhost:{port}",
            "COLUMNS": "200",
        },
        port,
    )
    page = first_page()
    assert [block.language for block in page].count("sh") >= 4
    began = time.monotonic()
    try:
        for block in page:
            reader.take(block)
        seconds = time.monotonic() - began
        assert reader.printed.split()[-3:] == ["bob", "overdrawn", "true"]
        reader.stop()
    finally:
        reader.end()
    with capsys.disabled():
        print(f"\nREADME.md, from `pip install` to an observer: {seconds:.1f} s", end="")
    assert seconds <= SECONDS_MAX
