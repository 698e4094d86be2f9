"""Starts a cluster and keeps it until it is to stop: in this process, or in one in the
background."""

from __future__ import annotations

import ast
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from percolator.process import private_opener
from percolator.services.local import directory
from percolator.services.local.cluster import START_SECONDS, LocalCluster
from percolator.services.local.directory import data_option, running
from percolator.services.local.process import (
    COMMAND_LINE,
    STILL_STARTING,
    LocalClusterError,
    NotReadyInTime,
    ServiceProcess,
    environment,
)

Stamp = tuple[int, int]


class Sources:
    """Notices changes in the files of the observers that workers run: then workers restart.

    For `shop:observers`, these are `shop.py` or everything in the package `shop`, and whatever they
    import from the same directory. Nothing is executed: a module that does not import is exactly
    what is about to be corrected.
    """

    def __init__(self, references: Sequence[str], here: Path) -> None:
        """`references` are lists of observers, as module:name; modules may also be `here`."""
        self._modules = sorted({one.partition(":")[0].partition(".")[0] for one in references})
        self._here = here
        self._imports: dict[Path, tuple[Stamp, set[str]]] = {}
        """The modules that a file imports, read again only if it changed."""
        self._seen = self._stamps()

    def changed(self) -> list[Path]:
        """The files that were changed, added or removed since the last call."""
        before, self._seen = self._seen, self._stamps()
        return sorted({path for path, _ in before.items() ^ self._seen.items()})

    def _stamps(self) -> dict[Path, Stamp]:
        found: dict[Path, Stamp] = {}
        bases = [self._here, *map(Path, sys.path)]
        for module in self._modules:
            base = next((one for one in bases if any(_files(one, module))), None)
            if base is not None:
                self._add(base, module, found, set())
        return found

    def _add(self, base: Path, module: str, found: dict[Path, Stamp], added: set[str]) -> None:
        """Adds the files of a module, and of the modules in its directory that it imports."""
        if module in added:
            return
        added.add(module)
        for path in _files(base, module):
            try:
                status = path.stat()
                found[path] = stamp = (status.st_mtime_ns, status.st_size)
                imports = self._imports_of(path, stamp)
            except OSError:
                continue  # removed just now
            for imported in imports:
                self._add(base, imported, found, added)

    def _imports_of(self, path: Path, stamp: Stamp) -> set[str]:
        known, imports = self._imports.get(path, (None, set[str]()))
        if known != stamp:
            found = _imports(path.read_bytes())
            if found is not None:  # otherwise those of before: they have not been removed
                imports = found
            self._imports[path] = (stamp, imports)
        return imports


def names(paths: Iterable[Path]) -> str:
    """The names of files, for people."""
    return ", ".join(sorted({path.name for path in paths}))


def _files(base: Path, module: str) -> Iterator[Path]:
    """A package before a file of the same name, as Python finds them."""
    package, file = base / module, base / f"{module}.py"
    if package.is_dir() and (not file.is_file() or (package / "__init__.py").is_file()):
        yield from package.rglob("*.py")
    elif file.is_file():
        yield file


def _imports(source: bytes) -> set[str] | None:
    """The first parts of the names of imported modules; None if the source is not Python."""
    try:
        parsed = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    found = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


CarryOut = Callable[[str, str], str]
"""Carries out an action on the named process, and returns the text of the answer."""

_NAME = "control"
_REQUEST_SECONDS = 1.0
"""A request is one write: a connection that sends nothing must not block the launcher."""
_ANSWER_SECONDS = 90.0
"""Longer than a process takes to stop and to start again."""
_BYTES_MAX = 64 << 10


class Control:
    """Takes requests to a running launcher: to kill one of its processes, or to start one again.

    The launcher is the parent of its processes and keeps their ports: it alone knows that a process
    id is still that of its process, and can start it where its callers look for it. It listens on a
    Unix socket, DATA/run/control; a request and its answer are one line of JSON each.
    """

    def __init__(self, data: Path) -> None:
        self._path = data / "run" / _NAME
        # Left by a launcher that was killed.
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        with _short(self._path) as path:
            self._socket.bind(path)
        self._path.chmod(0o600)
        self._socket.listen()

    def serve(self, seconds: float, carry_out: CarryOut) -> None:
        """Carries out one request, if there is one within so many seconds."""
        readable, _, _ = select.select([self._socket], [], [], seconds)
        if not readable:
            return
        asking, _ = self._socket.accept()
        with asking:
            asking.settimeout(_REQUEST_SECONDS)
            try:
                request = _received(asking)
                answer = _answered(request["action"], request["name"], carry_out)
                _send(asking, answer)
            except (OSError, ValueError, KeyError, TypeError):
                # Who asked is gone, or is no `percolator dev`: nothing to answer to.
                return

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)


def ask(data: Path, action: str, name: str) -> str:
    """Asks the launcher of a running cluster. Returns what it told."""
    state = running(data)
    if state is None:
        raise LocalClusterError(
            f"no cluster is running on {data}: `percolator dev{data_option(data)}` starts one"
        )
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(_ANSWER_SECONDS)
        try:
            with _short(data / "run" / _NAME) as path:
                asked.connect(path)
            _send(asked, {"action": action, "name": name})
            answer = _received(asked)
        except (OSError, ValueError):
            raise LocalClusterError(
                f"the launcher of {data} did not answer: it is starting, stopping, or was killed"
            ) from None
    if "error" in answer:
        raise LocalClusterError(answer["error"])
    return answer["told"]


def _answered(action: str, name: str, carry_out: CarryOut) -> dict[str, str]:
    try:
        return {"told": carry_out(action, name)}
    except LocalClusterError as error:
        return {"error": str(error)}


def _send(to: socket.socket, message: dict[str, str]) -> None:
    to.sendall((json.dumps(message) + "\n").encode())


def _received(sent_by: socket.socket) -> dict[str, str]:
    with sent_by.makefile("rb") as lines:
        message: dict[str, str] = json.loads(lines.readline(_BYTES_MAX))
    return message


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Another name of a socket: its address takes 107 bytes, and directories are deep."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


_LOOK_SECONDS = 0.25


class Session:
    """A launcher while its cluster runs, until it has to stop: it carries out requests, tells of
    processes that ended, and starts workers anew when their observers change.
    """

    def __init__(
        self, cluster: LocalCluster, observers: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._say = say
        self._sources = Sources(observers, Path.cwd())
        self._told: set[int] = set()
        """The processes whose end was told, or asked for."""
        self._waiting = self._workers()
        """Workers that do not run their observers yet."""

    def run(self, leave: threading.Event) -> None:
        """Returns when it is time to leave."""
        control = Control(self._cluster.data)
        try:
            while not leave.is_set():
                control.serve(_LOOK_SECONDS, self._carry_out)
                self._tell_of_ends()
                self._tell_of_workers()
                self._reload()
        finally:
            control.close()

    def _carry_out(self, action: str, name: str) -> str:
        process = self._cluster.processes.get(name)
        if process is None:
            known = ", ".join(self._cluster.processes)
            raise LocalClusterError(f"there is no process {name!r}; there are {known}")
        if action == "kill":
            return self._kill(process)
        if action == "restart":
            return self._restart(process)
        raise LocalClusterError(f"this launcher does not know {action!r}: start it again")

    def _kill(self, process: ServiceProcess) -> str:
        if process.exit_code is not None:
            raise LocalClusterError(f"{process.name} is not running: restart starts it again")
        process.kill()
        self._told.add(process.pid)
        self._cluster.write_state()
        self._say(f"{process.name} (process {process.pid}) is killed, as asked")
        return f"killed {process.name} (process {process.pid})"

    def _restart(self, process: ServiceProcess) -> str:
        if process.exit_code is None:
            process.ask_to_stop()
            process.wait_stopped()
        if process.name in self._workers():
            # Not ready before its tables exist, which may be never.
            process.start()
            self._waiting[process.name] = process
            self._cluster.write_state()
        else:
            self._cluster.restart(process.name)
        self._say(f"{process.name} runs again, as process {process.pid}")
        return f"{process.name} runs as process {process.pid}"

    def _tell_of_ends(self) -> None:
        for process in self._cluster.processes.values():
            if process.exit_code is not None and process.pid not in self._told:
                self._told.add(process.pid)
                self._waiting.pop(process.name, None)
                self._cluster.write_state()
                self._say(f"{process.name} exited with {process.exit_code}: {process.last_words()}")

    def _tell_of_workers(self) -> None:
        for name, worker in list(self._waiting.items()):
            if worker.is_ready():
                del self._waiting[name]
                self._cluster.write_state()
                self._say(f"{name} runs its observers")

    def _reload(self) -> None:
        workers = self._workers()
        changed = self._sources.changed() if workers else []
        if changed:
            self._say(f"{names(changed)} changed: workers restart")
            self._cluster.reload_workers()
            self._waiting = workers

    def _workers(self) -> dict[str, ServiceProcess]:
        return {
            name: process
            for name, process in self._cluster.processes.items()
            if name.partition("-")[0] == "worker"
        }


_POLL_SECONDS = 0.05
_ERROR = "error: "


@dataclass(frozen=True)
class Plan:
    """The processes that a cluster has."""

    store: str
    """Where the cluster keeps everything; empty: in the data directory."""
    tablet_servers: int
    gateways: int
    workers: int
    observers: Sequence[str]
    port: int
    certificates: Path | None
    start_seconds: float = START_SECONDS

    def __post_init__(self) -> None:
        for reference in self.observers:
            module, _, name = reference.partition(":")
            if not module or not name:
                raise LocalClusterError(
                    f"--observers: expected module:name, such as shop:observers, got {reference!r}"
                )

    def options(self) -> list[str]:
        """The plan as options of the command."""
        options = ["--tablet-servers", str(self.tablet_servers), "--gateways", str(self.gateways)]
        options += ["--store", self.store] if self.store else []
        options += ["--workers", str(self.workers), "--port", str(self.port)]
        options += [f"--observers={reference}" for reference in self.observers]
        if self.certificates is not None:
            options += ["--certificates", str(self.certificates)]
        options += ["--start-timeout", str(self.start_seconds)]
        return options


def run(
    data: Path,
    plan: Plan,
    say: Callable[[str], None],
    show: Callable[[directory.State], None],
) -> dict[str, int]:
    """Starts a cluster, and shows its state. Once it was told to stop, returns the exit codes of
    the processes that still ran."""
    cluster = LocalCluster(
        data,
        store=plan.store,
        tablet_servers=plan.tablet_servers,
        gateways=plan.gateways,
        workers=plan.workers,
        observers=plan.observers,
        port=plan.port,
        certificates=plan.certificates,
        progress=say,
        start_seconds=plan.start_seconds,
    )
    # Registered before anything starts: Ctrl-C while starting must stop what was started.
    leave = _told_to_leave(cluster)
    try:
        cluster.start()
    except NotReadyInTime as error:
        raise LocalClusterError(f"{error}; --start-timeout allows more time") from None
    show(directory.read_state(cluster.data))
    try:
        Session(cluster, plan.observers, say).run(leave)
    finally:
        # Told before, or killed as asked: how these ended says nothing about the stop.
        ended = {name for name, one in cluster.processes.items() if one.exit_code is not None}
        codes = cluster.stop()
    return {name: code for name, code in codes.items() if name not in ended}


def detach(data: Path, plan: Plan, say: Callable[[str], None]) -> directory.State:
    """Starts it with a launcher in the background. Returns its state once all of it serves."""
    if directory.running(data) is not None:
        raise LocalClusterError(directory.already_running(data))
    directory.make_data_directory(data)
    log_file = data / "logs" / "launcher.log"
    command = [
        sys.executable,
        "-P",
        "-m",
        COMMAND_LINE,
        "dev",
        "--data",
        str(data),
        *plan.options(),
    ]
    with open(log_file, "wb", opener=private_opener) as log:
        launcher = subprocess.Popen(  # noqa: S603 - our own module, and no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment(),
        )
    told = 0
    # It gives up by itself if a service does not start in time.
    while launcher.poll() is None:
        state = directory.read_state(data)
        if state.get("pid") == launcher.pid:
            return state
        waiting = [line for line in log_file.read_text().splitlines() if STILL_STARTING in line]
        for line in waiting[told:]:
            say(line)
        told = len(waiting)
        time.sleep(_POLL_SECONDS)
    words = log_file.read_text().strip().splitlines()
    last = words[-1] if words else "the launcher exited"
    raise LocalClusterError(last.removeprefix(_ERROR))


def _told_to_leave(cluster: LocalCluster) -> threading.Event:
    """Set by Ctrl-C, SIGTERM, or a terminal that is closed. The second time, nothing is drained."""
    leave = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if leave.is_set() and number != signal.SIGHUP:
            for process in cluster.processes.values():
                process.end_at_once()
        leave.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, on_signal)
    return leave
