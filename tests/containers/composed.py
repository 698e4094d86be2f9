"""Controls the cluster of containers of compose.yaml, and of files that change it, from outside."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from percolator.errors import PercolatorError
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of, describe
from percolator.wire.credentials import client_credentials
from tests.chaos.supervisor import RECOVERY_SECONDS_MAX, Supervisor, leader

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
        """The complaint of its own health check, made now; empty if there is none."""
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


# What is done to containers, one thing at a time; each fault shows that it had an effect.
#
# The recovery time is measured from the injection until everything can be read, and written in
# every tablet, through the published port; it includes the restart of a container if no other can
# take over.

LONGER_THAN_LEASES_SECONDS = 4.5


@dataclass(frozen=True)
class Scene:
    """Everything that a fault may hurt, and the supervisor that watches."""

    cluster: ComposedCluster
    supervisor: Supervisor

    async def missed_most(self, kind: str) -> Container:
        """The most important container of a kind: the leader, or the owner of the most tablets."""
        if kind == "gateway":
            return self.cluster.containers("gateway")[0]
        described = await describe(
            self.supervisor.network, [self.cluster.address], RECOVERY_SECONDS_MAX
        )
        addresses = addresses_of(described, KINDS[kind])
        if kind in ("master", "oracle"):
            address = await leader(self.supervisor.network, kind, addresses)
        elif kind == "tabletserver":
            address = await self.supervisor.owner_of_most(addresses)
        else:
            address = addresses[-1]
        return await asyncio.to_thread(self.cluster.at, address)

    async def recovered_since(self, began: float) -> float:
        await self.supervisor.recovered()
        return time.monotonic() - began


class Fault(ABC):
    """One kind of fault, on one kind of container."""

    name: str

    @abstractmethod
    async def inject(self, scene: Scene) -> float:
        """Injects the fault, repairs, and returns the seconds until everything worked again."""


class Kill(Fault):
    """kill -9; restarted after others have taken over, or at once if no other can."""

    def __init__(self, kind: str, *, replaced: bool) -> None:
        leading = "leading " if kind in ("master", "oracle") else ""
        self.name = f"kill -9 of a {leading}{kind}"
        self._kind = kind
        self._replaced = replaced

    async def inject(self, scene: Scene) -> float:
        victim = await scene.missed_most(self._kind)
        began = time.monotonic()
        await asyncio.to_thread(victim.kill)
        if not self._replaced:
            await asyncio.to_thread(victim.start)
        seconds = await scene.recovered_since(began)
        if self._replaced:
            await asyncio.to_thread(victim.start)
        return seconds


class Disconnect(Fault):
    """A tablet server loses its network until all its leases have expired, then gets it back."""

    name = "disconnection of a tabletserver"

    async def inject(self, scene: Scene) -> float:
        victim = await scene.missed_most("tabletserver")
        host = victim.id[:12]
        began = time.monotonic()
        networks = await asyncio.to_thread(victim.disconnect)
        try:
            seconds = await scene.recovered_since(began)
            if any(one.address.startswith(host) for one in await scene.supervisor.tablets()):
                raise ContainersFailed(
                    f"tablets are still assigned to {host}, which is disconnected"
                )
            await asyncio.sleep(max(0.0, began + LONGER_THAN_LEASES_SECONDS - time.monotonic()))
        finally:
            await asyncio.to_thread(victim.connect, networks)
        await scene.recovered_since(time.monotonic())
        return seconds


class DownAndUp(Fault):
    """All containers are removed and created again, with one more tablet server: the data stays."""

    name = "down, and up with more tablet servers"

    def __init__(self, tablet_servers: int) -> None:
        self._tablet_servers = tablet_servers

    async def inject(self, scene: Scene) -> float:
        before = {one.id for one in scene.cluster.containers()}
        began = time.monotonic()
        await asyncio.to_thread(scene.cluster.down)
        await asyncio.to_thread(scene.cluster.up, tabletserver=self._tablet_servers, loader=0)
        # A dozen processes begin at once: on a slow machine, that alone takes longer than a
        # recovery may.
        wanted = dict.fromkeys(KINDS, 1) | {"tabletserver": self._tablet_servers}
        await until_described(scene.cluster.address, wanted)
        seconds = await scene.recovered_since(began)
        if before & {one.id for one in scene.cluster.containers()}:
            raise ContainersFailed("containers have survived `down`")
        if len(scene.cluster.containers("tabletserver")) != self._tablet_servers:
            raise ContainersFailed(f"there are not {self._tablet_servers} tablet servers")
        return seconds


def all_faults(tablet_servers: int) -> list[Fault]:
    """One fault of each kind."""
    return [
        Kill("tabletserver", replaced=True),
        Disconnect(),
        Kill("oracle", replaced=True),
        Kill("master", replaced=True),
        Kill("lockservice", replaced=False),
        Kill("gateway", replaced=False),
        Kill("worker", replaced=True),
        DownAndUp(tablet_servers + 1),
    ]
