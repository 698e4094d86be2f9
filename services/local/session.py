"""What a launcher does while its cluster runs: it carries out requests, tells of processes that
ended, and starts workers anew when their observers change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from percolator.services.local.cluster import LocalCluster
from percolator.services.local.control import Control
from percolator.services.local.process import LocalClusterError, ServiceProcess
from percolator.services.local.sources import Sources, names

_LOOK_SECONDS = 0.25


class Session:
    """One running cluster, until it has to stop."""

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
