"""A whole cluster on this machine: every service a process, all below one data directory."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Self

from percolator.bigtable.place import parse_place
from percolator.bucket.place import parse_cluster_bucket
from percolator.errors import InvalidArgument
from percolator.services.local import directory
from percolator.services.local.link import Link
from percolator.services.local.process import LocalClusterError, ServiceProcess

START_SECONDS = 300.0
"""The longest start of one process: far more than any takes that works."""
IDLE_SECONDS = 30.0
"""A process that starts and does nothing for so long is not waited for any longer."""
"""How long a process may take until it serves, by default."""

Program = Callable[[str, str], Sequence[str]]
"""The program of a process, by its name and its service: the service or a module in its place, with
further arguments."""

_GATEWAY_PORT_STEP = 10
"""If the master has its usual port, 7100, the first gateway has its usual port too, 7110."""


class LocalCluster:
    """Starts, stops and hurts the processes of one local cluster. Not for several threads."""

    def __init__(
        self,
        data: Path,
        *,
        store: str = "",
        tablet_servers: int = 3,
        port: int = 0,
        masters: int = 1,
        oracles: int = 1,
        gateways: int = 0,
        workers: int = 0,
        observers: Sequence[str] = (),
        links: bool = False,
        hosts: int = 1,
        program: Program = lambda name, service: (service,),
        certificates: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """The cluster keeps everything in `data` or, with an address such as
        bigtable://project/instance, there: then it has no tablet servers, and only logs in `data`.
        With s3://bucket/prefix, tablet servers have their caches in `data`.

        All masters and oracles but one are standbys. With `links`, the links between
        processes can be cut, and the processes are spread over `hosts` hosts, each with an address
        of its own.

        With a directory of `percolator certs`, everything uses mutual TLS, and clients need tokens.
        Workers run the lists of observers that `observers` names, as soon as their tables exist.
        A process that does not serve within `start_seconds`, or that does nothing for 30 s before
        it serves, is an error.
        """
        if not 0 < start_seconds < inf:
            raise LocalClusterError(f"start_seconds: expected more than 0, got {start_seconds}")
        if tablet_servers < 0:
            raise LocalClusterError(f"tablet servers: expected 0 or more, got {tablet_servers}")
        self._in_bucket = bool(store) and _is_bucket(store)
        if store and not self._in_bucket and tablet_servers:
            raise LocalClusterError(
                f"--tablet-servers: expected 0, since {store} has the cells; got {tablet_servers}"
            )
        if links and port:
            raise LocalClusterError("a master behind a link has the port of its link")
        if gateways < 0:
            raise LocalClusterError(f"gateways: expected 0 or more, got {gateways}")
        if workers < 0 or bool(workers) != bool(observers):
            raise LocalClusterError("workers and observers: expected both of them, or neither")
        self.data = data.absolute()
        self._store = store or str(self.data / "store")
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
        self._ownership: directory.Ownership | None = None
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
        self._ownership = directory.Ownership(self.data, self._progress)
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
        directory.forget_state(self.data)
        if self._ownership is not None:
            self._ownership.release()
            self._ownership = None
        if problems:
            raise LocalClusterError("; ".join(problems))
        return codes

    def logs(self) -> dict[str, str]:
        """The log of each process in all its lives, by the name of the log file."""
        return {
            process.log.name: process.log.read_text(errors="replace")
            for process in self.processes.values()
        }

    def restart(self, name: str) -> None:
        """Starts a process that was killed or stopped, on its old ports."""
        process = self.processes[name]
        process.start()
        process.wait_ready(self._start_seconds)
        self.write_state()

    def wait_workers(self) -> None:
        """Returns when every worker runs its observers; their tables have to exist."""
        for worker in self._named("worker"):
            worker.wait_ready(self._start_seconds)
        self.write_state()

    def reload_workers(self) -> None:
        """Starts every worker again, so that it imports its observers anew. Does not wait."""
        for worker in self._named("worker"):
            worker.ask_to_stop()
        for worker in self._named("worker"):
            worker.wait_stopped()
            worker.start()
        self.write_state()

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

    def _start_all(self) -> None:
        if self._port:
            _require_free(self._port)
        if self._port and self._gateways:
            _require_free(self._port, _GATEWAY_PORT_STEP)
        store = self._store
        masters = [
            self._add(name, "master", ["--store", store])
            for name in _numbered("master", self._masters)
        ]
        if self._port:
            masters[0].listen_on(f"127.0.0.1:{self._port}")
        self._launch(masters)
        known = ["--masters", self.address]
        found = ["--store", store, *known]
        standby = ["--standby"] if self._oracles > 1 else []
        rest = [
            self._add(name, "oracle", [*found, *standby])
            for name in _numbered("oracle", self._oracles)
        ]
        rest.append(self._add("lockservice", "lockservice", known))
        rest += [
            self._add(name, "tabletserver", [*found, *self._cache(name)])
            for name in (f"tabletserver-{number + 1}" for number in range(self._tablet_servers))
        ]
        self._launch(rest)
        self._launch(self._added_gateways(known))
        # Do not wait for workers: their tables may not have been created yet.
        for worker in self._added_workers(known):
            worker.start()
        self.write_state()

    def _cache(self, name: str) -> list[str]:
        return ["--cache", str(self.data / "run" / f"{name}.cache")] if self._in_bucket else []

    def _added_gateways(self, known: list[str]) -> list[ServiceProcess]:
        gateways = [
            self._add(name, "gateway", known) for name in _numbered("gateway", self._gateways)
        ]
        if gateways and self._port:
            gateways[0].listen_on(f"127.0.0.1:{self._port + _GATEWAY_PORT_STEP}")
        return gateways

    def _added_workers(self, known: list[str]) -> list[ServiceProcess]:
        arguments = [*known, "--observers", ",".join(self._observers)]
        return [self._add(name, "worker", arguments) for name in _numbered("worker", self._workers)]

    def _add(self, name: str, service: str, arguments: list[str]) -> ServiceProcess:
        host = self.host_of[name] = len(self.processes) % self._hosts
        link = Link(host) if self._linked else None
        if link is not None:
            self.links[name] = link
            arguments = [*arguments, "--advertise", link.address]
            if service in _FRAMED:
                arguments += ["--frames-listen", link.frames_behind]
        program, *more = self._program(name, service)
        arguments = [*arguments, *self._security, *more]
        process = ServiceProcess(
            name,
            program,
            arguments,
            logs=self.data / "logs",
            run=self.data / "run",
            inherited=() if self._ownership is None else (self._ownership.shared,),
        )
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
            process.wait_ready(self._start_seconds, idle_seconds=IDLE_SECONDS, say=self._progress)

    def write_state(self) -> None:
        """Tells other programs which process runs where, and which has ended."""
        state = {
            "pid": os.getpid(),
            "address": self.address,
            "gateway_address": self.gateway_address,
            "observers": list(self._observers),
            "processes": [
                {
                    "name": process.name,
                    "pid": process.pid,
                    "address": process.address if process.serves else None,
                    "exit_code": process.exit_code,
                    "log": str(process.log),
                }
                for process in self.processes.values()
            ],
        }
        directory.write_state(self.data, state)


def _is_bucket(store: str) -> bool:
    """True for a bucket, False for a row store. A directory would be one without tablet servers,
    where nothing ever works."""
    try:
        if parse_cluster_bucket(store, "--store") is not None:
            return True
        parse_place(store, field="--store")
    except InvalidArgument as error:
        raise LocalClusterError(error.message) from None
    return False


_FRAMED = ("oracle", "tabletserver")
"""The services that also take calls in frames."""


def _security(directory: Path) -> list[str]:
    """The flags of a server for the certificate and tokens in a directory."""
    names = {"tls-ca": "ca.pem", "tls-certificate": "certificate.pem", "tls-key": "key.pem"}
    names["tokens"] = "tokens.toml"
    return [f"--{flag}={directory.absolute() / name}" for flag, name in names.items()]


def _numbered(kind: str, count: int) -> list[str]:
    """Names of processes; the first has no number."""
    return [kind, *(f"{kind}-{number}" for number in range(2, count + 1))][:count]


def _require_free(first: int, step: int = 0) -> None:
    """Looked at before anything starts, because a service can only say that it may not listen."""
    port = first + step
    whose = f", the gateway's ({first} + {step})," if step else ""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise LocalClusterError(f"--port: {port}: {error.strerror}") from None
            raise LocalClusterError(
                f"--port: {port}{whose} is in use by another program: stop that, or pass "
                "another port; --port 0 takes free ones"
            ) from None
