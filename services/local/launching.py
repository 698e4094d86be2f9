"""Starts a cluster and keeps it until it is to stop: in this process, or in one in the
background."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from percolator import private_files
from percolator.services.local import directory
from percolator.services.local.cluster import START_SECONDS, LocalCluster
from percolator.services.local.process import (
    COMMAND_LINE,
    STILL_STARTING,
    LocalClusterError,
    NotReadyInTime,
    environment,
)
from percolator.services.local.session import Session

_POLL_SECONDS = 0.05
_ERROR = "error: "


@dataclass(frozen=True)
class Plan:
    """Which processes a cluster has."""

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
        """The same, as options of the command."""
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
    with open(log_file, "wb", opener=private_files.opener) as log:
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
