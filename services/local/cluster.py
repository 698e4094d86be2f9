"""A whole cluster on this machine: every service a process, all below one data directory.

    DATA/store      the cluster's store root
    DATA/logs       a log per process
    DATA/run        ready files, the lock, and local.json: which process runs where

One launcher at a time owns DATA: it holds a lock on DATA/run/lock while it lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from services.local.link import Link
from services.local.process import LocalClusterError, ServiceProcess

START_SECONDS = 30.0
"""How long a process may take until it serves, by default."""

Program = Callable[[str, str], Sequence[str]]
"""The module to run for a process, by its name and its usual module, with further arguments."""

_GATEWAY_PORT_STEP = 10
"""If the master has its usual port, 7100, the first gateway has its usual port too, 7110."""

_LOCK_ATTEMPTS = 20
_LOCK_RETRY_SECONDS = 0.02
"""A check whether a cluster is running holds its lock for a moment."""


class LocalCluster:
    """Starts, stops and hurts the processes of one local cluster. Not for several threads."""

    def __init__(
        self,
        data: Path,
        *,
        tablet_servers: int = 3,
        port: int = 0,
        masters: int = 1,
        oracles: int = 1,
        gateways: int = 0,
        workers: int = 0,
        observers: Sequence[str] = (),
        links: bool = False,
        hosts: int = 1,
        program: Program = lambda name, module: (module,),
        certificates: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """All masters and oracles but one are standbys. With `links`, the links between
        processes can be cut, and the processes are spread over `hosts` hosts, each with an address
        of its own.

        With a directory of `make certs`, everything uses mutual TLS, and clients need tokens.
        Workers run the lists of observers that `observers` names, as soon as their tables exist.
        A process that does not serve within `start_seconds` is an error: on a machine with much
        else to do, allow more.
        """
        if not 0 < start_seconds < inf:
            raise LocalClusterError(f"start_seconds: expected more than 0, got {start_seconds}")
        if tablet_servers < 0:
            raise LocalClusterError(f"tablet servers: expected 0 or more, got {tablet_servers}")
        if links and port:
            raise LocalClusterError("a master behind a link has the port of its link")
        if gateways < 0:
            raise LocalClusterError(f"gateways: expected 0 or more, got {gateways}")
        if workers < 0 or bool(workers) != bool(observers):
            raise LocalClusterError("workers and observers: expected both of them, or neither")
        self.data = data.absolute()
        self._port = port
        self._tablet_servers = tablet_servers
        self._masters = masters
        self._oracles = oracles
        self._gateways = gateways
        self._workers = workers
        self._observers = observers
        self._linked = links
        self._hosts = hosts
        self._program = program
        self._security = [] if certificates is None else _security(certificates / "cluster")
        self.links: dict[str, Link] = {}
        """Links by the name of the process that all others reach through it."""
        self.host_of: dict[str, int] = {}
        """The host that each process pretends to be on."""
        self._progress = progress
        self._start_seconds = start_seconds
        self._lock: IO[str] | None = None
        self.processes: dict[str, ServiceProcess] = {}

    @property
    def address(self) -> str:
        """The address of the master, or of all masters: what clients need."""
        return ",".join(process.address for process in self._named("master"))

    @property
    def gateway_address(self) -> str:
        """The addresses of all gateways, for clients that can reach nothing else."""
        return ",".join(process.address for process in self._named("gateway"))

    def start(self) -> None:
        """Starts everything and returns when all of it serves; after a failure, nothing is left."""
        self._take_data()
        try:
            self._start_all()
        except BaseException:
            try:
                self.stop()
            except LocalClusterError as error:
                # The cause of the failure matters, not an error while stopping.
                self._progress(str(error))
            raise

    def stop(self) -> dict[str, int]:
        """Drains and stops everything. Returns the exit codes; the data stays."""
        codes: dict[str, int] = {}
        problems: list[str] = []
        masters = self._named("master")
        callers = [*self._named("gateway"), *self._named("worker")]
        others = (*masters, *callers)
        rest = [process for process in self.processes.values() if process not in others]
        for link in self.links.values():
            link.mend()
        # Stop the masters last: the others talk to them while they drain. Gateways and workers
        # talk to all services.
        for together in (callers, rest, masters):
            for process in together:
                self._progress(f"stopping {process.name}")
                process.ask_to_stop()
            for process in together:
                try:
                    codes[process.name] = process.wait_stopped()
                except LocalClusterError as error:
                    problems.append(str(error))
        for link in self.links.values():
            link.close()
        (self._run / "local.json").unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if problems:
            raise LocalClusterError("; ".join(problems))
        return codes

    def logs(self) -> dict[str, str]:
        """What each process has logged in all its lives, by the name of the log file."""
        return {
            process.log.name: process.log.read_text(errors="replace")
            for process in self.processes.values()
        }

    def restart(self, name: str) -> None:
        """Starts a process that was killed or stopped, on its old ports."""
        process = self.processes[name]
        process.start()
        process.wait_ready(self._start_seconds)
        self._write_state()

    def wait_workers(self) -> None:
        """Returns when every worker runs its observers; their tables have to exist."""
        for worker in self._named("worker"):
            worker.wait_ready(self._start_seconds)
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
                raise LocalClusterError(f"--data: a cluster is already running on {self.data}")
            time.sleep(_LOCK_RETRY_SECONDS)
        self._lock = lock
        # Left by a launcher that was killed: another process may have its id by now.
        (self._run / "local.json").unlink(missing_ok=True)

    def _start_all(self) -> None:
        store = str(self.data / "store")
        masters = [
            self._add(name, "services.master", ["--store", store])
            for name in _numbered("master", self._masters)
        ]
        if self._port:
            masters[0].listen_on(f"127.0.0.1:{self._port}")
        self._launch(masters)
        known = ["--masters", self.address]
        found = ["--store", store, *known]
        standby = ["--standby"] if self._oracles > 1 else []
        rest = [
            self._add(name, "services.oracle", [*found, *standby])
            for name in _numbered("oracle", self._oracles)
        ]
        rest.append(self._add("lockservice", "services.lockservice", known))
        rest += [
            self._add(f"tabletserver-{number}", "services.tabletserver", found)
            for number in range(1, self._tablet_servers + 1)
        ]
        self._launch(rest)
        self._launch(self._added_gateways(known))
        # Do not wait for workers: their tables may not have been created yet.
        for worker in self._added_workers(known):
            worker.start()
        self._write_state()

    def _added_gateways(self, known: list[str]) -> list[ServiceProcess]:
        gateways = [
            self._add(name, "services.gateway", known)
            for name in _numbered("gateway", self._gateways)
        ]
        if gateways and self._port:
            gateways[0].listen_on(f"127.0.0.1:{self._port + _GATEWAY_PORT_STEP}")
        return gateways

    def _added_workers(self, known: list[str]) -> list[ServiceProcess]:
        arguments = [*known, "--observers", ",".join(self._observers)]
        return [
            self._add(name, "services.worker", arguments)
            for name in _numbered("worker", self._workers)
        ]

    def _add(self, name: str, module: str, arguments: list[str]) -> ServiceProcess:
        host = self.host_of[name] = len(self.processes) % self._hosts
        link = Link(host) if self._linked else None
        if link is not None:
            self.links[name] = link
            arguments = [*arguments, "--advertise", link.address]
        module, *more = self._program(name, module)
        arguments = [*arguments, *self._security, *more]
        process = ServiceProcess(name, module, arguments, logs=self.data / "logs", run=self._run)
        if link is not None:
            process.listen_on(link.behind)
        self.processes[name] = process
        return process

    def _named(self, kind: str) -> list[ServiceProcess]:
        return [one for name, one in self.processes.items() if name.partition("-")[0] == kind]

    def _launch(self, processes: list[ServiceProcess]) -> None:
        for process in processes:
            self._progress(f"starting {process.name}")
            process.start()
        for process in processes:
            process.wait_ready(self._start_seconds)

    def _write_state(self) -> None:
        state = {
            "pid": os.getpid(),
            "address": self.address,
            "processes": [
                {
                    "name": process.name,
                    "pid": process.pid,
                    "address": process.ready.address if process.ready else None,
                    "log": str(process.log),
                }
                for process in self.processes.values()
            ],
        }
        temporary = self._run / "local.json.tmp"
        temporary.write_text(json.dumps(state, indent=2) + "\n")
        temporary.rename(self._run / "local.json")


def _security(directory: Path) -> list[str]:
    """The flags of a server for the certificate and tokens in a directory."""
    names = {"tls-ca": "ca.pem", "tls-certificate": "certificate.pem", "tls-key": "key.pem"}
    names["tokens"] = "tokens.toml"
    return [f"--{flag}={directory.absolute() / name}" for flag, name in names.items()]


def _numbered(kind: str, count: int) -> list[str]:
    """Names of processes; the first has no number."""
    return [kind, *(f"{kind}-{number}" for number in range(2, count + 1))][:count]


def running(data: Path) -> dict[str, object] | None:
    """The state of the cluster that runs on this data directory; None if none does.

    This takes the lock for an instant to see whether it is free: a launcher that starts at this
    very moment would find it taken.
    """
    lock = data / "run" / "lock"
    if not lock.exists():
        return None
    with _open_lock(lock) as opened:
        if _is_locked(opened):
            # The lock was free: any state that is there was left by a killed launcher.
            return None
    return read_state(data)


def read_state(data: Path) -> dict[str, object]:
    """The state that the last launcher wrote; empty while one starts or stops."""
    state_file = data / "run" / "local.json"
    try:
        state: dict[str, object] = json.loads(state_file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LocalClusterError(f"--data: cannot read {state_file}: {error}") from None
    return state


def require_stopped(data: Path) -> None:
    """Raises `LocalClusterError` unless the directory holds a cluster that is not running."""
    if running(data) is not None:
        raise LocalClusterError(f"a cluster is running on {data}: stop it first")
    if not (data / "store").is_dir() or not (data / "run").is_dir():
        raise LocalClusterError(f"{data} does not hold a local cluster")


def delete(data: Path) -> None:
    """Deletes everything that a stopped cluster has left, and nothing else."""
    require_stopped(data)
    for part in ("store", "logs", "run"):
        try:
            shutil.rmtree(data / part)
        except OSError as error:
            raise LocalClusterError(f"--data: cannot delete {data / part}: {error}") from None


def make_directory(path: Path) -> None:
    """Makes a directory below the data directory."""
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
    """Tries to lock it. Returns whether it is locked by us; False if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LocalClusterError(f"--data: cannot lock {file.name}: {error.strerror}") from None
    return True
