"""A whole cluster on this machine: every service a process, all below one data directory.

    DATA/store      the cluster's store root
    DATA/logs       a log per process
    DATA/run        ready files, the lock, and local.json: who runs where

One launcher at a time owns DATA: it holds a lock on DATA/run/lock for as long as it lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from services.local.process import LocalClusterError, ServiceProcess

START_SECONDS = 30.0

_LOCK_ATTEMPTS = 20
_LOCK_RETRY_SECONDS = 0.02
"""Whoever asks whether a cluster is running holds its lock for a moment."""


class LocalCluster:
    """Starts, stops and hurts the processes of one local cluster. Not for several threads."""

    def __init__(
        self,
        data: Path,
        *,
        tablet_servers: int = 3,
        port: int = 0,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        if tablet_servers < 0:
            raise LocalClusterError(f"tablet servers: expected 0 or more, got {tablet_servers}")
        self.data = data.absolute()
        self._port = port
        self._tablet_servers = tablet_servers
        self._progress = progress
        self._lock: IO[str] | None = None
        self.processes: dict[str, ServiceProcess] = {}

    @property
    def address(self) -> str:
        """The one address that clients need."""
        return self.processes["master"].address

    def start(self) -> None:
        """Starts everything and returns when everything serves; on failure nothing is left."""
        self._take_data()
        try:
            self._start_all()
        except BaseException:
            try:
                self.stop()
            except LocalClusterError as error:
                # The cause of the failure is what matters, not what stopping ran into.
                self._progress(str(error))
            raise

    def stop(self) -> dict[str, int]:
        """Drains and stops everything. Returns the exit codes; the data stays."""
        codes: dict[str, int] = {}
        problems: list[str] = []
        master = [process for process in self.processes.values() if process.name == "master"]
        rest = [process for process in self.processes.values() if process.name != "master"]
        # The master last: the others talk to it while they drain.
        for together in (rest, master):
            for process in together:
                self._progress(f"stopping {process.name}")
                process.ask_to_stop()
            for process in together:
                try:
                    codes[process.name] = process.wait_stopped()
                except LocalClusterError as error:
                    problems.append(str(error))
        (self._run / "local.json").unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if problems:
            raise LocalClusterError("; ".join(problems))
        return codes

    def restart(self, name: str) -> None:
        """Starts a process that was killed or stopped, on its old ports."""
        process = self.processes[name]
        process.start()
        process.wait_ready(START_SECONDS)
        self._write_state()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _run(self) -> Path:
        return self.data / "run"

    def _take_data(self) -> None:
        for directory in (self.data / "store", self.data / "logs", self._run):
            make_directory(directory)
        lock = _open_lock(self._run / "lock")
        for attempt in range(_LOCK_ATTEMPTS):
            if _is_locked(lock):
                break
            if attempt + 1 == _LOCK_ATTEMPTS:
                lock.close()
                raise LocalClusterError(f"--data: a cluster is running on {self.data} already")
            time.sleep(_LOCK_RETRY_SECONDS)
        self._lock = lock
        # That of a launcher that was killed: its process id may be anybody's by now.
        (self._run / "local.json").unlink(missing_ok=True)

    def _start_all(self) -> None:
        store = str(self.data / "store")
        master = self._add("master", "services.master", ["--store", store])
        if self._port:
            master.listen_on(f"127.0.0.1:{self._port}")
        self._launch([master])
        found = ["--store", store, "--masters", master.address]
        rest = [
            self._add("oracle", "services.oracle", found),
            self._add("lockservice", "services.lockservice", ["--masters", master.address]),
        ]
        rest += [
            self._add(f"tabletserver-{number}", "services.tabletserver", found)
            for number in range(1, self._tablet_servers + 1)
        ]
        self._launch(rest)
        self._write_state()

    def _add(self, name: str, module: str, arguments: list[str]) -> ServiceProcess:
        process = ServiceProcess(name, module, arguments, logs=self.data / "logs", run=self._run)
        self.processes[name] = process
        return process

    def _launch(self, processes: list[ServiceProcess]) -> None:
        for process in processes:
            self._progress(f"starting {process.name}")
            process.start()
        for process in processes:
            process.wait_ready(START_SECONDS)

    def _write_state(self) -> None:
        state = {
            "pid": os.getpid(),
            "address": self.address,
            "processes": [
                {
                    "name": process.name,
                    "pid": process.pid,
                    "address": process.address,
                    "log": str(process.log),
                }
                for process in self.processes.values()
            ],
        }
        temporary = self._run / "local.json.tmp"
        temporary.write_text(json.dumps(state, indent=2) + "\n")
        temporary.rename(self._run / "local.json")


def running(data: Path) -> dict[str, object] | None:
    """The state of the cluster that runs on this data directory; None when none does.

    It takes the lock for an instant to see whether it is free: a launcher that starts at this very
    moment would find it taken.
    """
    lock = data / "run" / "lock"
    if not lock.exists():
        return None
    with _open_lock(lock) as opened:
        if _is_locked(opened):
            # Nobody held it: whatever state is there was left by a killed launcher.
            return None
    return read_state(data)


def read_state(data: Path) -> dict[str, object]:
    """What the last launcher wrote; empty while one starts or stops."""
    state_file = data / "run" / "local.json"
    try:
        state: dict[str, object] = json.loads(state_file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LocalClusterError(f"--data: cannot read {state_file}: {error}") from None
    return state


def make_directory(path: Path) -> None:
    """Below the data directory."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalClusterError(f"--data: cannot make {path}: {error.strerror}") from None


def _open_lock(path: Path) -> IO[str]:
    try:
        return path.open("a+")
    except OSError as error:
        raise LocalClusterError(f"--data: cannot open {path}: {error.strerror}") from None


def _is_locked(file: IO[str]) -> bool:
    """Whether it is locked by us, now; False when somebody else holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LocalClusterError(f"--data: cannot lock {file.name}: {error.strerror}") from None
    return True
