"""Drivers that a test starts and kills, with everything that they have started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.spark.gates import Gates
from tests.spark.sessions import ROOT


class Driver:
    """A running driver program. Leaving its block kills what is left of it."""

    def __init__(
        self,
        gates: Gates,
        directory: Path,
        *,
        writes: Sequence[Mapping[str, Any]],
        streams: Sequence[Mapping[str, Any]] = (),
        cluster: bool = False,
    ) -> None:
        plan = {
            "directory": str(directory), "cluster": cluster, "writes": writes, "streams": streams
        }  # fmt: skip
        self.moments: dict[str, list[int]] = {}
        """When each cell of a table was committed that a driver with executors of its own wrote."""
        self._gates = gates
        self._log = (directory / "driver.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.driver_program", json.dumps(plan)],
            cwd=ROOT,
            env={**os.environ, "SPARK_LOCAL_DIRS": str(directory)},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def halted(self, gate: str) -> int:
        """Waits until a process has come to the gate, which is closed, and returns its number."""
        return self._gates.wait(gate, self._require_running)

    def kill(self) -> set[int]:
        """`kill -9` of the driver and of all that it has started. Returns the killed processes."""
        program = psutil.Process(self._process.pid)
        started = [one for one in program.children(recursive=True) if _runs(one)]
        # Java comes first: it must not hear of the end of a task, and give up its job.
        started.sort(key=lambda process: process.name() != "java")
        assert killed(started[0]), "Java had ended before"
        for process in [*started[1:], program]:
            killed(process)  # some have ended by themselves since Java has
        self._process.wait()  # otherwise, the exit could still see it run, and kill it again
        return {process.pid for process in started}

    def ended(self) -> dict[str, str]:
        """Error of each batch write, or nothing."""
        text, _ = self._process.communicate()
        assert self._process.returncode == 0, self._said()
        found = json.loads(text.splitlines()[-1])
        assert isinstance(found, dict)
        self.moments = found["moments"]
        ended = found["ended"]
        assert isinstance(ended, dict)
        return ended

    def _require_running(self) -> None:
        assert self._process.poll() is None, self._said()

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4_000:]

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            program = psutil.Process(self._process.pid)
            for process in [*program.children(recursive=True), program]:
                killed(process)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


def killed(process: psutil.Process) -> bool:
    """`kill -9`. False if the process had ended before: then nothing was killed."""
    try:
        if not _runs(process):
            return False
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    return True


def _runs(process: psutil.Process) -> bool:
    return bool(process.status() != psutil.STATUS_ZOMBIE)
