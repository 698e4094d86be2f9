"""Starts the test service as a process, and talks to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.wire.channels import GrpcNetwork
from percolator.wire.methods import GET_TIMESTAMPS

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20.0
"""Until something that got stuck fails a test."""


@dataclass
class ServiceProcess:
    """One running process of the test service."""

    process: asyncio.subprocess.Process
    ready_file: Path
    network: GrpcNetwork

    async def ready(self) -> dict[str, Any]:
        """What the ready file says, as soon as it is there."""
        async with asyncio.timeout(SECONDS):
            while not self.ready_file.exists():
                if self.process.returncode is not None:
                    raise AssertionError(f"ended before it was ready: {await self.log()}")
                await asyncio.sleep(0.02)
        found: dict[str, Any] = json.loads(self.ready_file.read_text())
        return found

    async def call(self, milliseconds: int, address: str = "") -> GetTimestampsResponse:
        """A call that takes so long."""
        address = address or (await self.ready())["address"]
        call = self.network.unary(address, GET_TIMESTAMPS)
        return await call(GetTimestampsRequest(count=milliseconds), SECONDS)

    async def hears(self, word: str) -> None:
        """Returns when the process has said this."""
        assert self.process.stdout is not None
        async with asyncio.timeout(SECONDS):
            line = await self.process.stdout.readline()
        assert line.decode().strip() == word

    async def log(self) -> list[str]:
        """The lines that it wrote to stderr, after its end."""
        assert self.process.stderr is not None
        async with asyncio.timeout(SECONDS):
            return (await self.process.stderr.read()).decode().splitlines()

    async def log_until(self, event: str) -> dict[str, Any]:
        """The first log line of this event from here on."""
        assert self.process.stderr is not None
        async with asyncio.timeout(SECONDS):
            while line := await self.process.stderr.readline():
                entry: dict[str, Any] = json.loads(line)
                if entry["event"] == event:
                    return entry
        raise AssertionError(f"ended without logging {event!r}")

    async def exit_code(self) -> int:
        async with asyncio.timeout(SECONDS):
            return await self.process.wait()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@asynccontextmanager
async def service(directory: Path, *flags: str) -> AsyncIterator[ServiceProcess]:
    """A process with these flags; killed if it is left running."""
    ready_file = directory / "ready.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.chassis_service",
        f"--ready-file={ready_file}",
        *flags,
        cwd=ROOT,
        env={
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PERCOLATOR_", "GRPC_"))
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    network = GrpcNetwork()
    try:
        yield ServiceProcess(process, ready_file, network)
    finally:
        await network.close()
        with suppress(ProcessLookupError):
            process.kill()
        # Reads what is left, too: a pipe that nobody reads would be reported as a leak.
        await process.communicate()


async def health(address: str, name: str = "") -> int:
    """The status that the health service tells."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=SECONDS)
        return int(answer.status)


SERVING = int(health_pb2.HealthCheckResponse.SERVING)
NOT_SERVING = int(health_pb2.HealthCheckResponse.NOT_SERVING)
