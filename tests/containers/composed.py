"""Controls the cluster of containers of compose.yaml, and of files that change it, from outside."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from percolator.errors import PercolatorError
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of, describe
from percolator.wire.credentials import client_credentials

ROOT = Path(__file__).parents[2]
COMMAND_SECONDS = 240.0
_GONE_SECONDS = 10.0
_POLL_SECONDS = 0.05


class ContainersFailed(Exception):
    """Docker refused something, or the result is not what was requested."""


@dataclass(frozen=True)
class Container:
    """One container; its identity stays the same when it is killed and started again."""

    service: str
    id: str

    def state(self) -> dict[str, Any]:
        found = json.loads(run(["docker", "inspect", self.id]))
        state: dict[str, Any] = found[0]
        return state

    def is_running(self) -> bool:
        return bool(self.state()["State"]["Running"])

    def kill(self) -> None:
        """Kills it with SIGKILL, and checks that this is what ended it."""
        run(["docker", "kill", "--signal=KILL", self.id])
        deadline = time.monotonic() + _GONE_SECONDS
        while self.is_running():
            if time.monotonic() > deadline:
                raise ContainersFailed(f"{self.service} {self.id} runs on after kill -9")
            time.sleep(_POLL_SECONDS)
        code = self.state()["State"]["ExitCode"]
        if code != 137:
            raise ContainersFailed(f"{self.service} {self.id} exited with {code}, not by kill -9")

    def start(self) -> None:
        run(["docker", "start", self.id])

    def runs(self, *command: str) -> str:
        """The output of a command inside it."""
        return run(["docker", "exec", self.id, *command])

    def trouble(self) -> str:
        """What its own health check, made now, complains about; empty if nothing."""
        _, *check = self.state()["Config"]["Healthcheck"]["Test"]
        try:
            self.runs(*check)
        except ContainersFailed as failed:
            return f"{self.service} {self.id}: {failed}"
        return ""

    def require_contained(self) -> None:
        """Checks that it has limits, and that not even root can write outside its volumes."""
        host = self.state()["HostConfig"]
        if not (host["ReadonlyRootfs"] and host["Memory"] > 0 and host["PidsLimit"] > 0):
            raise ContainersFailed(f"{self.service} {self.id} is not contained: {host}")
        for path in ("/", "/opt/percolator/app", "/usr/local/bin"):
            try:
                run(["docker", "exec", "--user", "0", self.id, "touch", f"{path}/made-by-a-test"])
            except ContainersFailed as failed:
                if "Read-only file system" not in str(failed):
                    raise
            else:
                raise ContainersFailed(f"{self.service} {self.id} can write to {path}")

    def networks(self) -> list[str]:
        return list(self.state()["NetworkSettings"]["Networks"])

    def disconnect(self) -> list[str]:
        """Disconnects it from all networks, checks that none is left, and returns their names."""
        networks = self.networks()
        for network in networks:
            run(["docker", "network", "disconnect", network, self.id])
        if left := self.networks():
            raise ContainersFailed(f"{self.service} {self.id} is still in {left}")
        return networks

    def connect(self, networks: Sequence[str]) -> None:
        for network in networks:
            run(["docker", "network", "connect", "--alias", self.service, network, self.id])

    def log(self) -> str:
        """The log of all its lives."""
        return run(["docker", "logs", self.id], and_errors=True)


class ComposedCluster:
    """All containers of one project, whose images have to be built before."""

    def __init__(
        self,
        project: str,
        port: int,
        files: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """With the profile `demo`. `variables` are those that the files name, without the port."""
        named = [part for name in files for part in ("--file", name)]
        command = [*compose_command(), "--project-name", project, *named]
        self._compose = [*command, "--profile", "demo"]
        self._environment = {"PERCOLATOR_PORT": str(port), **(variables or {})}
        self._logs: dict[str, str] = {}
        self.address = f"127.0.0.1:{port}"

    def up(self, **replicas: int) -> None:
        """Starts this many containers of each named service; of the others, as the files say."""
        scales = [part for one in replicas.items() for part in ("--scale", "{}={}".format(*one))]
        self._run("up", "--detach", "--no-build", *scales)

    def down(self, *, even_data: bool = False) -> None:
        self._logs = self.logs()
        try:
            self._run("down", *(("--volumes",) if even_data else ()))
        except ContainersFailed as failed:
            # Docker may lose count of what was connected, and then keep an empty network forever.
            if "has active endpoints" not in str(failed) or self.containers():
                raise
            print(f"a network without containers is left behind: {failed}")

    def containers(self, service: str = "") -> list[Container]:
        listed = self._run("ps", "--quiet", *((service,) if service else ())).split()
        found = [Container("", one) for one in listed]
        return [
            Container(one.state()["Config"]["Labels"]["com.docker.compose.service"], one.id)
            for one in found
        ]

    def logs(self) -> dict[str, str]:
        """The logs of all containers, including those before the last `down`."""
        logs = {f"{one.service} {one.id[:12]}": one.log() for one in self.containers()}
        return self._logs | logs

    def at(self, address: str) -> Container:
        """The container that is announced at this address, which begins with the container's id."""
        host = address.partition(":")[0]
        for container in self.containers():
            if container.id.startswith(host):
                return container
        raise ContainersFailed(f"no container is behind {address}")

    def _run(self, *arguments: str) -> str:
        return run([*self._compose, *arguments], environment=self._environment)


def free_port() -> int:
    """A free port on this machine, for what is published."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compose_command() -> list[str]:
    """The new Compose if it is installed, otherwise the old one."""
    if shutil.which("docker"):
        tried = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if tried.returncode == 0:
            return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise ContainersFailed("neither `docker compose` nor `docker-compose` is installed")


def run(
    command: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    and_errors: bool = False,
) -> str:
    """The output of a command; the error for a failure shows the command's own output."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    if done.returncode:
        raise ContainersFailed(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    return done.stdout + (done.stderr if and_errors else "")


# The members of a cluster of containers, as described through its published port.

START_SECONDS = 120.0

KINDS = {
    "master": ServiceKind.SERVICE_KIND_MASTER,
    "oracle": ServiceKind.SERVICE_KIND_ORACLE,
    "lockservice": ServiceKind.SERVICE_KIND_LOCK_SERVICE,
    "tabletserver": ServiceKind.SERVICE_KIND_TABLET_SERVER,
    "worker": ServiceKind.SERVICE_KIND_WORKER,
}


async def until_described(address: str, wanted: Mapping[str, int]) -> None:
    """Returns when at least the wanted number of each kind are there."""
    network = GrpcNetwork(client_credentials())
    deadline = time.monotonic() + START_SECONDS
    try:
        while True:
            missing: object
            try:
                cluster = await describe(network, [address], 1.0)
                missing = {
                    kind: count
                    for kind, count in wanted.items()
                    if len(addresses_of(cluster, KINDS[kind])) < count
                }
            except PercolatorError as error:
                missing = error
            if not missing:
                return
            assert time.monotonic() < deadline, f"not complete: {missing}"
            await asyncio.sleep(0.1)
    finally:
        await network.close()
